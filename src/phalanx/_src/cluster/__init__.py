# SPDX-License-Identifier: Apache-2.0
"""Cluster description, handshake, and failure detection. Uses the standard library only."""
