# SPDX-License-Identifier: Apache-2.0
"""The computation of `Strategy.reduce` and `Strategy.gather` for one leaf, inside a program."""

import math
import operator
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src.collectives import primitives
from phalanx._src.collectives.cross_device import CrossDeviceOps
from phalanx._src.collectives.dtypes import dtype_of, term
from phalanx._src.mesh.arrays import copied, over_rows
from phalanx._src.mesh.values import ComponentSizes, Mirrored, PerReplica, ReplicaLocal, check_size, differs
from phalanx._src.options import ReduceOp
from phalanx.errors import InputError, ReduceOpError, arguments, shown
from phalanx.typing import PyTree

Axis = int | tuple[int, ...] | None


@singledispatch
def reduce_leaf(value: Any, op: ReduceOp, axis: Axis, num_replicas: int, ops: CrossDeviceOps | None = None) -> PyTree:
    """Reduces one value over the replicas, and over the dims `axis` of each component.

    Args:
      value: a distributed value, or an array or number that is equal on all replicas.
      op: SUM or MEAN.
      axis: a dim or several dims of a component. None reduces over the replicas only.
      num_replicas: number of replicas.
      ops: the operations that reduce components inside a merge function. None is an all-reduce.

    Returns:
      The reduced array.

    Raises:
      ReduceOpError: `value` is not a per-replica value and `op` is SUM, a dim does not exist, or the dtype is bool.
      InputError: the components have different numbers of rows, and `axis` does not include the rows.
    """
    if num_replicas == 1 and axis is None:
        return _of_one(op, value)
    if num_replicas == 1:
        return _reduce_dims(op, primitives.to_array(value), axis)
    if axis is None:
        if op is ReduceOp.SUM:
            raise ReduceOpError(
                f"reduce(SUM) of {_short(value)}",
                "it is not a per-replica value, so it is unclear whether to count it once or once per replica.",
                "ReduceOp.MEAN, or reduce an array that strategy.run returned",
            )
        return _of_one(op, value)
    result = _reduce_dims(op, primitives.to_array(value), axis)
    # The value counts once per replica, as if each replica had these rows.
    return result * num_replicas if op is ReduceOp.SUM else result


@reduce_leaf.register
def _(value: Mirrored, op: ReduceOp, axis: Axis, num_replicas: int, ops: CrossDeviceOps | None = None) -> PyTree:
    return reduce_leaf(value.value, op, axis, num_replicas, ops)


@reduce_leaf.register
def _(value: PerReplica, op: ReduceOp, axis: Axis, num_replicas: int, ops: CrossDeviceOps | None = None) -> jax.Array:
    check_size(value, num_replicas)
    data = primitives.to_array(value.data)
    if axis is None and op is ReduceOp.MEAN and value.rows is None and value.batch is not None:
        # A replica without rows has computed its value, such as a mean loss, from padding.
        return _mean_where_rows(data, np.array([0 not in size for size in value.batch.sizes]))
    return _reduce_global(op, data, axis, value.rows)


