# SPDX-License-Identifier: Apache-2.0
"""Gathers variables that are sharded over the replicas where a trace uses them, so that a device holds few of them whole.

If all variables were gathered before the function, XLA would hold all of them until its end. Here each operation that needs a
whole variable gathers it, including the operations of the backward pass, so that nothing is kept between the two. XLA schedules a
gather as early as it can, which would be at once. Therefore a shard passes a barrier together with the other input of the operation.
If replicas have different numbers of rows, `stages` divides their traces at these gathers, as at all other exchanges.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

import math
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from phalanx._src.compat import Variable, dtype_of, layout_path
from phalanx._src.mesh.devices import device_name
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.stages import consts_of, evaluate_alone, walk
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.tracing.policy import policy_of
from phalanx._src.typed_jax import optimization_barrier, shape_dtype
from phalanx.typing import PyTree

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Operations that evaluate a trace once, whose variables are gathered inside."""

_CHECKPOINTS = frozenset({"checkpoint", "remat2"})
"""The operation of `jax.checkpoint`, which evaluates a trace once, too."""

_COMBINED = "xla_gpu_reduce_scatter_combine_threshold_bytes"
"""An option of XLA: the bytes of shards up to which one message carries several gradients. Those wait for each other before they are summed."""

# XLA's default is the same number, but of the bytes of shards: on 16 replicas, gradients of 480 MB would wait.
_COMBINED_BYTES = 30 << 20
"""The bytes of gradients that one message carries, unless it carries a single one."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredLater:
    """What this replica holds of a variable. A pytree of the shard.

    Args:
      array: the shard.
      dim: the dim along which the variable is sharded.
      inside: names of the operations that evaluate a trace, and inside which it is gathered. For any other operation, it is gathered before.
      gathered: the variable, once an operation has gathered it. None if each operation gathers it for itself.
    """

    array: jax.Array
    dim: int = field(metadata={"static": True})
    inside: AbstractSet[str] = field(metadata={"static": True})
    gathered: list[jax.Array] | None = field(default=None, metadata={"static": True})

    def whole(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of the variable."""
        shape = list(self.array.shape)
        shape[self.dim] *= lax.axis_size(REPLICA_AXIS)
        return shape_dtype(tuple(shape), self.array.dtype)


def later(topology: Topology, value: jax.Array, dim: int | None) -> jax.Array | GatheredLater:
    """Returns a shard as a variable that is gathered later, or a value with `dim` None as it is."""
    if dim is None:
        return value
    # On TPUs, it is not measured what gathers inside of checkpoints do to a program.
    return GatheredLater(value, dim, _CALLS if topology.devices[0].platform == "tpu" else _CALLS | _CHECKPOINTS)


def dims_of(variables: Sequence[Variable], topology: Topology) -> list[int | None]:
    """Returns, for each variable that is gathered where a function uses it, the dim along which it is sharded."""
    none: list[int | None] = [None] * len(variables)
    if topology.layout is None or not topology.divides_over_replicas:
        return none
    # Replicas have their own values of an on-read variable, so there is nothing to gather.
    dims = [None if policy_of(v).on_read else topology.divided_dim(layout_path(v), v.shape) for v in variables]
    sizes = (
        math.prod(v.shape) * np.dtype(dtype_of(v)).itemsize for v in compress(variables, [d is not None for d in dims])
    )
    return dims if topology.layout.gathers_by_layer(sum(sizes)) else none


