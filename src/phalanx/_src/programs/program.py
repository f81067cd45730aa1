# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: traces functions, executes them, and stores the results in the variables."""

import functools
import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from phalanx._src import compat
from phalanx._src.cluster.watch import membership
from phalanx._src.kernels import optimization
from phalanx._src.mesh.values import map_leaves, one_copy
from phalanx._src.programs import gathering, signature
from phalanx._src.programs.body import Body, CalledFunction
from phalanx._src.programs.cache import ProgramCache, Settings
from phalanx._src.programs.explain import explained
from phalanx._src.programs.interrupts import deferred
from phalanx._src.programs.state import Group
from phalanx._src.runtime.dispatch import calling_back, process_dispatching
from phalanx._src.runtime.observers import observers
from phalanx._src.tracing import context
from phalanx._src.tracing.draws import Draws
from phalanx._src.tracing.records import EITHER_WAY, defaults, deliver, noting_questions, recording_key
from phalanx._src.tracing.structure import Arguments, refuse_outer_trace, require_alive, with_values
from phalanx._src.typed_jax import block_until_ready, shape_dtype
from phalanx.errors import ContextError
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
      trains: whether the function applies an optimizer; or else whether replicas run a training step, see `Discovery.trains`.
      num_steps: the number of steps that the arguments are stacked for. None if they are not stacked.
    """

    def __init__(
        self, fn: Callable[..., Any], arguments: Arguments, name: str, *, eager: bool, recording: Hashable = None
    ) -> None:
        self.name = name
        with noting_questions() as are_asked:
            self._body = body = Body(fn, arguments, eager=eager)
            self.recording = recording if are_asked() else EITHER_WAY
        discovery = body.discovery
        assert discovery is not None
        # An empty tuple for most programs, so that a call need not look for batches.
        self.draws = Draws(discovery.draws, arguments.streams) if discovery.draws else ()
        self.strategy = body.strategy
        is_applied = bool(discovery.optimizers or discovery.updates)
        self.trains = is_applied or bool(discovery.strategies) and discovery.trains(arguments.sharded)
        if self.trains and not membership.may_train():
            raise _refuse_alone(name)
        self.num_steps = next((run.steps for run in discovery.runs if run.steps is not None), None)
        self._updates = discovery.updates
        self.settings = Settings(discovery.variables, discovery.optimizers)
        self._global_seeds = list(filter(compat.is_global_seed, discovery.seeds))
        # JAX runs a program again to find the operation that made a NaN, and a callback that raises must leave the state unchanged.
        # Neither works with donated arrays.
        donate = () if discovery.has_callback or checks_numbers() or not self.strategy.donates else (0,)
        compiler = jax.jit
        if body.topology.has_devices and body.topology.is_single and not discovery.variables:
            # Without variables and batches, nothing else tells JAX to use the strategy's device instead of the default one.
            compiler = functools.partial(jax.jit, out_shardings=body.topology.replicated)
        gathers = gathering.compiler_options(discovery.variables, body.topology)
        options = {**gathers, **optimization.compiler_options(body.devices)}
        self._compiled = compiler(body.compute, donate_argnums=donate, compiler_options=options)
        self._execute: Callable[..., tuple[Any, ...]] = body.compute_eagerly if eager else self._compiled
        if discovery.has_callback:
            self._execute = functools.partial(_finished, self._execute)
        self._has_run = False
        self._is_local = body.topology.num_workers == 1
        body.called = None

    def __call__(self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]) -> PyTree:
        """Runs the program, stores the values that it wrote, and applies the updates that it left.

        Args:
          fn: the function, in case JAX traces it again.
          arguments: the arguments of this call.
          batches: the batches that the program takes from iterators.
        """
        if observers.of_programs and not self._body.is_eager:
            for observer in observers.of_programs:
                observer.before_program(Call(self, fn, arguments, batches))
        # `keras.utils.set_random_seed` may have replaced the generator since the trace.
        for state in self._global_seeds:
            compat.continue_global_seed(state)
        run = self._run_as_one_step if self._updates or self.draws else self._run
        outputs = run(fn, arguments, batches)
        if outputs[4]:
            deliver(outputs[4])
        structure = outputs[5] if self._body.is_eager else self._body.output
        result = structure.join(outputs[2], arguments.streams)
        if self._body.returns_variables:
            result = with_values(result)
        # JAX refuses to combine arrays of the replicas' devices with variables, which are committed to another device.
        return map_leaves(one_copy, result) if self._body.state.is_lent else result

    def _run_as_one_step(
        self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]
    ) -> tuple[Any, ...]:
        """Runs the program, applies its updates and advances its iterators. If an update fails, all are undone."""
        # Only a program that works on copies leaves updates, so the old values still exist.
        before = self._body.state.fields() if self._updates else []
        with deferred():
            outputs = self._run(fn, arguments, batches)
            try:
                for update, gradients in zip(self._updates, outputs[3], strict=True):
                    self.strategy.apply_update(replace(update, gradients=gradients))
            except BaseException:
                self._body.state.reset(before)
                raise
            if self.draws:
                self.draws.advance(arguments)
        return outputs

    def _run(self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]) -> tuple[Any, ...]:
        """Runs the program and stores the values that it wrote. Returns values, components, results and gradients."""
        # Errors of background threads, such as a failed save of a checkpoint.
        if failures:
            raise_deferred()
        with process_dispatching() if self._is_local else self._dispatching_with_peers():
            inputs = self._inputs(arguments)
            for batch in batches:
                inputs += self._inputs(batch)
            inputs += self._body.closed_over
            donated, read_only = self._body.state.take()
            self._body.called = CalledFunction(fn, arguments.streams)
            try:
                outputs = (self._body.state.run if self._has_run else self._first_run)(
                    self._execute, donated, read_only, inputs
                )
            except Exception as e:
                self._body.state.raise_if_lost(donated, e)
                if isinstance(e, RecursionError) and checks_numbers():
                    raise FloatingPointError("a NaN or an infinity in what a step returned or stored") from None
                raise
            finally:
                self._body.called = None
            # The user called the program inside `jax.jit`, `jax.grad` or another trace of JAX.
            if isinstance((outputs[2] or outputs[0] or (None,))[0], jax.core.Tracer):
                self._body.state.put_back(donated)
                raise refuse_outer_trace()
            return outputs

    def _dispatching_with_peers(self) -> AbstractContextManager[Any]:
        return self._body.topology.dispatching(is_step=True)

    def _first_run(
        self, execute: Callable[..., tuple[Any, ...]], donated: Group, read_only: Group, inputs: list[Any]
    ) -> tuple[Any, ...]:
        if not self._body.is_eager:
            # Compile before signals are deferred, so that Ctrl-C need not wait for the compiler. JAX caches the result.
            self._compiled.lower(donated, read_only, inputs).compile()
        # JAX makes the first call of a compiled function in Python, where a signal handler could raise.
        with deferred():
            outputs = self._body.state.run(execute, donated, read_only, inputs)
        self._has_run = True
        return outputs

    def require_equal(self, inputs: Sequence[Arguments]) -> None:
        """Waits until the other processes are about to run the same program.

        Raises:
          TraceError: they are about to run another one.
        """
        assert self._body.discovery is not None
        signature.require_equal(self._body.discovery, inputs, self._body.topology)

    def traced(self, fn: Callable[..., Any], arguments: Arguments, batches: Sequence[Arguments]) -> jax.stages.Traced:
        """Returns the program before it is lowered. Only shapes enter it, so neither values nor devices need to exist."""
        with process_dispatching():
            self._body.called = CalledFunction(fn, arguments.streams)
            inputs = [x for source in (arguments, *batches) for x in self._shapes(source)] + self._body.closed_over
            try:
                return self._compiled.trace(*self._body.state.shapes(), inputs)
            finally:
                self._body.called = None

    def _shapes(self, arguments: Arguments) -> list[Any]:
        """Returns the descriptions of the inputs of the program. Python numbers describe themselves."""
        pairs, topology = zip(arguments.arrays, arguments.sharded, strict=True), self._body.topology
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
        inputs, topology = list(arguments.arrays), self._body.topology
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
                    # None: the next batch has other shapes. Another program of the list may fit.
                    if batches is not None:
                        return program(fn, arguments, batches) if runs else None
            with without_collections(), explained():
                program = Program(fn, arguments, _name_of(function), eager=eager, recording=recording)
                batches = program.draws.look(arguments) if program.draws else ()
                assert batches is not None
                program.require_equal((arguments, *batches))
                result = program(fn, arguments, batches) if runs else None
            # Last, so that a program that the other processes do not run, or whose first run fails, is traced again.
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