@reduce_leaf.register
def _(value: ReplicaLocal, op: ReduceOp, axis: Axis, num_replicas: int, ops: CrossDeviceOps | None = None) -> jax.Array:
    data = primitives.to_array(value.value)
    dims = _dims(axis, data.ndim)
    # In a merge function only the shape suggests that a value has rows, and a gradient may have this shape by chance.
    # So the mask applies only if the caller reduces the rows.
    counts = value.has_rows if value.mask is None or 0 not in dims else value.mask
    terms = term(op, data)
    if counts is not None:
        terms = jnp.where(over_rows(counts, data), terms, 0)
    part = terms.sum(axis=dims) if dims else terms
    total = (
        primitives.all_reduce(ReduceOp.SUM, part, num_replicas) if ops is None else ops.reduce(ReduceOp.SUM, part, part)
    )
    if op is ReduceOp.SUM:
        return total
    dtype, elements = dtype_of(op, data.dtype), math.prod(data.shape[d] for d in dims)
    if counts is None:
        return (total / (num_replicas * elements)).astype(dtype)
    # The number of elements is added in any case: `ops` may combine values by another function.
    number = jnp.where(counts, elements // (counts.shape[0] if counts.ndim else 1), 0).sum()
    return (total / jnp.maximum(primitives.all_reduce(ReduceOp.SUM, number, num_replicas), 1)).astype(dtype)


def checked_axis(axis: Axis) -> Axis:
    """Returns the `axis` argument of `Strategy.reduce` with Python's integers.

    Raises:
      ReduceOpError: `axis` is not None, an integer or a tuple of integers.
    """
    for dim in axis if isinstance(axis, tuple) else (axis,):
        if dim is not None and not arguments.is_integer(dim):
            raise ReduceOpError(f"axis={shown(axis)}", "must be an integer, a tuple of integers, or None.", "axis=0")
    return jax.tree.map(operator.index, axis)  # type: ignore[no-any-return]


def check_dim(axis: object) -> int:
    """Returns the `axis` argument of `Strategy.gather` as an int.

    Raises:
      ReduceOpError: `axis` is not an integer.
    """
    if not arguments.is_integer(axis):
        raise ReduceOpError(f"axis={shown(axis)}", "must be an integer.", "axis=0")
    return operator.index(axis)


def check_components(leaves: Sequence[Any]) -> None:
    """Checks that the components of per-replica values are arrays.

    Raises:
      ReduceOpError: a component is another Python object.
    """
    for leaf in leaves:
        if differs(leaf) and isinstance(getattr(leaf, "data", None), tuple):
            raise ReduceOpError(
                f"reduce of PerReplica({shown(leaf.data)})",
                "its components are not arrays of numbers.",
                "strategy.experimental_local_results(value)",
            )


def check_mergeable(value: PerReplica, axis: Axis) -> None:
    """Checks that a merge function can reduce a value over `axis`.

    Raises:
      InputError: `value` holds padded batches of several steps, and `axis` is not None.
    """
    if axis is not None and value.rows is not None and value.rows.dims != (0,):
        raise InputError(
            f"reduce(axis={shown(axis)}) of a result of run_steps, with cross-device operations that do not add",
            "the replicas have different numbers of rows in each step.",
            "call strategy.run once per step",
        )


_A_DIM = "return jnp.reshape(x, 1) from the replica function, and gather its result with axis=0"


@singledispatch
def gather_leaf(value: object, axis: int, num_replicas: int) -> PyTree:
    """Concatenates the components along dim `axis`, including padded rows. Returns other values unchanged."""
    if num_replicas == 1 and isinstance(value, jax.Array):  # The only component.
        primitives.canonical_dim(axis, value.ndim, _A_DIM)
    return value


@gather_leaf.register
def _(value: ReplicaLocal, axis: int, num_replicas: int) -> jax.Array:
    gathered: jax.Array = primitives.all_gather(value.value, axis, num_replicas)
    return gathered


@gather_leaf.register
def _(value: PerReplica, axis: int, num_replicas: int) -> jax.Array:
    check_size(value, num_replicas)
    data = jnp.asarray(value.data)
    dim = primitives.canonical_dim(axis, data.ndim - 1, _A_DIM)
    # Without their padding, components that differ in another dim do not fit together.
    if value.rows is not None and value.rows.dims != (dim,):
        dims = value.rows.dims
        raise InputError(
            f"gather(axis={axis})",
            f"the components have different sizes in {'dim' if len(dims) == 1 else 'dims'} {', '.join(map(str, dims))}.",
            f"axis={dims[0]}" if len(dims) == 1 else "strategy.experimental_local_results(value)",
        )
    if value.rows is not None:
        return jnp.concatenate([value.rows.cut(data[i], i) for i in range(num_replicas)], axis=dim)
    shape = data.shape[1:]
    return jnp.moveaxis(data, 0, dim).reshape(*shape[:dim], num_replicas * shape[dim], *shape[dim + 1 :])


def _reduce_global(op: ReduceOp, data: jax.Array, axis: Axis, rows: ComponentSizes | None) -> jax.Array:
    dims = _dims(axis, data.ndim - 1)
    reduced = (0, *(d + 1 for d in dims))
    dtype, data = dtype_of(op, data.dtype), term(op, data)
    if rows is None:
        total = data.sum(axis=reduced)
        return total if op is ReduceOp.SUM else (total / math.prod(data.shape[d] for d in reduced)).astype(dtype)
    missing = [dim for dim in rows.dims if dim not in dims]
    if missing:
        raise InputError(
            f"reduce(axis={shown(axis)})", "the components have different numbers of rows.", f"axis={missing[0]}"
        )
    mask = over_rows(rows.mask(data.shape), data)
    total = jnp.where(mask, data, 0).sum(axis=reduced)
    if op is ReduceOp.SUM:
        return total
    # The sizes are part of the type of the value, so the number of elements is known when the program is traced.
    sizes = (math.prod(np.asarray(size)[[d for d in dims if d < len(size)]]) for size in rows.sizes)
    elements = sum(sizes) * math.prod(data.shape[d + 1] for d in dims if d >= len(rows.sizes[0]))
    mean: jax.Array = (total / elements).astype(dtype)
    return mean


def _mean_where_rows(data: jax.Array, has_rows: np.ndarray) -> jax.Array:
    """Averages over the replicas that have rows."""
    counts = over_rows(jnp.asarray(has_rows), data)
    total = jnp.where(counts, term(ReduceOp.MEAN, data), 0).sum(axis=0)
    # If no replica has rows, the mean is 0 and not NaN.
    return (total / max(1, int(has_rows.sum()))).astype(dtype_of(ReduceOp.MEAN, data.dtype))


def _of_one(op: ReduceOp, value: PyTree) -> PyTree:
    """Returns the reduction of a single value: the value itself, unless the dtypes differ or the caller may write to it."""
    if isinstance(value, np.ndarray):
        value = jnp.asarray(copied(value))
    array = primitives.to_array(value)
    dtype = dtype_of(op, array.dtype)
    return value if dtype == array.dtype else array.astype(dtype)


def _reduce_dims(op: ReduceOp, array: jax.Array, axis: Axis) -> jax.Array:
    dims = _dims(axis, array.ndim)
    return term(op, array).sum(axis=dims) if op is ReduceOp.SUM else array.mean(axis=dims)


def _dims(axis: Axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return ()
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(primitives.canonical_dim(a, ndim) for a in axes)


def _short(value: object) -> str:
    return f"an array {value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else shown(value)
