# SPDX-License-Identifier: Apache-2.0
"""Implements `phalanx migrate`, which rewrites a program of tf.distribute as a Phalanx program."""
