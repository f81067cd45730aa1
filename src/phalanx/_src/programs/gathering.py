# SPDX-License-Identifier: Apache-2.0
"""Gathers variables that are sharded over the replicas where a trace uses them, so that a device holds few of them whole.

If all variables were gathered before the function, XLA would hold all of them until its end. Here each operation that needs a
whole variable gathers it, also the operations of the backward pass, so that nothing is kept between the two. XLA schedules a
gather as early as it can, which would be at once. Therefore a shard passes a barrier together with what the operation before had
as its input: a gather may run beside one layer, and not earlier.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from phalanx._src.compat import Variable, dtype_of, layout_path
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.stages import evaluate_alone
from phalanx._src.tracing.policy import policy_of
from phalanx._src.typed_jax import optimization_barrier, shape_dtype

_CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Operations that evaluate a trace once, whose variables are gathered inside."""


class GatheredLater(NamedTuple):
    """What this replica holds of a variable.

    Args:
      array: the shard.
      dim: the dim along which the variable is sharded.
    """

    array: jax.Array
    dim: int

    def whole(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of the variable."""
        shape = list(self.array.shape)
        shape[self.dim] *= lax.axis_size(REPLICA_AXIS)
        return shape_dtype(tuple(shape), self.array.dtype)


def dims_of(variables: Sequence[Variable], topology: Topology) -> list[int | None]:
    """Returns, for each variable that is gathered where a function uses it, the dim along which it is sharded."""
    none: list[int | None] = [None] * len(variables)
    if topology.layout is None or not topology.divides_over_replicas:
        return none
    dims = [None if policy_of(v).on_read else topology.divided_dim(layout_path(v), v.shape) for v in variables]
    sizes = (
        math.prod(v.shape) * np.dtype(dtype_of(v)).itemsize for v in compress(variables, [d is not None for d in dims])
    )
    return dims if topology.layout.gathers_by_layer(sum(sizes)) else none


def evaluate(closed: jex.ClosedJaxpr, *inputs: jax.Array | GatheredLater) -> list[jax.Array]:
    """Evaluates a trace, some of whose inputs are a `GatheredLater` of what the trace takes."""
    walk = _GatheringWalk()
    return [walk.gathered(x, None) for x in walk.run(closed.jaxpr, closed.consts, inputs)]


class _GatheringWalk:
    """One evaluation. It remembers what the last operation with a variable had as its other input."""

    def __init__(self) -> None:
        self._before: jax.Array | None = None

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Evaluates a trace, and returns its outputs: arrays, and shards."""
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        value = lambda v: v.val if isinstance(v, jex.Literal) else env[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            values = list(map(value, eqn.invars))
            results = (
                self._sharded(jaxpr, eqn, values) if any(map(_is_later, values)) else evaluate_alone(jaxpr, eqn, values)
            )
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(value, jaxpr.outvars))

    def _sharded(self, jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        """Evaluates an operation, one of whose inputs is a shard."""
        name, first = eqn.primitive.name, values[0]
        if name in _CALLS:
            (inner,) = jex.jaxprs_in_params(eqn.params)
            closed = next(x for x in eqn.params.values() if isinstance(x, jex.ClosedJaxpr))
            return self.run(inner, closed.consts, values)
        # These move no element from one replica to another. A cast to a shorter dtype comes before the gather.
        if name == "convert_element_type":
            return [GatheredLater(lax.convert_element_type(first.array, eqn.params["new_dtype"]), first.dim)]
        if name == "transpose":
            order = tuple(eqn.params["permutation"])
            return [GatheredLater(lax.transpose(first.array, order), order.index(first.dim))]
        arrays = [x for v, x in zip(eqn.invars, values, strict=True) if isinstance(v, jex.Var) and not _is_later(x)]
        beside = max(arrays, key=lambda x: x.size, default=None)
        return evaluate_alone(jaxpr, eqn, [self.gathered(x, beside) for x in values])

    def gathered(self, value: jax.Array | GatheredLater, beside: jax.Array | None) -> jax.Array:
        """Returns a whole variable, given its shard. Other values are returned unchanged.

        Args:
          value: the value.
          beside: what the operation that needs it has as its other input. None if it has none.
        """
        if not isinstance(value, GatheredLater):
            return value
        shard = value.array
        if self._before is not None:
            shard, _ = optimization_barrier((shard, self._before))
        if beside is not None:
            self._before = beside
        whole: jax.Array = lax.all_gather(shard, REPLICA_AXIS, axis=value.dim, tiled=True)
        return whole


def _is_later(value: object) -> TypeGuard[GatheredLater]:
    return isinstance(value, GatheredLater)
