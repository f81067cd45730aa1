# SPDX-License-Identifier: Apache-2.0
"""Runs the trace of a replica with fewer and smaller exchanges: rows of tables, and small sums that travel with larger ones."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from phalanx._src.collectives.primitives import joined, split
from phalanx._src.kernels import platforms
from phalanx._src.kernels.rewriting import equations_of
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.programs import gathering, table_rows
from phalanx._src.programs.stages import divided
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx._src.typed_jax import psum
from phalanx.typing import PyTree

_SMALL_BYTES = 32 << 10
"""The largest sum that travels with another one. A message between processes costs as much time as 0.2 ms of bytes."""


def run(discovery: Discovery, strategy: AbstractStrategy, values: Sequence[Any], *args: PyTree) -> PyTree:
    """Runs the trace of a replica and returns the result of the function.

    Args:
      discovery: the trace.
      strategy: the strategy of the replicas.
      values: values of the variables, some of which may be gathered later.
      *args: arguments of the function.
    """
    flat = discovery.flat(values, [], *args)
    looks_up = table_rows.are_of_interest(discovery, strategy.topology)
    joins_sums = _may_join_sums(discovery, strategy)
    if not (looks_up or joins_sums) or any(map(gathering.is_later, flat)):
        return gathering.run(discovery, values, *args)
    closed = discovery.without_tapes(*flat)
    eqns = table_rows.with_rows(closed.jaxpr.eqns) if looks_up else closed.jaxpr.eqns
    jaxpr: jex.Jaxpr = closed.jaxpr.replace(eqns=with_joined_sums(eqns) if joins_sums else eqns)  # type: ignore[attr-defined]
    return discovery.result(jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, closed.consts))(*flat))


def _may_join_sums(discovery: Discovery, strategy: AbstractStrategy) -> bool:
    topology, options = strategy.topology, strategy.communication_options
    # On GPUs and TPUs, XLA joins messages itself. Along a model axis, it may divide gradients.
    are_slow = topology.num_workers > 1 and not topology.axes and platforms.are_cpus(topology.devices)
    # Users choose messages of some size. An exchange that moves would change the order in which callbacks run.
    if not are_slow or options is not None and options.bytes_per_pack or discovery.has_callback:
        return False
    return sum(map(table_rows.is_sum, discovery.jaxpr.jaxpr.eqns)) > 1


def with_joined_sums(eqns: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Returns the equations of a trace in another order, in which small sums travel together and with a larger one.

    For example, the metrics of `fit` with the gradients. What waits for another exchange keeps its own.
    """
    ordered: list[jex.JaxprEqn] = []
    for stage in divided(eqns):
        sums = [eqn for eqn in stage.exchanges if table_rows.is_sum(eqn) and eqn.primitive.name == "psum"]
        ordered += [*stage.part, *(eqn for eqn in stage.exchanges if all(eqn is not each for each in sums))]
        for dtype in dict.fromkeys(_summed(eqn).dtype for eqn in sums):
            by_size = sorted((eqn for eqn in sums if _summed(eqn).dtype == dtype), key=lambda eqn: _summed(eqn).size)
            num_small = sum(_summed(eqn).size * dtype.itemsize <= _SMALL_BYTES for eqn in by_size)
            ordered += [*_as_one(by_size[: num_small + 1]), *by_size[num_small + 1 :]]
    return ordered


def _as_one(sums: Sequence[jex.JaxprEqn]) -> Sequence[jex.JaxprEqn]:
    """Returns the equations of one sum for several."""
    if len(sums) < 2:
        return sums

    def total(*arrays: jax.Array) -> list[jax.Array]:
        return split(psum(joined(list(arrays)), REPLICA_AXIS), list(arrays))

    last = max(sums, key=lambda eqn: _summed(eqn).size)
    return equations_of(total, [eqn.invars[0] for eqn in sums], [eqn.outvars[0] for eqn in sums], last.source_info)


def _summed(eqn: jex.JaxprEqn) -> jax.ShapeDtypeStruct:
    return table_rows.shape_of(eqn.invars[0])
