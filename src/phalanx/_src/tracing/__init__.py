# SPDX-License-Identifier: Apache-2.0
"""Traces functions that read and write Keras variables, so that they can be compiled as programs."""
