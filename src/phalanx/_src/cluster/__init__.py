# SPDX-License-Identifier: Apache-2.0
"""Cluster description, roll call, and failure detection. Uses the standard library only."""
