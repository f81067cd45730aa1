# SPDX-License-Identifier: Apache-2.0
"""Combines the values that the replicas hold of a variable into one value, at the end of a program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from phalanx._src import compat
from phalanx._src.collectives import packing, primitives
from phalanx._src.collectives.dtypes import is_integer, mean_of_parts, parts_of_mean
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.tracing.entry import Entry
from phalanx._src.tracing.policy import Combine, Policy, policy_of
from phalanx._src.tracing.rows import ReplicaRows
from phalanx._src.typed_jax import psum


def combine(entries: Sequence[Entry], rows: ReplicaRows | None) -> list[Any]:
    """Combines the replicas' values of some variables, and returns one value per variable.

    The values cross the network in shared buffers, because one all-reduce per variable would be slower.

    Args:
      entries: the variables.
      rows: the rows of this replica, by which it counts in means of floats. A mean of integers counts the replicas that have rows.
        None if all replicas have equally many.
    """
    prepared = []
    for entry in entries:
        # An all-reduce does not sum bools.
        x = entry.value.astype(jnp.int32) if entry.value.dtype == jnp.bool_ else entry.value
        if entry.policy.combine is Combine.MEAN:
            # Replicas with more rows know more about a moving average.
            prepared.append(parts_of_mean(x, *_weight(rows, x.dtype)))
        else:
            # The sum of replica 0's value and zeros is a broadcast, and it can share a buffer with the other sums.
            if entry.policy.combine is Combine.FIRST:
                x = primitives.only_on(0, x)
            elif isinstance(entry.variable, compat.RowVariable):
                x = _placed(entry.variable, x)
            prepared.append([x])
    parts, structure = jax.tree.flatten(prepared)
    # With one replica there is nothing to sum, and XLA fails to partition a sum over an axis of size 1 if the replica spans
    # several devices. For a similar failure of `axis_index` see https://github.com/jax-ml/jax/pull/25699.
    if lax.axis_size(REPLICA_AXIS) > 1:
        packs = packing.by_length([str(x.dtype) for x in parts])
        parts = primitives.packed(lambda buffers: list(psum(buffers, REPLICA_AXIS)), parts, packs)
    combined = []
    for entry, totals in zip(entries, jax.tree.unflatten(structure, parts), strict=True):
        dtype = entry.value.dtype
        if entry.policy.combine is Combine.MEAN:
            mean = mean_of_parts(totals, _weight(rows, dtype)[1], dtype)
            # If no replica has a row, the variable keeps its value.
            combined.append(mean if rows is None or rows.total else entry.initial)
        else:
            combined.append(totals[0].astype(dtype))
    return combined


def mean_of_integers(value: jax.Array, rows: ReplicaRows | None) -> jax.Array:
    """Returns the mean of a variable of integers over the replicas that have rows, in its dtype.

    Args:
      value: the value of this replica, or its increment.
      rows: the rows of this replica. None if all replicas have equally many.
    """
    weight, count = _weight(rows, value.dtype)
    return mean_of_parts(psum(parts_of_mean(value, weight, count), REPLICA_AXIS), count, value.dtype)


def _weight(rows: ReplicaRows | None, dtype: DTypeLike) -> tuple[jax.Array | None, int]:
    """Returns how much this replica counts in the mean of a variable, or None for 1, and how much all replicas do."""
    if rows is None:
        return None, lax.axis_size(REPLICA_AXIS)
    # The rows are too many to multiply integers by them.
    if is_integer(dtype):
        return rows.has_rows, max(1, rows.num_replicas)
    return jnp.asarray(rows.number), max(1, rows.total)


def on_demand(
    variables: Sequence[Variable], values: Sequence[jax.Array | None], parts: Sequence[jax.Array | None]
) -> list[Any]:
    """Returns the values of variables, with the combined values of those that are combined on demand, whose values are None.

    Args:
      variables: the variables. The outer variable of one that is None is among them, or is ignored.
      values: their values.
      parts: their components, (num_replicas, ...), or None.
    """
    known = {id(v): x for v, x in zip(variables, values, strict=True)}
    outer = [known.get(id(compat.outer_of(v))) for v in variables]
    return [
        x if x is not None else o if o is not None else combined(policy_of(v).combine, part)
        for v, x, o, part in zip(variables, values, outer, parts, strict=True)
    ]


def combined(how: Combine, components: Any) -> jax.Array:
    """Returns the value of a variable that is combined on demand from its components, (num_replicas, ...)."""
    if how is not Combine.MEAN:
        total: jax.Array = components.sum(0).astype(components.dtype)
        return total
    count = len(components)
    return mean_of_parts([part.sum(0) for part in parts_of_mean(components, None, count)], count, components.dtype)


def first_component(policy: Policy, value: jax.Array) -> jax.Array:
    """Returns the component of one replica, such that the components of all replicas combine to `value`."""
    if policy.combine is Combine.ROWS:
        count = value.shape[0] // lax.axis_size(REPLICA_AXIS)
        return lax.dynamic_slice_in_dim(value, lax.axis_index(REPLICA_AXIS) * count, count)
    return primitives.only_on(0, value) if policy.on_read and policy.combine is Combine.SUM else value


def _placed(variable: compat.RowVariable, rows: jax.Array) -> jax.Array:
    """Returns an array of the rows of all replicas that has the rows of this one, and zeros."""
    first = lax.axis_index(REPLICA_AXIS) * rows.shape[0]
    whole = jnp.zeros(variable.whole_shape, rows.dtype)
    return lax.dynamic_update_slice_in_dim(whole, rows, first, 0)
