# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: traces functions, executes them, and stores the results in the variables."""

import functools
import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from phalanx._src import compat
from phalanx._src.cluster.watch import membership
from phalanx._src.kernels import bodies, platforms
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs import signature
from phalanx._src.programs.cache import ProgramCache, Settings
from phalanx._src.programs.explain import explained
from phalanx._src.programs.interrupts import deferred
from phalanx._src.programs.state import Group, State
from phalanx._src.programs.trace import execute_program, trace_program
from phalanx._src.runtime.dispatch import calling_back, process_dispatching
from phalanx._src.runtime.observers import observers
from phalanx._src.tracing import context
from phalanx._src.tracing.boundary import on_demand
from phalanx._src.tracing.discovery import Discovery, used_differently
from phalanx._src.tracing.draws import Draws
from phalanx._src.tracing.records import EITHER_WAY, Record, defaults, deliver, noting_questions, recording_key
from phalanx._src.tracing.strategy import AbstractStrategy, Updates
from phalanx._src.tracing.structure import (
    AbstractStream,
    Arguments,
    Parts,
    Structure,
    refuse_outer_trace,
    require_alive,
    require_returnable,
)
from phalanx._src.tracing.update_sharding import sharding_of
from phalanx._src.typed_jax import block_until_ready, shape_dtype, with_sharding_constraint
from phalanx.errors import ContextError, TraceError
from phalanx.errors.deferred import failures, raise_deferred
from phalanx.typing import PyTree