def compiler_options(variables: Sequence[Variable], topology: Topology) -> dict[str, int]:
    """Returns the options of XLA for a program that gathers some of these variables where it uses them."""
    if not any(dim is not None for dim in dims_of(variables, topology)) or _COMBINED in os.environ.get("XLA_FLAGS", ""):
        return {}
    is_gpu = device_name(topology.devices[0]).startswith("gpu:")
    return {_COMBINED: _COMBINED_BYTES // topology.num_replicas} if is_gpu else {}


def evaluate(closed: jex.ClosedJaxpr, *inputs: jax.Array | GatheredLater) -> list[jax.Array]:
    """Evaluates a trace, some of whose inputs are a `GatheredLater` of what the trace takes."""
    return list(map(_gathered, walk(closed.jaxpr, closed.consts, inputs, _evaluate_one)))


def run(discovery: Discovery, values: Sequence[Any], *args: PyTree) -> PyTree:
    """Runs the trace of a replica and returns the result of the function.

    Args:
      discovery: the trace.
      values: values of the variables, some of which may be a `GatheredLater`.
      *args: arguments of the function.
    """
    flat = discovery.flat(values, [], *args)
    if not any(map(is_later, flat)):
        return discovery.evaluate(values, [], *args)
    trace = discovery.without_tapes(*(x.whole() if is_later(x) else x for x in flat))
    return discovery.result(evaluate(trace, *flat))


def _evaluate_one(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
    """Evaluates an operation, and returns its results: arrays, and shards."""
    inside = next((x.inside for x in values if is_later(x)), None)
    if inside is None:
        return evaluate_alone(jaxpr, eqn, values)
    if eqn.primitive.name not in inside:
        return _with_shards(jaxpr, eqn, values)
    is_backward = eqn.primitive.name in _CHECKPOINTS and eqn.params["differentiated"]
    return (_recomputed if is_backward else _opened)(eqn, values)


def _with_shards(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
    """Evaluates an operation, some of whose inputs are shards."""
    name, first = eqn.primitive.name, values[0]
    # These move no element from one replica to another. A cast to a shorter dtype comes before the gather.
    if name == "convert_element_type":
        cast = lax.convert_element_type(first.array, eqn.params["new_dtype"])
        return [replace(first, array=cast, gathered=None if first.gathered is None else [])]
    if name == "transpose" and first.gathered is None:
        order = tuple(eqn.params["permutation"])
        return [replace(first, array=lax.transpose(first.array, order), dim=order.index(first.dim))]
    places = [i for i, v in enumerate(eqn.invars) if isinstance(v, jex.Var) and not is_later(values[i])]
    # None if the operation reads only shards and literals: then the gather waits for nothing.
    beside = max(places, key=lambda i: values[i].size, default=None)
    for i, value in enumerate(values):
        if is_later(value):
            shard = value.array
            if beside is not None and not value.gathered:
                # The operation reads what has passed the barrier. A barrier with an array that nobody reads behind it, such as the input
                # of the operation before, lets libtpu 0.0.42 compile without end.
                shard, values[beside] = optimization_barrier((shard, values[beside]))
            values[i] = _gathered(replace(value, array=shard))
    return evaluate_alone(jaxpr, eqn, values)


def _opened(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluates the trace of a call."""
    (inner,) = jex.jaxprs_in_params(eqn.params)
    return walk(inner, consts_of(eqn), values, _evaluate_one)


def _recomputed(eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluates the backward pass of a checkpoint. What it computes again and what it does then share what they gather.

    As JAX does, it waits for all inputs, among them the gradients. Otherwise XLA would keep what the forward pass has computed.
    """
    activations = max((np.size(x) for x in values if not is_later(x)), default=0)
    waiting = optimization_barrier([x.array if is_later(x) else x for x in values])
    inputs = [
        replace(x, array=array, gathered=[]) if is_later(x) else array for x, array in zip(values, waiting, strict=True)
    ]
    results = _opened(eqn, inputs)
    # XLA would compute the gradients of biases at the end of the step, and keep the larger gradients of activations until then.
    early = [i for i, x in enumerate(results) if not is_later(x) and np.size(x) <= activations]
    for i, array in zip(early, optimization_barrier([results[i] for i in early]), strict=True):
        results[i] = array
    return results


def _gathered(value: jax.Array | GatheredLater) -> jax.Array:
    """Returns a whole variable, given its shard. Other values are returned unchanged."""
    if not isinstance(value, GatheredLater):
        return value
    if value.gathered:
        return value.gathered[0]
    whole: jax.Array = lax.all_gather(value.array, REPLICA_AXIS, axis=value.dim, tiled=True)
    if value.gathered is not None:
        value.gathered.append(whole)
    return whole


def is_later(value: object) -> TypeGuard[GatheredLater]:
    """Returns whether a value is a shard that is gathered later."""
    return isinstance(value, GatheredLater)
