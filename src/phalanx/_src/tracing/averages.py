# SPDX-License-Identifier: Apache-2.0
"""Means over the real rows of the global batch. Each replica computes its share from its own rows."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx._src.collectives import primitives
from phalanx._src.collectives.accumulation import dtype_of, term
from phalanx._src.mesh.arrays import over_rows
from phalanx._src.options import ReduceOp
from phalanx._src.tracing.context import ReplicaContext
from phalanx.errors import InputError, InvalidArgumentError


def reduce_rows(
    replica: ReplicaContext, values: jax.Array, counts: jax.Array, reduction: str, *, is_averaging: bool
) -> jax.Array:
    """Returns a replica's share of a loss over the global batch. The shares of all replicas add up to the loss.

    Args:
      replica: context of the replica.
      values: array (per_replica_batch, ...). Losses, already multiplied by their weights. A scalar is returned unchanged.
      counts: scalar, or array that broadcasts to `values`. How much each loss counts in the divisor of a mean.
      reduction: `"sum"`, or Keras's name of a mean, such as `"sum_over_batch_size"`.
      is_averaging: True if Keras's trainer multiplies the share by the replica's weight later; False for a plain sum.

    Raises:
      InputError: the padding mask of the batch has a different number of rows than `values`.
    """
    # A scalar is a loss that the user's function has already reduced, so there are no rows to mask.
    if values.ndim == 0:
        return values
    mask = replica.example_mask
    if mask is not None and len(mask) != len(values):
        raise InputError(
            f"a Keras loss of {len(values)} rows",
            f"this batch is padded to {len(mask)} rows, so its mask does not fit the losses.",
            "return one loss per row of the batch, or compute sample_weight from get_replica_context().example_mask",
        )
    dtype, values = dtype_of(ReduceOp.MEAN, values.dtype), term(ReduceOp.MEAN, values)

    def total_of(x: jax.Array) -> jax.Array:
        return (x if mask is None else jnp.where(over_rows(mask, values), x, 0)).sum()

    total = total_of(values)
    if not is_averaging:
        return total.astype(dtype)
    divisor = jnp.ones((), values.dtype)
    if reduction != "sum" and counts.ndim == 0:
        # If all losses count equally, the divisor follows from the numbers of rows, which all replicas know. A loss may have several
        # values per row of the batch.
        rows = replica.rows
        places = len(values) if rows is None else rows.places
        total_rows = places * replica.num_replicas_in_sync if rows is None else rows.total
        divisor = counts * jnp.asarray(total_rows * values.size / max(1, places), values.dtype)
    elif reduction != "sum":
        divisor = sum_over_replicas(replica, total_of(jnp.broadcast_to(counts, values.shape)))
    # The share is already exact, but Keras's trainer multiplies it by `replica.weight` later. The second division cancels that.
    return _divide_or_zero(_divide_or_zero(total, divisor), jnp.asarray(replica.weight, values.dtype)).astype(dtype)


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
    has_rows = None if replica.rows is None else replica.rows.has_rows
    return primitives.all_reduce(ReduceOp.SUM, value, replica.num_replicas_in_sync, counts=has_rows)


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


def weight_per_row(replica: ReplicaContext) -> jax.Array:
    """Returns the weight of one real row if one replica's rows of a full batch together have the weight 1."""
    assert replica.num_examples is not None
    return jnp.asarray(replica.num_replicas_in_sync / replica.num_examples)


def _divide_or_zero(value: jax.Array, divisor: jax.Array) -> jax.Array:
    """Returns the quotient, or zero if the divisor is zero."""
    # The inner `where` keeps the gradient finite: the gradient of the branch that is not selected is computed too.
    # https://jax.readthedocs.io/en/latest/faq.html#gradients-contain-nan-where-using-where
    return jnp.where(divisor == 0, 0, value / jnp.where(divisor == 0, 1, divisor))
