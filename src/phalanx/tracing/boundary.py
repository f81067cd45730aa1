# SPDX-License-Identifier: Apache-2.0
"""How the values that replicas hold of a variable become one at the end of a program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.collectives import packing, primitives
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.mesh.values import RowMask
from phalanx.tracing.discovery import Entry
from phalanx.tracing.policy import Combine, Policy


def combine(entries: Sequence[Entry], padding: RowMask | None) -> list[Any]:
    """Makes one value of what each replica holds of some variables, through one shared buffer a dtype.

    Args:
      entries: the variables.
      padding: which rows of this replica are real; one without any has no part in means.
    """
    prepared = []
    for e in entries:
        x = e.value.astype(jnp.int32) if e.value.dtype == jnp.bool_ else e.value
        if e.policy.combine is Combine.FIRST:
            x = primitives.only_on(0, x)
        elif e.policy.combine is Combine.MEAN and padding is not None:
            x = jnp.where(padding.has_rows, x, 0)
        prepared.append(x)
    packs = packing.by_length([str(x.dtype) for x in prepared])
    divisor: Any = lax.axis_size(REPLICA_AXIS)
    # A sum over one replica of several devices is one that XLA cannot divide between them.
    sums = prepared
    if divisor > 1:
        sums = primitives.packed(lambda buffers: list(lax.psum(buffers, REPLICA_AXIS)), prepared, packs)
    if divisor > 1 and padding is not None and any(e.policy.combine is Combine.MEAN for e in entries):
        divisor = jnp.maximum(lax.psum(padding.has_rows.astype(jnp.float32), REPLICA_AXIS), 1)
    combined = []
    for e, total in zip(entries, sums, strict=True):
        value = total
        if e.policy.combine is Combine.MEAN:
            mean = total / divisor
            value = mean if padding is None else jnp.where(padding.count > 0, mean, e.initial)
        combined.append(value.astype(e.value.dtype))
    return combined


def first_component(policy: Policy, value: jax.Array) -> jax.Array:
    """Returns what one replica holds of `value`, so that the replicas' components combine to it."""
    return primitives.only_on(0, value) if policy.on_read and policy.combine is Combine.SUM else value
