# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises the processes of a cluster on this machine: `phalanx run`. Does not import JAX."""
