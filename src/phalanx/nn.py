# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for custom training loops, with the function names of `tf.nn`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from phalanx._src.collectives import primitives
from phalanx._src.collectives.dtypes import dtype_of, term
from phalanx._src.mesh.arrays import over_rows
from phalanx._src.options import ReduceOp
from phalanx._src.programs.explain import explained
from phalanx._src.tracing import context
from phalanx.errors import ContextError, InvalidArgumentError, arguments, shown
from phalanx.errors.names import suggest_names
from phalanx.typing import PyTree

__all__ = ["compute_average_loss", "scale_regularization_loss"]


@explained()
def compute_average_loss(
    per_example_loss: PyTree, sample_weight: PyTree = None, global_batch_size: ArrayLike | None = None
) -> jax.Array:
    """Sums per-example losses and divides by the global batch size, so that the sum over the replicas is the mean.

    Call it in replica context, or in any context if `global_batch_size` is given. Padded rows of a short batch are
    ignored.

    Args:
      per_example_loss: array (per_replica_batch, ...) of losses. The losses of one row, for example of its tokens, are added.
      sample_weight: weights. Their leading dims must broadcast to those of the losses.
      global_batch_size: an integer of at least 0. None is the number of losses of all replicas, without those of padding.

    Returns:
      A scalar array of the dtype that `jnp.mean` gives.

    Raises:
      InvalidArgumentError: `per_example_loss` is a scalar, `global_batch_size` is negative or not an integer, or replicas have different
        numbers of rows, and the losses are not one or several per row.
      ContextError: called in cross-replica context without `global_batch_size`.
      ReduceOpError: the losses or weights are not arrays of numbers.
      TraceError: the losses were kept from another step.

    Source: tf.nn.compute_average_loss.

    Example:
      >>> import numpy as np
      >>> float(compute_average_loss(np.float32([1.0, 3.0])))
      2.0
    """
    loss = primitives.to_array(per_example_loss)
    if loss.ndim == 0:
        raise InvalidArgumentError(
            f"per_example_loss={shown(per_example_loss)}",
            "must have one loss per example, not be a scalar.",
            'loss = keras.losses.MeanSquaredError(reduction="none")',
        )
    # The mean of a float16 loss is a float16, but its sum accumulates in float32.
    dtype, loss = dtype_of(ReduceOp.MEAN, loss.dtype), term(ReduceOp.MEAN, loss)
    if sample_weight is not None:
        weight = primitives.as_array(sample_weight)
        if jnp.issubdtype(weight.dtype, jnp.complexfloating):
            raise InvalidArgumentError(f"sample_weight={shown(sample_weight)}", "must be real.", "sample_weight=None")
        weight = weight.astype(loss.dtype)
        weight = over_rows(weight, loss)
        if any(n not in (1, dim) for n, dim in zip(weight.shape, loss.shape, strict=False)) or weight.ndim > loss.ndim:
            raise InvalidArgumentError(
                f"sample_weight of shape {np.shape(sample_weight)}",
                f"does not broadcast to losses of shape {loss.shape}.",
                f"a weight per example: shape {loss.shape[:1]}",
            )
        loss = loss * weight
    replica = context.get_replica_context()
    if replica is None and global_batch_size is None:
        raise ContextError(
            "compute_average_loss was called in cross-replica context",
            "the global batch size is unknown there.",
            "global_batch_size=n, or call it in the replica function",
        )
    mask = None if replica is None else replica.example_mask
    if mask is not None:
        if mask.shape[0] != loss.shape[0]:
            raise InvalidArgumentError(
                f"per_example_loss of shape {loss.shape}",
                f"the batch is padded, and its mask has {mask.shape[0]} rows.",
                "one loss per example: dim 0 must hold the rows of the batch",
            )
        loss = jnp.where(over_rows(mask, loss), loss, 0)
    size = _size_of(loss, replica) if global_batch_size is None else _checked_size(global_batch_size)
    # A global batch without rows has the loss 0, not NaN.
    return (jnp.where(size == 0, 0, loss.sum() / jnp.maximum(size, 1)) / _own_part()).astype(dtype)


def _size_of(loss: jax.Array, replica: context.ReplicaContext | None) -> int:
    """Returns the number of losses of all replicas."""
    total = None if replica is None else replica.num_examples
    # If a replica computes with the rows of all replicas, these are all losses.
    if context.current().whole:
        return loss.shape[0]
    if replica is None or replica.rows is None or total is None:
        return loss.shape[0] * (1 if replica is None else replica.num_replicas_in_sync)
    # A step may join rows, such as real and generated ones, so that there are several losses per row.
    times, rest = divmod(loss.shape[0], max(1, replica.rows.places))
    if rest:
        raise InvalidArgumentError(
            f"per_example_loss of shape {loss.shape}",
            f"replicas have different numbers of rows, this one {replica.rows.places}, so the number of all losses is unknown.",
            "global_batch_size=n, the number of losses of all replicas",
        )
    return total * max(1, times)


@explained()
def scale_regularization_loss(regularization_loss: PyTree) -> jax.Array:
    """Sums regularization losses and divides by the number of replicas with rows, because each of them adds the same losses.

    Call it in replica context.

    Args:
      regularization_loss: an array of losses, or a list of arrays.

    Returns:
      A scalar array.

    Raises:
      ContextError: called in cross-replica context.
      ReduceOpError: a loss is not an array of numbers.
      TraceError: a loss was kept from another step.

    Source: tf.nn.scale_regularization_loss.

    Example:
      >>> float(scale_regularization_loss([1.0, 2.0]))
      3.0
    """
    replica = context.get_replica_context()
    if replica is None:
        raise ContextError(
            "scale_regularization_loss was called in cross-replica context",
            "it works only in replica context.",
            "call it in the replica function",
        )
    total = sum(term(ReduceOp.SUM, primitives.to_array(x)).sum() for x in jax.tree.leaves(regularization_loss))
    if (
        context.current().averaging
    ):  # In a `train_step`, the losses are weighted by shares of the batch, which add up to 1.
        return jnp.asarray(total)
    # What a replica without rows adds does not count.
    return jnp.asarray(total) / (
        replica.num_replicas_in_sync if replica.rows is None else max(1, replica.rows.num_replicas)
    )


def _own_part() -> jax.Array | int:
    """Returns the divisor of a loss: in a `train_step`, the weight by which the loss of this replica is multiplied."""
    mode = context.current()
    if not mode.averaging or mode.whole or mode.replica is None:
        return 1
    weight = jnp.asarray(mode.replica.weight)
    # A replica without rows has the weight 0. Its loss counts nothing, but 0 / 0 would be NaN.
    return jnp.where(weight == 0, 1, weight)


def _checked_size(size: ArrayLike) -> jax.Array:
    array = primitives.as_array(size)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentError(f"global_batch_size={shown(size)}", "must be an integer.", "global_batch_size=64")
    if arguments.is_integer(size, most=-1):  # In a step, the array has no value yet.
        raise InvalidArgumentError(f"global_batch_size={shown(size)}", "must be 0 or more.", "global_batch_size=64")
    return array


suggest_names(__name__)