class Program:
    """One compiled program, and the variables that it reads and writes.

    Args:
      fn: the function to compile.
      arguments: the arguments of the first call.
      name: the name of the function, for messages.
      eager: whether to execute the Python code at each call instead of compiling it.
      recording: the recording key, which says what the program does with summaries.

    Attributes:
      strategy: the strategy whose devices the program runs on.
      trains: whether the function applies an optimizer; or else whether replicas compute something from a batch without any
        Keras variable, as a step does that takes and returns its state.
      num_steps: the number of steps that the arguments are stacked for. None if they are not stacked.
    """

    def __init__(
        self, fn: Callable[..., Any], arguments: Arguments, name: str, *, eager: bool, recording: Hashable = None
    ) -> None:
        self._eager, self.name = eager, name
        self._structure = arguments.structure
        self._num_arrays = len(arguments.arrays)
        # What JAX calls if it compiles the program again. Only kept while the program runs: the function lives for as long as
        # its owner wants, and its programs for as long as the function.
        self._called: _Traced | None = _Traced(fn, arguments.streams)
        with noting_questions() as are_asked:
            discovery = self._trace(arguments.arrays)
            self.recording = recording if are_asked() else EITHER_WAY
        self._trace_made: Discovery | None = discovery
        # An empty tuple for most programs, so that a call need not look for batches.
        self.draws = Draws(discovery.draws, arguments.streams) if discovery.draws else ()
        self._output: Structure = discovery.outputs.structure
        self._variables, self._written = discovery.variables, discovery.written
        self._has_callback = discovery.has_callback
        self.strategy = self._strategy = _strategy_of(discovery)
        is_functional = bool(discovery.strategies) and not discovery.variables and any(arguments.sharded)
        self.trains = bool(discovery.optimizers or discovery.updates) or is_functional
        if self.trains and not membership.may_train():
            raise _refuse_alone(name)
        self.num_steps = next((run.steps for run in discovery.runs if run.steps is not None), None)
        self._topology, self._updates = self._strategy.topology, discovery.updates
        storage = self._strategy.storage if self._strategy.updates is Updates.AFTER_PROGRAM else self._topology
        self._homes = [] if self._topology.is_single else _homes(discovery, self._topology)
        # Kept alive with the program, like any other object that its function closes over.
        self._closed_over = discovery.closed_over()
        self._state = State(discovery.variables, discovery.written, self._topology, storage)
        self.settings = Settings(discovery.variables, discovery.optimizers)
        self._global_seeds = list(filter(compat.is_global_seed, discovery.seeds))
        # JAX runs a program again to find the operation that made a NaN, and a callback that raises must leave the state unchanged.
        # Neither works with donated arrays.
        donate = () if discovery.has_callback or checks_numbers() or not self._strategy.donates else (0,)
        compiler = jax.jit
        if self._topology.has_devices and self._topology.is_single and not discovery.variables:
            # Without variables and batches, nothing else tells JAX to use the strategy's device instead of the default one.
            compiler = functools.partial(jax.jit, out_shardings=self._topology.replicated)
        self._compiled = compiler(self._traced, donate_argnums=donate)
        self._execute: Callable[..., tuple[Any, ...]] = self._execute_eagerly if eager else self._compiled
        if discovery.has_callback:
            self._execute = functools.partial(_finished, self._execute)
        self._has_run = False
        self._is_local = self._topology.num_workers == 1
        self._called = None

    def __call__(self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]) -> PyTree:
        """Runs the program, stores the values that it wrote, and applies the updates that it left.

        Args:
          fn: the function, in case JAX traces it again.
          arguments: the arguments of this call.
          batches: the batches that the program takes from iterators.
        """
        if observers.of_programs and not self._eager:
            for observer in observers.of_programs:
                observer.before_program(Call(self, fn, arguments, batches))
        for state in self._global_seeds:
            compat.continue_global_seed(state)
        run = self._run_as_one_step if self._updates or self.draws else self._run
        outputs = run(fn, arguments, batches)
        if outputs[4]:
            deliver(outputs[4])
        structure = outputs[5] if self._eager else self._output
        return structure.join(outputs[2], arguments.streams)

    def _run_as_one_step(
        self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]
    ) -> tuple[Any, ...]:
        """Runs the program, applies its updates and advances its iterators. If one of these fails, all are undone."""
        before = self._state.fields() if self._updates else []
        with deferred():
            outputs = self._run(fn, arguments, batches)
            try:
                for update, gradients in zip(self._updates, outputs[3], strict=True):
                    self._strategy.apply_update(replace(update, gradients=gradients))
            except BaseException:
                self._state.reset(before)
                raise
            if self.draws:
                self.draws.advance(arguments)
        return outputs

    def _run(self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]) -> tuple[Any, ...]:
        """Runs the program and stores the values that it wrote. Returns values, components, results and gradients."""
        if failures:
            raise_deferred()
        with process_dispatching() if self._is_local else self._dispatching_with_peers():
            inputs = self._inputs(arguments)
            for batch in batches:
                inputs += self._inputs(batch)
            inputs += self._closed_over
            donated, read_only = self._state.take()
            self._called = _Traced(fn, arguments.streams)
            try:
                outputs = (self._state.run if self._has_run else self._first_run)(
                    self._execute, donated, read_only, inputs
                )
            except Exception as e:
                self._state.raise_if_lost(donated, e)
                if isinstance(e, RecursionError) and checks_numbers():
                    raise FloatingPointError("a NaN or an infinity in what a step returned or stored") from None
                raise
            finally:
                self._called = None
            if isinstance((outputs[2] or outputs[0] or (None,))[0], jax.core.Tracer):
                self._state.put_back(donated)
                raise refuse_outer_trace()
            return outputs

    def _dispatching_with_peers(self) -> AbstractContextManager[Any]:
        return self._topology.dispatching(is_step=True)

    def _first_run(
        self, execute: Callable[..., tuple[Any, ...]], donated: Group, read_only: Group, inputs: list[Any]
    ) -> tuple[Any, ...]:
        if not self._eager:
            # Compile before signals are deferred, so that Ctrl-C need not wait for the compiler. JAX caches the result.
            self._compiled.lower(donated, read_only, inputs).compile()
        # JAX makes the first call of a compiled function in Python, where a signal handler could raise.
        with deferred():
            outputs = self._state.run(execute, donated, read_only, inputs)
        self._has_run = True
        return outputs

    def require_equal(self, inputs: Sequence[Arguments]) -> None:
        """Waits until the other processes are about to run the same program.

        Raises:
          TraceError: they are about to run another one.
        """
        assert self._trace_made is not None
        signature.require_equal(self._trace_made, inputs, self._topology)

    def traced(self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]) -> jax.stages.Traced:
        """Returns the program before it is lowered. Only shapes enter it, so neither values nor devices need to exist."""
        with process_dispatching():
            self._called = _Traced(fn, arguments.streams)
            inputs = [x for source in (arguments, *batches) for x in self._shapes(source)] + self._closed_over
            try:
                return self._compiled.trace(*self._state.shapes(), inputs)
            finally:
                self._called = None

    def _shapes(self, arguments: Arguments) -> list[Any]:
        """Returns the descriptions of the inputs of the program. Python numbers describe themselves."""
        pairs, topology = zip(arguments.arrays, arguments.sharded, strict=True), self._topology
        return [
            shape_dtype(
                x.shape,
                x.dtype,
                sharding=topology.per_replica if is_sharded else topology.replicated,
                weak_type=getattr(x, "weak_type", False),
            )
            if topology.has_devices and (is_sharded or isinstance(x, jax.Array))
            else x
            for x, is_sharded in pairs
        ]

    def _inputs(self, arguments: Arguments) -> list[Any]:
        inputs, topology = list(arguments.arrays), self._topology
        if not topology.has_devices:
            return inputs
        for i, (array, sharded) in enumerate(zip(inputs, arguments.sharded, strict=True)):
            if not (sharded or isinstance(array, jax.Array)):
                continue
            sharding = topology.per_replica if sharded else topology.replicated
            placed = isinstance(array, jax.Array) and ((actual := array.sharding) is sharding or actual == sharding)
            if not placed:
                inputs[i] = topology.put_per_replica([array])[0] if sharded else topology.put_replicated(array)
        return inputs

    def _traced(
        self, donated: Group, read_only: Group, inputs: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Record]]:
        """Maps state and inputs to new state, results, gradients of updates, and records. JAX compiles this function."""
        values, parts = self._merged(donated, read_only)
        num_called = len(inputs) - len(self._closed_over)
        inputs, batches, closed_over = (
            inputs[: self._num_arrays],
            inputs[self._num_arrays : num_called],
            inputs[num_called:],
        )
        discovery = self._taken_trace(inputs).taking(closed_over)
        run = discovery.evaluate
        devices = self._topology.devices if self._topology.has_devices else ()
        if platforms.are_cpus(devices) and bodies.are_of_interest(discovery.jaxpr.jaxpr):
            run = functools.partial(bodies.with_fast_convolutions, run)
        outputs = run([*values, *batches], parts, inputs)
        values = outputs.values
        if self._homes:
            values = [
                x if x is None else with_sharding_constraint(x, home)
                for x, home in zip(values, self._homes, strict=True)
            ]
        records = outputs.records
        if not self._topology.is_single:
            # The chief writes them, so it needs the whole of each.
            records = jax.tree.map(lambda x: with_sharding_constraint(x, self._topology.replicated), records)
        # State first: XLA assigns donated buffers to outputs of their size in order, and a variable should keep its own buffer.
        return values, self._state.of_on_read(outputs.parts), outputs.result, outputs.gradients, records

    def _execute_eagerly(self, donated: Group, read_only: Group, inputs: list[Any]) -> tuple[Any, ...]:
        """Executes the Python code of the program operation by operation."""
        assert self._trace_made is not None
        with self._topology.default_device():
            values, parts = self._merged(donated, read_only)
            inputs = list(map(jnp.asarray, inputs[: self._num_arrays]))
            outputs = execute_program(self._call, inputs, self._trace_made, values, parts)
        return (
            outputs.values,
            self._state.of_on_read(outputs.parts),
            outputs.result,
            outputs.gradients,
            outputs.records,
            outputs.structure,
        )

    def _merged(self, donated: Group, read_only: Group) -> Group:
        """Returns values and components of all variables, in order."""
        values, parts = self._state.merge(donated, read_only)
        return on_demand(self._variables, values, parts), parts

    def _taken_trace(self, inputs: list[Any]) -> Discovery:
        """Returns the trace and drops it. If JAX compiles again, because one of its settings changed, traces again."""
        discovery, self._trace_made = self._trace_made, None
        if discovery is None:
            discovery = self._trace(inputs)
            known = list(map(id, self._variables)), self._written
            if (list(map(id, discovery.variables)), discovery.written) != known:
                raise used_differently("a variable")
        return discovery

    def _trace(self, inputs: list[Any]) -> Discovery:
        assert self._called is not None
        return trace_program(self._call, inputs, named=self._called.fn, eager=self._eager)

    def _call(self, inputs: list[Any]) -> Parts:
        """Calls the function, and takes apart what it returns."""
        assert self._called is not None
        fn, streams = self._called
        args, kwargs = self._structure.join(inputs, streams)
        parts = Parts(fn(*args, **kwargs), streams=streams)
        require_returnable(parts.arrays)
        return parts


