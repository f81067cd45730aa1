# SPDX-License-Identifier: Apache-2.0
"""Failure detection: each process monitors the others while they train, and reports the first that dies or stalls.

In: heartbeats, connections that close, and progress. Out: one verdict for the group, which names the rank and the reason. All
processes agree on it, and on the members of the next group.
"""
