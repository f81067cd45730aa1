# SPDX-License-Identifier: Apache-2.0
"""What `Strategy.reduce` and `Strategy.gather` compute, for one leaf, inside a program."""

import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.collectives import primitives
from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.errors import InputError, ReduceOpError, shown
from phalanx.mesh.values import Mirrored, PerReplica, ReplicaLocal, RowMask, check_size
from phalanx.options import ReduceOp

Axis = int | tuple[int, ...] | None


def reduce_leaf(op: ReduceOp, value: Any, axis: Axis, num_replicas: int, ops: CrossDeviceOps | None = None) -> Any:
    """Reduces one value over the replicas, and over the dims `axis` of each component.

    Args:
      op: SUM or MEAN.
      value: a per-replica value, or one that is equal on all replicas.
      axis: the dims; None for none.
      num_replicas: how many there are.
      ops: how a component of each replica becomes one value, inside a merge function; None is a sum.

    Raises:
      ReduceOpError: the sum of a value that is not per replica, a dim that is not there, bools.
      InputError: components with different numbers of rows, and `axis` leaves the rows apart.
    """
    if isinstance(value, PerReplica):
        check_size(value, num_replicas)
        data = primitives.to_array(value.data)
        if axis is None and op is ReduceOp.MEAN and value.rows is None and value.batch is not None:
            return _mean_where_rows(data, value.batch)
        return _reduce_global(op, data, axis, value.rows)
    if isinstance(value, ReplicaLocal):
        return _reduce_local(op, value, axis, num_replicas, ops)
    value = value.value if isinstance(value, Mirrored) else value
    if num_replicas == 1 and axis is None:
        if not isinstance(value, jax.Array):
            primitives.as_array(value)
        return value
    if num_replicas == 1:
        return _reduce_dims(op, primitives.to_array(value), axis)
    if axis is None:
        if op is ReduceOp.SUM:
            raise ReduceOpError(
                f"reduce(SUM) of {_short(value)}",
                "it is not a per-replica value: whether to count it once or once for each replica is not said.",
                "ReduceOp.MEAN, or reduce an array that strategy.run returned",
            )
        return value
    result = _reduce_dims(op, primitives.to_array(value), axis)
    return result * num_replicas if op is ReduceOp.SUM else result


def check_axis(axis: Any) -> None:
    """Raises for an axis that is no dim.

    Raises:
      ReduceOpError: it is neither None, an integer, nor a tuple of integers.
    """
    for dim in axis if isinstance(axis, tuple) else (axis,):
        if isinstance(dim, bool) or not isinstance(dim, (int, NoneType)):
            raise ReduceOpError(f"axis={shown(axis)}", "must be an integer, a tuple of integers, or None.", "axis=0")


def check_dim(axis: Any) -> None:
    """Raises for what is not one dim.

    Raises:
      ReduceOpError: it is not an integer.
    """
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ReduceOpError(f"axis={shown(axis)}", "must be an integer.", "axis=0")


def check_components(leaves: Sequence[Any]) -> None:
    """Raises for per-replica values that are not arrays.

    Raises:
      ReduceOpError: a component is another Python object.
    """
    for leaf in leaves:
        if isinstance(leaf, PerReplica) and isinstance(leaf.data, tuple):
            raise ReduceOpError(
                f"reduce of PerReplica({shown(leaf.data)})",
                "its components are not arrays of numbers.",
                "strategy.experimental_local_results(value)",
            )


def check_mergeable(value: PerReplica, axis: Axis) -> None:
    """Raises for values whose rows no merge function knows.

    Raises:
      InputError: they are of several steps, and a dim is reduced.
    """
    if axis is not None and value.rows is not None and value.rows.row_dim:
        raise InputError(
            f"reduce(axis={shown(axis)}) of what run_steps returned, with operations that do not add",
            "the replicas have different numbers of rows in each step.",
            "strategy.run for each step",
        )


