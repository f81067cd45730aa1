# SPDX-License-Identifier: Apache-2.0
"""Devices, their mesh, and the values that are placed on it."""
