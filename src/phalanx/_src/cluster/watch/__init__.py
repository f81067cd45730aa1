# SPDX-License-Identifier: Apache-2.0
"""Failure detection: each process monitors the others while they train, and reports the first that dies or stalls.

In: heartbeats, connections that close, and progress. Out: one verdict for the group, which names the rank and the reason
(`verdict`). A process that fails or hangs ends by itself (`departure`), or its launcher ends it. Who forms the next group of an elastic
training is decided by `phalanx._src.launch.elastic.rendezvous`.
"""
