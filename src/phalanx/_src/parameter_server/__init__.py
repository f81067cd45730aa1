# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: their processes, the variables that they hold, and waiting for their answers.

In: variables, tables and steps of the coordinator. Out: processes with shards of variables (`processes`, `remote`), reads and pushes of their values
(`variables`), and steps on whichever worker is free (`scheduling`). Each update is applied once, even if a worker or a server is lost.
"""
