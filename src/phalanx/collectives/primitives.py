# SPDX-License-Identifier: Apache-2.0
"""Collectives over the replica axis, inside a program, on any pytree.

They run under `jax.shard_map(..., check_vma=False)`, where `psum` transposes to `psum`: the gradient of an all-reduce is
the all-reduce of the gradient, as in tf.distribute.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.errors import ReduceOpError
from phalanx.options import ReduceOp
from phalanx.topology import REPLICA_AXIS


def to_array(value: Any) -> jax.Array:
    """Returns `value` as an array.

    Raises:
      ReduceOpError: it is not a number or an array of numbers.
    """
    try:
        array = jnp.asarray(value)
    except TypeError as e:
        raise ReduceOpError(f"value={value!r}", "not an array of numbers.", "pass arrays, or a pytree of arrays") from e
    if array.dtype == jnp.bool_:
        raise ReduceOpError("a value of dtype bool", "bools have no sum or mean.", 'value.astype("int32")')
    return array


def all_reduce(op: ReduceOp, tree: Any, num_replicas: int, *, counts: Any = None) -> Any:
    """Sums or averages every leaf over the replicas; each replica gets the result.

    Args:
      op: SUM or MEAN; the mean of integers is a float.
      tree: a pytree of this replica's arrays; shapes must agree between replicas.
      num_replicas: the size of the replica axis; 1 outside a mapped program.
      counts: whether this replica counts in a mean; None where all do. Where none does the mean is zero.
    """
    arrays = jax.tree.map(to_array, tree)
    divisor: Any = num_replicas
    if num_replicas > 1 and op is ReduceOp.MEAN and counts is not None:
        arrays = jax.tree.map(lambda x: jnp.where(counts, x, 0), arrays)
        divisor = jnp.maximum(lax.psum(jnp.asarray(counts, jnp.int32), REPLICA_AXIS), 1)
    if num_replicas > 1:
        arrays = lax.psum(arrays, REPLICA_AXIS)
    return jax.tree.map(lambda x: _divided(x, divisor), arrays) if op is ReduceOp.MEAN else arrays


def _divided(total: jax.Array, count: Any) -> jax.Array:
    return total / (count.astype(total.dtype) if isinstance(count, jax.Array) and total.dtype.kind in "fc" else count)


def all_gather(tree: Any, dim: int, num_replicas: int) -> Any:
    """Concatenates every leaf over the replicas along `dim`, in replica order.

    Raises:
      ReduceOpError: a leaf has no such dim.
    """

    def gather(value: Any) -> jax.Array:
        array = jnp.asarray(value)
        dim_ = canonical_dim(dim, array.ndim, "axis")
        if num_replicas == 1:
            return array
        return lax.all_gather(array, REPLICA_AXIS, axis=dim_, tiled=True)

    return jax.tree.map(gather, tree)


def broadcast(tree: Any, num_replicas: int, source: int = 0) -> Any:
    """Gives every replica the leaves of replica `source`."""
    if num_replicas == 1:
        return tree
    bits = jax.tree.map(lambda x: x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, tree)
    sums = lax.psum(jax.tree.map(lambda x: only_on(source, x), bits), REPLICA_AXIS)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, tree)


def only_on(replica: int, value: jax.Array) -> jax.Array:
    """Returns `value` on one replica and zeros on the others."""
    return jnp.where(lax.axis_index(REPLICA_AXIS) == replica, value, jnp.zeros_like(value))


def packed(
    reduce: Callable[[list[jax.Array]], list[jax.Array]], values: list[jax.Array], packs: list[list[int]]
) -> list[jax.Array]:
    """Runs `reduce` on a few flat buffers instead of on many arrays.

    Args:
      reduce: maps a list of arrays to a list of arrays of the same shapes, element by element.
      values: the arrays.
      packs: which values go into which buffer; the values of one buffer have one dtype.

    Returns:
      One array a value, in the order of `values`.
    """
    buffers = [
        jnp.concatenate([values[i].ravel() for i in pack]) if len(pack) > 1 else values[pack[0]] for pack in packs
    ]
    results: list[Any] = [None] * len(values)
    for pack, buffer in zip(packs, reduce(buffers), strict=True):
        if len(pack) == 1:
            results[pack[0]] = buffer
            continue
        start = 0
        for i in pack:
            results[i] = buffer[start : start + values[i].size].reshape(values[i].shape)
            start += values[i].size
    return results


def canonical_dim(dim: int, ndim: int, name: str) -> int:
    """Returns `dim` counted from the front.

    Raises:
      ReduceOpError: `dim` is not an integer between -ndim and ndim - 1.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ReduceOpError(f"{name}={dim!r}", "must be an integer.", f"{name}=0")
    if not -ndim <= dim < ndim:
        where = "a scalar has no dims" if ndim == 0 else f"the value has dims 0 to {ndim - 1}"
        raise ReduceOpError(f"{name}={dim}", f"{where}.", f"{name}=None" if ndim == 0 else f"{name}=0")
    return dim % ndim
