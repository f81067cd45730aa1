# SPDX-License-Identifier: Apache-2.0
"""Collective communication between the replicas of one program."""
