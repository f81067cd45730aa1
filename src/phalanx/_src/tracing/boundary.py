# SPDX-License-Identifier: Apache-2.0
"""Combines the values that the replicas hold of a variable into one value, at the end of a program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx._src import compat
from phalanx._src.collectives import packing, primitives
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import RowMask
from phalanx._src.tracing.discovery import Entry
from phalanx._src.tracing.policy import Combine, Policy, policy_of
from phalanx._src.typed_jax import psum


def combine(entries: Sequence[Entry], padding: RowMask | None) -> list[Any]:
    """Combines the replicas' values of some variables, and returns one value per variable.

    The values cross the network in shared buffers, because one all-reduce per variable would be slower.

    Args:
      entries: the variables.
      padding: row mask of this replica's batch, or None. A replica without real rows does not count in means. If the replicas have
        unequal shares of a batch, they count by their rows.
    """
    weight = None if padding is None else padding.mask.sum() if padding.sizes else padding.has_rows
    prepared = []
    for entry in entries:
        # An all-reduce does not sum bools.
        x = entry.value.astype(jnp.int32) if entry.value.dtype == jnp.bool_ else entry.value
        if entry.policy.combine is Combine.FIRST:
            # The sum of replica 0's value and zeros is a broadcast, and it can share a buffer with the other sums.
            x = primitives.only_on(0, x)
        elif entry.policy.combine is Combine.MEAN and weight is not None:
            x = jnp.where(weight > 0, x if weight.dtype == jnp.bool_ else x * weight.astype(x.dtype), 0)
        prepared.append(x)
    packs = packing.by_length([str(x.dtype) for x in prepared])
    divisor: Any = lax.axis_size(REPLICA_AXIS)
    # With one replica there is nothing to sum, and XLA fails to partition a sum over an axis of size 1 if the replica spans
    # several devices. For a similar failure of `axis_index` see https://github.com/jax-ml/jax/pull/25699.
    sums = prepared
    if divisor > 1:
        sums = primitives.packed(lambda buffers: list(psum(buffers, REPLICA_AXIS)), prepared, packs)
    if divisor > 1 and padding is not None and any(entry.policy.combine is Combine.MEAN for entry in entries):
        assert weight is not None
        divisor = jnp.maximum(psum(weight.astype(jnp.float32), REPLICA_AXIS), 1)
    combined = []
    for entry, total in zip(entries, sums, strict=True):
        value = total
        if entry.policy.combine is Combine.MEAN:
            mean = total / divisor
            # If no replica has a real row, the variable keeps its value.
            value = mean if padding is None else jnp.where(padding.count > 0, mean, entry.initial)
        combined.append(value.astype(entry.value.dtype))
    return combined


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
    value: jax.Array = components.mean(0) if how is Combine.MEAN else components.sum(0)
    return value


def first_component(policy: Policy, value: jax.Array) -> jax.Array:
    """Returns the component of one replica, such that the components of all replicas combine to `value`."""
    return primitives.only_on(0, value) if policy.on_read and policy.combine is Combine.SUM else value
