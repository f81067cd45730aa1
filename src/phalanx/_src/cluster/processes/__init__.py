# SPDX-License-Identifier: Apache-2.0
"""The processes of a cluster as the operating system shows them: which belong to us, and which are ending or will be preempted.

In: process ids and notices of the machine. Out: processes to end, and reasons. No other process is ended.
"""
