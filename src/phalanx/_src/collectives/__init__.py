# SPDX-License-Identifier: Apache-2.0
"""Collective communication between the replicas of one program.

In: an array or a pytree per replica. Out: sums, means and concatenations, as operations of XLA. Gradients take a path that composes: summed, compressed,
accumulated or local (`gradient_path`). All replicas call the same collectives in the same order, and one replica and many give the same dtype.
"""
