# SPDX-License-Identifier: Apache-2.0
"""What a program computes: a function of state and inputs, which is traced once, and which JAX compiles."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding

from phalanx._src.kernels import bodies, platforms
from phalanx._src.kernels.rewriting import Rule, rewritten
from phalanx._src.kernels.sums import by_all_to_all
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.state import Group, State
from phalanx._src.programs.trace import execute_program, trace_program
from phalanx._src.runtime.notes import note
from phalanx._src.tracing import context
from phalanx._src.tracing.boundary import on_demand
from phalanx._src.tracing.discovery import Discovery, used_differently
from phalanx._src.tracing.records import Record
from phalanx._src.tracing.strategy import AbstractStrategy, Updates
from phalanx._src.tracing.structure import AbstractStream, Arguments, Parts, Structure, require_returnable, with_values
from phalanx._src.tracing.update_sharding import sharding_of
from phalanx._src.typed_jax import with_sharding_constraint
from phalanx.errors import TraceError


class CalledFunction(NamedTuple):
    """The function that a program calls when it is traced, and the streams among its arguments."""

    fn: Callable[..., Any]
    streams: Sequence[AbstractStream]


class Body:
    """What a program computes, and the variables that it reads and writes. Creating it traces the function.

    Args:
      fn: the function.
      arguments: the arguments of the first call.
      eager: whether the Python code is executed at each call.

    Attributes:
      is_eager: whether the Python code is executed at each call.
      called: what JAX calls if it compiles the program again. Only set while the program runs: the function lives for as long as its owner
        wants, and its programs for as long as the function.
      discovery: the trace. None once JAX has compiled it.
      output: the structure of the results.
      returns_variables: whether results are variables that the strategy updates after the program.
      strategy: the strategy whose devices the program runs on.
      topology: these devices.
      devices: the devices of the topology. Empty if its strategy has none.
      closed_over: the arrays that the function closes over, kept alive with the program.
      state: the variables.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, *, eager: bool) -> None:
        self.is_eager, self._structure, self._num_arrays = eager, arguments.structure, len(arguments.arrays)
        self.called: CalledFunction | None = CalledFunction(fn, arguments.streams)
        discovery = self._trace(arguments.arrays)
        self.discovery: Discovery | None = discovery
        self.output: Structure = discovery.outputs.structure
        self.returns_variables = any(isinstance(x.value, keras.Variable) for x in self.output.static_leaves())
        self._variables, self._written = discovery.variables, discovery.written
        self.strategy = _strategy_of(discovery)
        self.topology = topology = self.strategy.topology
        self.devices: Sequence[jax.Device] = topology.devices if topology.has_devices else ()
        storage = self.strategy.storage if self.strategy.updates is Updates.AFTER_PROGRAM else topology
        # XLA chooses the sharding of an output that has no constraint, and a variable must stay where its layout places it.
        self._homes = [] if topology.is_single else _homes(discovery, topology)
        self.closed_over = discovery.closed_over()
        self.state = State(discovery.variables, discovery.written, topology, storage)

    def compute(
        self, donated: Group, read_only: Group, inputs: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Record]]:
        """Maps state and inputs to new state, results, gradients of updates, and records. JAX compiles this function."""
        values, parts = self._merged(donated, read_only)
        # `Program._run` passes the arguments first, then the batches, and what the function closes over last.
        num_called = len(inputs) - len(self.closed_over)
        inputs, batches, closed_over = (
            inputs[: self._num_arrays],
            inputs[self._num_arrays : num_called],
            inputs[num_called:],
        )
        discovery = self._taken_trace(inputs).taking(closed_over)
        run = discovery.evaluate
        rules: list[Rule] = []
        if platforms.are_cpus(self.devices):
            # In loops and branches, XLA's convolutions for CPUs are plain loops: 361 ms instead of 21 for the gradients of a short batch.
            if bodies.are_of_interest(discovery.jaxpr.jaxpr):
                rules.append(bodies.in_fast_order)
            if self.topology.num_workers > 1:
                rules.append(by_all_to_all(REPLICA_AXIS, self.topology.num_replicas, is_whole=not self.topology.axes))
        if rules:
            run = functools.partial(rewritten, run, rules)
        outputs = run([*values, *batches], parts, inputs)
        values = outputs.values
        if self._homes:
            values = [
                x if x is None else with_sharding_constraint(x, home)
                for x, home in zip(values, self._homes, strict=True)
            ]
        records = outputs.records
        if not self.topology.is_single:
            # The chief writes them, so it needs the whole of each.
            records = jax.tree.map(lambda x: with_sharding_constraint(x, self.topology.replicated), records)
        # State first: XLA assigns donated buffers to outputs of their size in order, and a variable should keep its own buffer.
        return values, self.state.of_on_read(outputs.parts), outputs.result, outputs.gradients, records

    def compute_eagerly(self, donated: Group, read_only: Group, inputs: list[Any]) -> tuple[Any, ...]:
        """Executes the Python code of the program operation by operation."""
        assert self.discovery is not None
        with self.topology.default_device():
            values, parts = self._merged(donated, read_only)
            inputs = list(map(jnp.asarray, inputs[: self._num_arrays]))
            outputs = execute_program(self._call, inputs, self.discovery, values, parts)
        return (
            outputs.values,
            self.state.of_on_read(outputs.parts),
            outputs.result,
            outputs.gradients,
            outputs.records,
            outputs.structure,
        )

    def _merged(self, donated: Group, read_only: Group) -> Group:
        """Returns values and components of all variables, in order."""
        values, parts = self.state.merge(donated, read_only)
        return on_demand(self._variables, values, parts), parts

    def _taken_trace(self, inputs: list[Any]) -> Discovery:
        """Returns the trace and drops it. If JAX compiles again, because one of its settings changed, traces again."""
        discovery, self.discovery = self.discovery, None
        if discovery is None:
            discovery = self._trace(inputs)
            # By identity, because Keras variables compare by value.
            known = list(map(id, self._variables)), self._written
            if (list(map(id, discovery.variables)), discovery.written) != known:
                raise used_differently("a variable")
        return discovery

    def _trace(self, inputs: list[Any]) -> Discovery:
        assert self.called is not None
        return trace_program(self._call, inputs, named=self.called.fn, eager=self.is_eager)

    def _call(self, inputs: list[Any]) -> Parts:
        """Calls the function, and takes apart what it returns."""
        assert self.called is not None
        fn, streams = self.called
        args, kwargs = self._structure.join(inputs, streams)
        parts = Parts(with_values(fn(*args, **kwargs)), streams=streams)
        require_returnable(parts)
        return parts


def _strategy_of(discovery: Discovery) -> AbstractStrategy:
    """Returns the strategy whose `run`, or else whose `reduce` or `gather` the program calls. Without any, the current strategy."""
    strategies = [s for s in discovery.strategies if s.topology.has_devices]
    if len(strategies) > 1:
        context.require_same(strategies[0], strategies[1], "Strategy.run")
        raise TraceError(
            f"one program with the strategies {strategies}",
            "a program can run on the devices of one strategy only.",
            "write one phalanx.function per strategy",
        )
    return next((s for s in (*strategies, *discovery.reducing) if s.topology.has_devices), context.get_strategy())


def _homes(discovery: Discovery, topology: Topology) -> list[NamedSharding]:
    """Returns the shardings of the variables that a program writes.

    Raises:
      InvalidArgumentError: the program trains variables, and a rule of the layout matches none of them.
    """
    homes = [sharding_of(topology, v) for v in discovery.variables]
    if topology.layout is not None and discovery.optimizers:
        topology.layout.require_used()
        if news := topology.layout.news():
            note(news)
    return [home for home, written in zip(homes, discovery.written, strict=True) if written]