def gather_leaf(value: Any, axis: int, num_replicas: int) -> Any:
    """Concatenates the components along dim `axis`, padded rows included."""
    if isinstance(value, ReplicaLocal):
        return primitives.all_gather(value.value, axis, num_replicas)
    if not isinstance(value, PerReplica):
        if num_replicas == 1 and isinstance(value, jax.Array):  # It is the one component.
            primitives.canonical_dim(axis, value.ndim, "axis")
        return value
    check_size(value, num_replicas)
    data = jnp.asarray(value.data)
    dim = primitives.canonical_dim(axis, data.ndim - 1, "axis")
    if value.rows is not None and value.rows.row_dim:
        raise InputError(
            f"gather(axis={axis}) of what run_steps returned",
            "the replicas have different numbers of rows in each step.",
            "strategy.run for each step, or reduce(op, value, axis=1)",
        )
    if value.rows is not None and dim != 0:
        raise InputError(f"gather(axis={axis})", "the components have different numbers of rows.", "axis=0")
    shape = data.shape[1:]
    return jnp.moveaxis(data, 0, dim).reshape(*shape[:dim], num_replicas * shape[dim], *shape[dim + 1 :])


def _reduce_global(op: ReduceOp, data: jax.Array, axis: Axis, rows: RowMask | None) -> jax.Array:
    dims = _dims(axis, data.ndim - 1)
    reduced = (0, *(d + 1 for d in dims))
    if rows is None:
        total = data.sum(axis=reduced)
        return total if op is ReduceOp.SUM else total / math.prod(data.shape[d] for d in reduced)
    if rows.row_dim not in dims:
        raise InputError(
            f"reduce(axis={shown(axis)})", "the components have different numbers of rows.", f"axis={rows.row_dim}"
        )
    mask = jnp.asarray(rows.mask)
    others = math.prod(data.shape[d] for d in reduced if d >= mask.ndim)
    mask = mask.reshape(mask.shape + (1,) * (data.ndim - mask.ndim))
    total = jnp.where(mask, data, 0).sum(axis=reduced)
    return total if op is ReduceOp.SUM else total / (mask.sum(axis=reduced) * others)


def _mean_where_rows(data: jax.Array, rows: RowMask) -> jax.Array:
    """Averages over the replicas that had a real row; of several steps, in each."""
    counts = jnp.asarray(rows.mask).any(axis=-1)
    counts = counts.reshape(counts.shape + (1,) * (data.ndim - counts.ndim))
    return jnp.where(counts, data, 0).sum(axis=0) / jnp.maximum(counts.sum(axis=0), 1)


def _reduce_local(
    op: ReduceOp, value: ReplicaLocal, axis: Axis, num_replicas: int, ops: CrossDeviceOps | None
) -> jax.Array:
    data = primitives.to_array(value.value)
    dims = _dims(axis, data.ndim)
    # Here only the shape says that a value has rows, and a gradient may have it by chance.
    rows = value.rows if 0 in dims else None
    if rows is not None:
        data = jnp.where(rows.mask.reshape((-1,) + (1,) * (data.ndim - 1)), data, 0)
    own = data.sum(axis=dims) if dims else data
    total = (
        primitives.all_reduce(ReduceOp.SUM, own, num_replicas) if ops is None else ops.reduce(ReduceOp.SUM, own, own)
    )
    if op is ReduceOp.SUM:
        return total
    others = math.prod(data.shape[d] for d in dims if d > 0)
    count = rows.count if rows is not None else num_replicas * (data.shape[0] if 0 in dims else 1)
    return total / (count * others)


def _reduce_dims(op: ReduceOp, array: jax.Array, axis: Axis) -> jax.Array:
    dims = _dims(axis, array.ndim)
    return array.sum(axis=dims) if op is ReduceOp.SUM else array.mean(axis=dims)


def _dims(axis: Axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return ()
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(primitives.canonical_dim(a, ndim, "axis") for a in axes)


def _short(value: Any) -> str:
    return f"an array {value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else shown(value)