class _Traced(NamedTuple):
    """The function that a program calls when it is traced, and the streams among its arguments."""

    fn: Callable[..., Any]
    streams: Sequence[AbstractStream]


@dataclass(frozen=True)
class Call:
    """A call of a compiled program, before the program runs.

    Args:
      program: the program.
      fn: its function.
      arguments: the arguments of the call.
      batches: the batches that the program takes from iterators.
    """

    program: Program
    fn: Callable[..., Any]
    arguments: Arguments
    batches: Sequence[Arguments]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.program.name

    def trace(self) -> jax.stages.Traced:
        """Returns the program before it is lowered."""
        return self.program.traced(self.fn, self.arguments, self.batches)

    def traced_again(self) -> "Call":
        """Returns this call of a new program, for the devices that its strategy has now, and for converted arguments."""
        with without_collections(), explained():
            arguments = self.arguments.converted()
            program = Program(self.fn, arguments, self.name, eager=False, recording=recording_key())
        batches = program.draws.look(arguments) if program.draws else ()
        assert batches is not None
        return Call(program, self.fn, arguments, batches)


_living: "weakref.WeakSet[Programs]" = weakref.WeakSet()


def forget_all() -> None:
    """Drops the compiled programs of all functions and strategies."""
    for programs in list(_living):
        programs.forget()


