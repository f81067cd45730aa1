# SPDX-License-Identifier: Apache-2.0
"""Measurements of a user's training: its speed on some or all devices of a machine, and where the time of a step goes."""
