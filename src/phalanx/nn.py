# SPDX-License-Identifier: Apache-2.0
"""Losses of a custom training loop, under the names of `tf.nn`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives import primitives
from phalanx.errors import ContextError, InvalidArgumentError, shown
from phalanx.tracing import context


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> jax.Array:
    """Sums per-example losses and divides by the global batch size, so that the replicas' losses add up to the mean.

    In replica context; with `global_batch_size` in any. Padded rows of a short batch count for nothing, and the default
    global batch size is the number of real rows.

    Args:
      per_example_loss: losses `(per_replica_batch, ...)`.
      sample_weight: weights that broadcast to the losses, from the left.
      global_batch_size: an integer; by default the number of rows of all replicas together.

    Returns:
      A scalar.

    Raises:
      InvalidArgumentError: a scalar loss, or a global batch size that is negative or no integer.
      ContextError: in cross-replica context without `global_batch_size`.
      ReduceOpError: losses, or weights, that are not arrays of numbers.

    Source: tf.nn.compute_average_loss.

    Example:
      >>> import numpy as np
      >>> float(compute_average_loss(np.float32([1.0, 3.0])))
      2.0
    """
    loss = primitives.to_array(per_example_loss)
    if loss.ndim == 0:
        raise InvalidArgumentError(
            "per_example_loss, a scalar",
            "must have one loss an example.",
            'loss = keras.losses.MeanSquaredError(reduction="none")',
        )
    if sample_weight is not None:
        weight = primitives.as_array(sample_weight)
        if jnp.issubdtype(weight.dtype, jnp.complexfloating):
            raise InvalidArgumentError(f"sample_weight={shown(sample_weight)}", "must be real.", "sample_weight=None")
        weight = weight.astype(loss.dtype)
        weight = weight.reshape(weight.shape + (1,) * (loss.ndim - weight.ndim))
        if any(n not in (1, own) for n, own in zip(weight.shape, loss.shape, strict=False)) or weight.ndim > loss.ndim:
            raise InvalidArgumentError(
                f"sample_weight of shape {np.shape(sample_weight)}",
                f"does not broadcast to losses of shape {loss.shape}.",
                f"a weight per example: shape {loss.shape[:1]}",
            )
        loss = loss * weight
    replica = context.get_replica_context()
    if replica is None and global_batch_size is None:
        raise ContextError(
            "compute_average_loss in cross-replica context",
            "the global batch size is not known there.",
            "global_batch_size=n, or call it in the replica function",
        )
    mask = None if replica is None else replica.example_mask
    if mask is not None:
        assert replica is not None
        if mask.shape[0] != loss.shape[0]:
            raise InvalidArgumentError(
                f"per_example_loss of shape {loss.shape}",
                f"this batch is padded, and its mask has {mask.shape[0]} rows.",
                "one loss an example: dim 0 must be the rows of the batch",
            )
        loss = jnp.where(mask.reshape((-1,) + (1,) * (loss.ndim - 1)), loss, 0)
        rows: Any = replica.num_examples
    else:
        rows = loss.shape[0] * (1 if replica is None else replica.num_replicas_in_sync)
    size = rows if global_batch_size is None else _checked_size(global_batch_size)
    return (jnp.where(size == 0, 0, loss.sum() / jnp.maximum(size, 1)) / _own_part()).astype(loss.dtype)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Sums regularization losses and divides by the number of replicas, for every replica adds its own. In replica context.

    Args:
      regularization_loss: an array, or a list of arrays, of losses.

    Returns:
      A scalar.

    Raises:
      ContextError: in cross-replica context.
      ReduceOpError: a loss is not an array of numbers.

    Source: tf.nn.scale_regularization_loss.

    Example:
      >>> float(scale_regularization_loss([1.0, 2.0]))
      3.0
    """
    replica = context.get_replica_context()
    if replica is None:
        raise ContextError(
            "scale_regularization_loss in cross-replica context",
            "it is for replica context.",
            "call it in the replica function",
        )
    total = sum(primitives.as_array(x).sum() for x in jax.tree.leaves(regularization_loss))
    return jnp.asarray(total) / (1 if context.current().averaging else replica.num_replicas_in_sync)


def _own_part() -> Any:
    """Returns what a loss has to be divided by: in a `train_step`, where it counts for its replica's part of the rows."""
    mode = context.current()
    if not mode.averaging or mode.replica is None:
        return 1
    weight = jnp.asarray(mode.replica.weight)
    return jnp.where(weight == 0, 1, weight)


def _checked_size(size: Any) -> jax.Array:
    array = primitives.as_array(size)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentError(f"global_batch_size={shown(size)}", "must be an integer.", "global_batch_size=64")
    if not isinstance(array, jax.core.Tracer) and int(array) < 0:
        raise InvalidArgumentError(f"global_batch_size={shown(size)}", "must be 0 or more.", "global_batch_size=64")
    return array