class Programs:
    """The compiled programs of one `phalanx.function`, or of one strategy."""

    def __init__(self) -> None:
        self._cache: ProgramCache[Program] = ProgramCache()
        _living.add(self)

    def forget(self) -> None:
        """Drops all programs, because the devices that they were compiled for are gone."""
        self._cache = ProgramCache()

    def call(
        self,
        function: object,
        fn: Callable[..., Any],
        args: PyTree,
        kwargs: PyTree,
        *,
        key: Hashable = None,
        eager: bool = False,
        runs: bool = True,
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` as a program.

        Args:
          function: the function that owns the program. The program is dropped with it.
          fn: the function to compile.
          args: positional arguments of `fn`.
          kwargs: keyword arguments of `fn`.
          key: selects the program, besides `function` and the shapes and dtypes of the arguments.
          eager: whether to execute the Python code instead of compiling it.
          runs: False to trace the program without running it, so that the next such call only runs it.

        Raises:
          InputError: an argument is a deleted array, or JAX cannot hold it.
        """
        arguments = Arguments(args, kwargs)
        try:
            mode = context.current()
            is_recording = defaults.writer is not None or defaults.condition is not True
            recording = recording_key() if is_recording else None  # This runs at every step.
            settings = (mode.strategy, mode.replica is None, eager, checks_numbers())
            full_key = (key, arguments.key, settings)
            known = self._cache.known(function, full_key)
            for program in known:
                if program.recording in (EITHER_WAY, recording) and program.settings.hold():
                    batches = program.draws.look(arguments) if program.draws else ()
                    if batches is not None:
                        return program(fn, arguments, batches) if runs else None
            with without_collections(), explained():
                program = Program(fn, arguments, _name_of(function), eager=eager, recording=recording)
                batches = program.draws.look(arguments) if program.draws else ()
                assert batches is not None
                program.require_equal((arguments, *batches))
                result = program(fn, arguments, batches) if runs else None
            known.append(program)
            return result
        except RuntimeError:
            require_alive(args, kwargs)
            raise

    def lower(self, fn: Callable[..., Any], args: PyTree, kwargs: PyTree) -> jax.stages.Lowered:
        """Returns the program of `fn(*args, **kwargs)` without running it."""
        arguments = Arguments(args, kwargs)
        program = Program(fn, arguments, _name_of(fn), eager=False)
        batches = program.draws.look(arguments) if program.draws else ()
        assert batches is not None
        lowered: jax.stages.Lowered = program.traced(fn, arguments, batches).lower()
        return lowered


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disables the garbage collector. A trace makes so many objects that one collection takes a tenth of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _refuse_alone(name: str) -> ContextError:
    return ContextError(
        f"the training step {name} in a process that has joined running workers",
        "they continue from their current step, and this process would train alone from the beginning.",
        "for loss in phalanx.elastic.steps(train_step, dataset): ..., or model.fit",
    )


def _finished(execute: Callable[..., Any], *args: PyTree) -> PyTree:
    """Executes a program that calls back to Python, and waits for its end, because only then do failed callbacks raise."""
    with calling_back():
        return block_until_ready(execute(*args))


def checks_numbers() -> bool:
    """Returns whether JAX checks the results of programs for NaNs or infinities."""
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs)


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
    return [home for home, written in zip(homes, discovery.written, strict=True) if written]
