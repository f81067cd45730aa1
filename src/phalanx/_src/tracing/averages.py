# SPDX-License-Identifier: Apache-2.0
"""Means over the real rows of the global batch. Each replica computes its share from its own rows."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx._src.collectives import primitives
from phalanx._src.collectives.dtypes import term
from phalanx._src.options import ReduceOp
from phalanx._src.tracing.context import ReplicaContext
from phalanx.errors import InvalidArgumentError


def share_of_loss(replica: ReplicaContext, total: jax.Array, count: jax.Array | None) -> jax.Array:
    """Returns a replica's share of a loss over the global batch, divided by the weight that Keras's trainer multiplies it by.

    Args:
      replica: context of the replica.
      total: the sum of the values of this replica.
      count: how much they count in what a mean divides by. None for a sum.
    """
    share = total if count is None else _divide_or_zero(total, sum_over_replicas(replica, count))
    return _divide_or_zero(share, jnp.asarray(replica.weight, total.dtype))


def weight_of_mean(replica: ReplicaContext, weight: jax.Array | None) -> jax.Array | float:
    """Returns the weight that a mean over one replica's rows has among the means of all replicas.

    Args:
      replica: context of the replica.
      weight: the weight that the user passed, or None. It is reduced by the share of padding in the batch.
    """
    if weight is None:
        return replica.weight
    return weight if replica.example_mask is None else weight * replica.example_mask.mean()


def sum_over_replicas(replica: ReplicaContext, value: jax.Array) -> jax.Array:
    """Returns the sum of a value over the replicas that have rows."""
    rows = replica.rows
    counts = None if rows is None else rows.has_rows
    staged: jax.Array = value if rows is None else rows.staged(value)
    return primitives.all_reduce(ReduceOp.SUM, staged, replica.num_replicas_in_sync, counts=counts)


def moments(
    replica: ReplicaContext, values: jax.Array, counts: jax.Array, axes: Sequence[int], *, everywhere: bool
) -> tuple[Any, Any]:
    """Returns the mean and the variance of the values that count.

    Args:
      replica: context of the replica.
      values: array (per_replica_batch, ...).
      counts: bool array of the same shape. True for values that count.
      axes: dims to reduce.
      everywhere: whether to reduce over all replicas.
    """

    def mean(x: jax.Array) -> jax.Array:
        total = jnp.where(counts, x, 0).sum(axis=tuple(axes), keepdims=True)
        return summed(total) / count

    dtype, values = values.dtype, term(ReduceOp.MEAN, values)
    summed = functools.partial(sum_over_replicas, replica) if everywhere else lambda x: x
    local_count = counts.sum(axis=tuple(axes), keepdims=True).astype(values.dtype)
    # At least 1, so that a batch of padding alone gives zeros and not NaNs.
    count = jnp.maximum(summed(local_count), 1)
    # A second all-reduce for the squares around the mean: E[x²] - E[x]² would cancel badly in float32.
    center = mean(values)
    variance = mean(jnp.square(values - center))
    return center.squeeze(tuple(axes)).astype(dtype), variance.squeeze(tuple(axes)).astype(dtype)


def check_loss(name: str, reduction: str, *, replicas: int) -> None:
    """Rejects a loss that is a mean over the rows of one replica if there are several replicas.

    Raises:
      InvalidArgumentError: there are several replicas.
    """
    if replicas > 1:
        raise InvalidArgumentError(
            f"the loss {name!r} with reduction={reduction!r} in replica context",
            "it is a mean over one replica's rows, but gradients are summed over the replicas.",
            'reduction="none", then phalanx.nn.compute_average_loss(loss(y, y_pred))',
        )


def _divide_or_zero(value: jax.Array, divisor: jax.Array) -> jax.Array:
    """Returns the quotient, or zero if the divisor is zero."""
    # The inner `where` keeps the gradient finite: the gradient of the branch that is not selected is computed too.
    # https://jax.readthedocs.io/en/latest/faq.html#gradients-contain-nan-where-using-where
    return jnp.where(divisor == 0, 0, value / jnp.where(divisor == 0, 1, divisor))
