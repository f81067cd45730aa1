# SPDX-License-Identifier: Apache-2.0
"""This process: joins JAX's distributed runtime, decides how programs are dispatched, and sets what the allocator does.

In: the environment and a cluster resolver. Out: a process that is initialized, or one typed error. JAX is initialized at most once
for each group.
"""
