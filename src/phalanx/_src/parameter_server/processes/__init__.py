# SPDX-License-Identifier: Apache-2.0
"""Processes of parameter servers and workers: actors of Ray, started by the coordinator or by TF_CONFIG.

In: a cluster description. Out: handles, calls and their answers. A process ends with its coordinator, unless the launcher keeps it
for the next one.
"""
