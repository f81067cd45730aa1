# SPDX-License-Identifier: Apache-2.0
"""Functions and classes of JAX that have no annotations in JAX, with their types.

Nearly every name is the JAX object itself, so a call costs nothing extra. No other file has names of JAX that are not public. Canary tests
name each of them: tests/unit/test_typed_jax.py, and for processes tests/unit/runtime/test_coordination.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any, Protocol, TypeVar, final

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax
from jax._src import config, distributed, lib, xla_bridge
from jax._src.interpreters import pxla
from jax.experimental import layout
from jax.experimental.layout import Layout
from jax.extend import core as jex
from jax.sharding import PartitionSpec, Sharding

T = TypeVar("T")


class _Constrain(Protocol):
    def __call__(self, x: T, shardings: Sharding | PartitionSpec, /) -> T: ...


class _Wait(Protocol):
    def __call__(self, x: T, /) -> T: ...


shape_dtype: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
"""Returns the shape and dtype of an array, from `(shape, dtype, *, sharding=None)`."""


@final
class OpenSpec(jax.ShapeDtypeStruct):
    """The shape and dtype of an array, with None for each size that may differ.

    JAX has refused None in its own class since version 0.12.

    Args:
      shape: the sizes.
      dtype: the dtype.
    """

    def __init__(self, shape: Sequence[int | None], dtype: object) -> None:
        # JAX checks the sizes that it gets, so an open one is 0 here.
        super().__init__([0 if size is None else size for size in shape], dtype)  # type: ignore[no-untyped-call]
        # JAX's class refuses assignments.
        object.__setattr__(self, "shape", tuple(shape))


partition_spec: Callable[..., PartitionSpec] = PartitionSpec
"""Returns the sharding of an array, from one axis, tuple of axes or None per dim."""

pmin: Callable[[jax.Array, str], jax.Array] = lax.pmin
"""Returns the smallest of an array's values over a mesh axis."""

pmax: Callable[[jax.Array, str], jax.Array] = lax.pmax
"""Returns the largest of an array's values over a mesh axis."""

checkpoint_name: Callable[[jax.Array, str], jax.Array] = ad_checkpoint.checkpoint_name
"""Returns an array as it is, from `(array, name)`. The trace has an operation with the name."""

optimization_barrier: _Wait = lax.optimization_barrier
"""Returns arrays as they are, but XLA moves no operation from one side of the call to the other."""


def psum(x: T, axis_name: str, *, axis_index_groups: Sequence[Sequence[int]] | None = None) -> T:
    """Returns the sum of each array of a pytree over a mesh axis, or over groups of its indices."""
    # XLA ends the process if it finds that a complex array is constant, for example a gradient of zeros. So its parts are summed.
    parts = jax.tree.map(lambda leaf: (jnp.real(leaf), jnp.imag(leaf)) if jnp.iscomplexobj(leaf) else _widened(leaf), x)
    sums = lax.psum(parts, axis_name, axis_index_groups=axis_index_groups)  # type: ignore[no-untyped-call]
    total: T = jax.tree.map(
        lambda leaf, part: lax.complex(*part) if jnp.iscomplexobj(leaf) else part.astype(jnp.result_type(leaf)), x, sums
    )
    return total


def psum_scatter(x: jax.Array, axis_name: str, *, dim: int) -> jax.Array:
    """Returns this replica's shard, along a dim, of the sum of an array over a mesh axis."""
    shard: jax.Array = lax.psum_scatter(_widened(x), axis_name, scatter_dimension=dim, tiled=True)  # type: ignore[no-untyped-call]
    return shard.astype(x.dtype)


def _widened(x: jax.Array) -> jax.Array:
    """Returns an array that XLA can sum over an axis while it partitions the program along another one.

    XLA for CPUs sums bfloat16 in float32 in any case, but together with such an axis it ends the process (jaxlib 0.10.2 and 0.12.0).
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_on_cpus = mesh.abstract_device is not None and mesh.abstract_device.platform == "cpu"
    return x.astype(jnp.float32) if is_on_cpus and mesh.auto_axes and jnp.result_type(x) == jnp.bfloat16 else x


ppermute: Callable[[jax.Array, str | tuple[str, ...], Sequence[tuple[int, int]]], jax.Array] = lax.ppermute
"""Returns the array of another replica, from `(array, axis, pairs of source and destination)`."""

all_to_all: Callable[..., jax.Array] = lax.all_to_all
"""Returns the shards of an array that all replicas send to this one."""

with_layout_constraint: Callable[[jax.Array, Layout], jax.Array] = layout.with_layout_constraint
"""Returns an array that has a memory layout."""

with_sharding_constraint: _Constrain = lax.with_sharding_constraint
"""Returns a pytree whose arrays have a sharding."""

# `jax.Array` does not declare it, because tracers do not have it.
is_ready: Callable[[jax.Array], bool] = methodcaller("is_ready")
"""Returns whether no program still computes an array."""

block_until_ready: _Wait = jax.block_until_ready
"""Waits for the arrays of a pytree, and returns it."""

stop_profile: Callable[[], None] = jax.profiler.stop_trace
"""Ends the profile of `jax.profiler.start_trace`, and writes it."""

set_current_trace: Callable[[object], AbstractContextManager[None]] = jex.set_current_trace
"""Makes a trace of JAX the current one inside a context."""

get_opaque_trace_state: Callable[[], object] = jex.get_opaque_trace_state
"""Returns a value that is equal if the current trace is the same."""

# Private, because the public `device_put` derives the description each time, which takes five times as long (see `Placer`).
batched_device_put: Callable[..., jax.Array] = pxla.batched_device_put
"""Returns an array, from its description, its sharding, its parts on this process and their devices."""

explicit_transfer: Callable[[], AbstractContextManager[None]] = config.explicit_device_put_scope
"""Returns a context in which `jax.transfer_guard` treats transfers as those of `device_put`. JAX has no public name for it."""

distributed_state: Any = distributed.global_state
"""The client, process and address of `jax.distributed`, which has functions for one group per process only."""

runtime: Any = lib._jax  # type: ignore[attr-defined]
"""Makes coordination services, their clients and the collectives of gloo."""

make_cpu_client: Callable[[object], object] = xla_bridge.make_cpu_client
"""Returns a CPU client with these collectives, or None."""

make_user_context: Callable[[], Callable[[object], AbstractContextManager[None]]] = jax.make_user_context
"""Returns a function from a value to a context in which JAX traces separately."""

set_config: Callable[[str, object], None] = jax.config.update
"""Sets a JAX option, from its name and value."""
