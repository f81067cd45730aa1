# SPDX-License-Identifier: Apache-2.0
"""Cluster resolvers, one per file. A resolver finds out which cluster a process belongs to."""
