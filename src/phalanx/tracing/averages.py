# SPDX-License-Identifier: Apache-2.0
"""Means over the rows of the global batch, computed by each replica from its own rows, without padding."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.collectives import primitives
from phalanx.errors import InputError, InvalidArgumentError
from phalanx.mesh.arrays import over_rows
from phalanx.options import ReduceOp
from phalanx.tracing.context import ReplicaContext


def reduce_rows(
    replica: ReplicaContext, values: jax.Array, counts: jax.Array, reduction: str, *, is_averaging: bool
) -> jax.Array:
    """Returns a replica's share of a loss over the global batch. The shares of all replicas add up to the loss.

    Args:
      replica: the replica.
      values: losses `(per_replica_batch, ...)`. A scalar is returned unchanged.
      counts: the weight of each loss in a mean: a scalar, or an array that broadcasts to `values`.
      reduction: `"sum"`, or the name of a mean in Keras.
      is_averaging: True if Keras's trainer weights the share later; False for a plain sum.

    Raises:
      InputError: the batch is padded to another number of rows.
    """
    if values.ndim == 0:  # The function has computed a mean itself.
        return values
    mask = jnp.ones(values.shape[:1], bool) if replica.padding is None else replica.padding.mask
    if len(mask) != len(values):
        raise InputError(
            f"a Keras loss of {len(values)} rows",
            f"this batch is padded to {len(mask)} rows, and its mask does not fit.",
            "losses of the rows of the batch; or a sample_weight made of get_replica_context().example_mask",
        )
    is_real = over_rows(mask, values)
    total = jnp.where(is_real, values, 0).sum()
    if not is_averaging:
        return total
    divisor = jnp.ones((), values.dtype)
    if reduction != "sum" and counts.ndim == 0:
        # The number of rows is known without a collective.
        rows = len(mask) * replica.num_replicas_in_sync if replica.num_examples is None else replica.num_examples
        divisor = counts * jnp.asarray(rows * (values.size // len(mask)), values.dtype)
    elif reduction != "sum":
        count = jnp.where(is_real, jnp.broadcast_to(counts, values.shape), 0).sum()
        divisor = primitives.all_reduce(ReduceOp.SUM, count, replica.num_replicas_in_sync)
    return _divided(_divided(total, divisor), jnp.asarray(replica.weight, values.dtype))


def weight_of_mean(replica: ReplicaContext, weight: jax.Array) -> jax.Array:
    """Returns the weight of a mean over a replica's rows among the replicas' means; `weight` is the user's, or None."""
    if weight is None:
        return replica.weight
    return weight if replica.padding is None else weight * replica.padding.mask.mean()


def moments(values: jax.Array, counts: jax.Array, axes: Sequence[int], *, replicas: int) -> tuple[Any, Any]:
    """Returns mean and variance over some dims of the values that count.

    Args:
      values: an array.
      counts: bools like `values`, True for those that count.
      axes: the dims.
      replicas: over how many replicas; 1 for this replica alone.
    """

    def mean(x: jax.Array) -> jax.Array:
        total = jnp.where(counts, x, 0).sum(axis=tuple(axes), keepdims=True)
        return primitives.all_reduce(ReduceOp.SUM, total, replicas) / count

    number = counts.sum(axis=tuple(axes), keepdims=True).astype(values.dtype)
    count = jnp.maximum(primitives.all_reduce(ReduceOp.SUM, number, replicas), 1)
    center = mean(values)
    return center.squeeze(tuple(axes)), mean(jnp.square(values - center)).squeeze(tuple(axes))


def check_loss(name: str, reduction: str, *, replicas: int) -> None:
    """Raises for a loss that is a mean over the rows of one of several replicas.

    Raises:
      InvalidArgumentError: there are several replicas.
    """
    if replicas > 1:
        raise InvalidArgumentError(
            f"the loss {name!r} with reduction={reduction!r} in replica context",
            "it is a mean over one replica's rows, and gradients are summed over the replicas.",
            'reduction="none", and phalanx.nn.compute_average_loss(loss(y, y_pred))',
        )


def count_of_a_row(replica: ReplicaContext) -> jax.Array:
    """Returns the weight of one real row, in units in which a replica's share of a full batch weighs one."""
    assert replica.num_examples is not None
    return replica.num_replicas_in_sync / replica.num_examples


def _divided(value: jax.Array, divisor: jax.Array) -> jax.Array:
    """Returns the quotient; zero if the divisor is zero."""
    return jnp.where(divisor == 0, 0, value / jnp.where(divisor == 0, 1, divisor))
