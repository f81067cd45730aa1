# SPDX-License-Identifier: Apache-2.0
"""Traces functions that read and write Keras variables, so that they can be compiled as programs.

In: a function, and the context in which it runs: replica, cross-replica or update. Out: a trace, the variables that it reads and writes, and for each write
the rule by which the values of the replicas become one (`policy`, `boundary`). The user's code runs while it is traced only.
"""
