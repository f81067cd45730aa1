# SPDX-License-Identifier: Apache-2.0
"""Sums over processes of CPUs, written as all-to-alls and local sums.

XLA sums over such processes by gloo. Its all-reduce sends an array of 100 kB in 2 (n - 1) rounds, each of which waits for the one before;
an all-to-all is a single round. Its reduce-scatter is slower still, and is wrong for 3, 5, 6, 7 ... processes: nothing waits until what
the last ones of them send has left their memory, which is freed (`largerBlockSendDataBufs_` of gloo/reduce_scatter.h, jaxlib 0.10.2 and
0.12.0). On a busy machine, the first sum after a process had joined was garbage in one of three runs.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from phalanx._src.kernels.rewriting import Rule, equations_of
from phalanx._src.typed_jax import all_to_all
from phalanx.typing import PyTree

_ROUND_BYTES = 128 << 10
"""The bytes that a link of 10 Gbit/s sends in 0.1 ms. A round of messages takes at least as long."""

_MOST_BYTES = 4 << 20
"""The largest sum that is faster as an all-to-all between two processes, which send as many bytes in either way."""


def by_all_to_all(axis: str, size: int, *, is_whole: bool) -> Rule:
    """Returns the rule that writes sums over the replicas as all-to-alls.

    Args:
      axis: the mesh axis of the replicas.
      size: number of replicas.
      is_whole: whether the mesh has no other axis, along which XLA might divide what is summed.
    """

    def rule(eqn: jex.JaxprEqn, *, is_body: bool) -> list[jex.JaxprEqn] | None:
        params = eqn.params
        fn: Callable[..., Any] | None = None
        if eqn.primitive.name == "reduce_scatter" and params["axis_name"] == (axis,):
            fn = functools.partial(_scattered_sum, axis, params)
        is_of_all = eqn.primitive.name == "psum" and params["axes"] == (axis,) and params["axis_index_groups"] is None
        if is_of_all and is_whole and all(_is_small(v.aval, size) for v in eqn.invars):
            fn = functools.partial(_sums, axis, size)
        return None if fn is None else equations_of(fn, eqn.invars, eqn.outvars, eqn.source_info, [(axis, size)])

    return rule


def _is_small(array: PyTree, size: int) -> bool:
    """Returns whether the rounds that an all-to-all saves take longer than the bytes that it adds."""
    num_bytes: int = array.size * array.dtype.itemsize
    added = num_bytes * (size - 1) * (size - 2) / size
    # XLA has no collectives for empty arrays.
    return 0 < num_bytes <= _MOST_BYTES and added <= (2 * (size - 1) - 1) * _ROUND_BYTES


def _sums(axis: str, size: int, *arrays: jax.Array) -> list[jax.Array]:
    copies = [jnp.broadcast_to(x, (size, *x.shape)) for x in arrays]
    return [all_to_all(x, axis, 0, 0).sum(0, dtype=x.dtype) for x in copies]


def _scattered_sum(axis: str, params: Mapping[str, Any], array: jax.Array) -> jax.Array:
    shape, dim, size = array.shape, params["scatter_dimension"], params["axis_size"]
    parts = array.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]) if params["tiled"] else array
    received = all_to_all(jnp.moveaxis(parts, dim, 0), axis, 0, 0, axis_index_groups=params["axis_index_groups"])
    shard: jax.Array = received.sum(0, dtype=array.dtype)
    return shard
