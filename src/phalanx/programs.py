# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: how they are found again, called, and how the variables get their new values."""

import functools
import gc
import inspect
import operator
import sysconfig
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from phalanx import compat, context, lifting
from phalanx.errors import RecompilationWarning, TraceError
from phalanx.lifting import Discovery, DiscoveryMismatch, used_differently
from phalanx.replicate import execute_program, trace_program
from phalanx.state import Group, State
from phalanx.structure import Structure, is_number, take_apart
from phalanx.topology import Topology, dispatch_lock
from phalanx.values import RowMask
from phalanx.variables import describe

if TYPE_CHECKING:
    from phalanx.strategies.base import Strategy

F = TypeVar("F", bound=Callable[..., Any])

_NEW_FUNCTIONS_BEFORE_WARNING = 3
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_OF_USERS = (*_LIBRARIES, str(Path(__file__).parent))


@contextmanager
def explained(*, prints: bool = True) -> Iterator[None]:
    """Says in the words of Phalanx why a function cannot be traced.

    Args:
      prints: whether the function may print while it runs.
    """
    try:
        yield
    except DiscoveryMismatch as e:
        raise TraceError(
            f"{describe(e.variable)} in a traced function",
            "each time the function is traced it makes or uses another variable.",
            "make variables outside, or once: `if self.v is None: self.v = keras.Variable(...)`",
        ) from None
    except jax.errors.NonConcreteBooleanIndexError as e:
        raise TraceError(
            "an array whose shape depends on the values of another (`x[mask]`) in a traced function",
            "all shapes of a compiled program are static: they follow from those of its arguments.",
            "jnp.where(mask, x, 0), or jnp.nonzero(mask, size=...)",
        ) from e
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as e:
        raise TraceError(
            f"the value of an array (by `if`, `float`, `int`, `range` or NumPy) in a traced function{_place_of(e)}",
            "it has none yet: the function is traced once and compiled; numbers among its arguments are traced too.",
            "jnp.where(condition, a, b) or phalanx.cond for `if`; return the value to read it outside"
            + ("; jax.debug.print to print it" if prints else ""),
        ) from e


def _place_of(error: BaseException) -> str:
    """Returns which line of the user's raised an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_OF_USERS)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`)" if frames else ""


class Function:
    """A step that is compiled whole. `phalanx.function` makes it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._programs = Programs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        if lifting.innermost() is not None:
            return self._fn(*args, **kwargs)
        return self._programs.call(self._fn, self._fn, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Returns the program for these arguments without running it, for its text, its cost and its memory.

        Source: the method of `jax.jit`.

        Example:
          >>> import phalanx
          >>> step = phalanx.function(lambda x: x * 2)
          >>> step.lower(1.0).compile().cost_analysis()["flops"]
          1.0
        """
        return self._programs.lower(self._fn, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def function(fn: F | None = None) -> F:
    """Compiles a step that calls `Strategy.run`, `reduce` and `gather`, or reads and assigns variables, into one program.

    The first call traces `fn`; later calls with arguments of the same shapes and types run the compiled program. Arrays and
    numbers are inputs of the program; strings, bools, None and other Python objects select it. Inside another traced
    function it is an ordinary call. May be called in cross-replica context, and inside a replica function.

    Args:
      fn: the step. Its Python side effects happen while it is traced only.

    Returns:
      A callable like `fn`.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     total = keras.Variable(0.0, aggregation="sum")
      >>> @phalanx.function
      ... def step(x):
      ...     strategy.run(lambda: total.assign_add(x))
      ...     return total.value
      >>> float(step(2.0))
      4.0
    """
    return function if fn is None else Function(fn)  # type: ignore[return-value]


class Arguments:
    """The arguments of one call.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.structure, self.arrays, self.sharded, self.rows = take_apart((args, kwargs), is_number)
        for rows in self.rows:
            self.arrays += (rows.mask, np.int32(rows.count))
            self.sharded += (True, False)
        self.key: Hashable = (self.structure, len(self.rows), tuple(map(_spec, self.arrays)))

    @staticmethod
    def rebuild(structure: Structure, num_rows: int, arrays: Sequence[Any]) -> tuple[Any, Any, list[RowMask]]:
        """Returns `(args, kwargs, row masks)` with these arrays."""
        split = len(arrays) - 2 * num_rows
        rows = [RowMask(*arrays[i : i + 2]) for i in range(split, len(arrays), 2)]
        return (*structure.join(arrays[:split], rows), rows)


class Programs:
    """The compiled programs of one `phalanx.function`, or of one strategy.

    They are kept for as long as the function they belong to, or the object whose method it is.
    """

    def __init__(self) -> None:
        self._of_owner: weakref.WeakKeyDictionary[Any, dict[Hashable, list[Program]]] = weakref.WeakKeyDictionary()
        self._made_anew = MadeAnew()
        self._stand_ins: dict[int, _StandIn] = {}

    def call(
        self,
        function: Any,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        key: Hashable = None,
        eager: bool = False,
    ) -> Any:
        """Calls `fn(*args, **kwargs)` as a program.

        Args:
          function: what the program belongs to, and with `key` what tells it from others.
          fn: what it does.
          args: its arguments.
          kwargs: its keyword arguments.
          key: what else selects it.
          eager: whether to execute the Python code instead of compiling it.
        """
        arguments = Arguments(args, kwargs)
        is_method = isinstance(function, types.MethodType)
        owner, name = (function.__self__, function.__func__) if is_method else (function, None)
        try:
            programs = self._of_owner.get(owner)
        except TypeError:  # No hash, or no weak references.
            owner = self._stand_ins.setdefault(id(owner), _StandIn(owner))
            programs = self._of_owner.get(owner)
        if programs is None:
            self._made_anew.note(function)
            programs = self._of_owner[owner] = {}
        mode = context.current()
        full_key = (name, key, arguments.key, mode.strategy, mode.replica is None, eager, _checks_numbers())
        known = programs.get(full_key, ())
        for program in known:
            if program.fits():
                self._made_anew.forgive(function)
                return program(fn, arguments)
        with without_collections(), explained():
            program = Program(fn, arguments, eager=eager)
            result = program(fn, arguments)
        programs[full_key] = [*known, program]
        return result

    def lower(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> jax.stages.Lowered:
        """Returns the program of `fn(*args, **kwargs)` without running it."""
        arguments = Arguments(args, kwargs)
        return Program(fn, arguments, eager=False).lower(fn, arguments)


class MadeAnew:
    """Warns of functions that are made anew for each call, and so compiled each time."""

    def __init__(self) -> None:
        self._times: dict[types.CodeType, int] = {}

    def note(self, function: Any) -> None:
        """Hears of a function that was not called before."""
        code = _code_of(function)
        if code is None or code.co_filename.startswith(_NOT_OF_USERS):
            return
        self._times[code] = times = self._times.get(code, 0) + 1
        if times == _NEW_FUNCTIONS_BEFORE_WARNING:
            warnings.warn(
                f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) is made anew for each call, so it is "
                "compiled each time. HINT: define it once, outside the loop, and pass what changes as arguments.",
                RecompilationWarning,
                stacklevel=3,
            )

    def forgive(self, function: Any) -> None:
        """Hears of a function that was called once more."""
        if self._times:
            self._times.pop(_code_of(function), None)  # type: ignore[arg-type]


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from looking for garbage among the many objects of a trace: one look took a tenth of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _StandIn:
    """Keeps an object alive, so that its id stays its own."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


class Program:
    """One compiled program, and the variables it works on.

    Args:
      fn: what it does.
      arguments: the arguments of its first call.
      eager: whether to execute the Python code at each call instead of compiling it.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, *, eager: bool) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._eager = eager
        self._structure, self._num_rows = arguments.structure, len(arguments.rows)
        self._output: Structure
        found = self._trace(arguments.arrays)
        self._trace_made: Discovery | None = found
        self._variables, self._written, self._optimizers = found.variables, found.written, found.optimizers
        self._has_callback = found.has_callback
        self._strategy = _strategy_of(found)
        self._topology, self._updates = self._strategy.topology, found.updates
        storage = self._strategy.storage if self._strategy.lends_variables else self._topology
        self._homes = [] if self._topology is None or self._topology.is_single else _homes(found, self._topology)
        self._state = State(found.variables, found.written, self._topology, storage)
        self._trainable, self._changes = self._trainable_flags(), compat.changes.trainable
        self._rates = [compat.learning_rate_of(o) for o in found.optimizers]
        # jax runs a program with a NaN in its results again; and a callback that raises must find the state as it was.
        donate = () if found.has_callback or _checks_numbers() else (0,)
        self._compiled = jax.jit(self._traced, donate_argnums=donate)
        self._execute = self._traced if eager else self._compiled
        # Not kept: the function lives as long as its owner wants, and its programs as long as the function.
        self._fn = None

    def fits(self) -> bool:
        """Whether the Python objects that shaped the program are as they were."""
        if self._changes != compat.changes.trainable:
            if self._trainable_flags() != self._trainable:
                return False
            self._changes = compat.changes.trainable
        return all(map(operator.is_, map(compat.learning_rate_of, self._optimizers), self._rates))

    def __call__(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """Runs the program of `fn` and stores what it wrote."""
        with dispatch_lock if self._topology is None else self._topology.dispatching(is_step=True):
            inputs = self._inputs(arguments)
            donated, kept = self._state.take()
            self._fn = fn
            try:
                values, parts, flat, gradients = self._execute(donated, kept, inputs)
                if self._has_callback:
                    jax.block_until_ready((values, parts, flat))
            except Exception as e:
                self._state.raise_if_lost(donated, e)
                if isinstance(e, RecursionError) and _checks_numbers():
                    raise FloatingPointError("a NaN or an infinity in what a step returned or stored") from None
                raise
            finally:
                self._fn = None
            del donated, kept
            self._state.store(values, parts)
        for update, of_update in zip(self._updates, gradients, strict=True):
            self._strategy.apply_update(replace(update, gradients=of_update))
        return self._output.join(flat, arguments.rows)

    def lower(self, fn: Callable[..., Any], arguments: Arguments) -> jax.stages.Lowered:
        """Returns the program of `fn` as jax sees it."""
        with dispatch_lock:
            self._fn = fn
            try:
                return self._compiled.lower(*self._state.take(), self._inputs(arguments))
            finally:
                self._fn = None

    def _inputs(self, arguments: Arguments) -> list[Any]:
        inputs, topology = list(arguments.arrays), self._topology
        if topology is None:
            return inputs
        for i, (array, sharded) in enumerate(zip(inputs, arguments.sharded, strict=True)):
            if not (sharded or isinstance(array, jax.Array)):
                continue
            sharding = topology.per_replica if sharded else topology.replicated
            placed = isinstance(array, jax.Array) and ((found := array.sharding) is sharding or found == sharding)
            if not placed:
                inputs[i] = topology.put_per_replica([array])[0] if sharded else topology.put_replicated(array)
        return inputs

    def _trainable_flags(self) -> list[bool]:
        return [v.trainable for v in self._variables]

    def _traced(
        self, donated: Group, kept: Group, inputs: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The program as jax sees it: state and inputs to new state, results, and gradients for updates."""
        values, parts = self._state.merge(donated, kept)
        # What is combined on demand has components alone.
        values = [own.sum(0) if x is None else x for x, own in zip(values, parts, strict=True)]
        if self._eager:
            assert self._trace_made is not None
            inputs = list(map(jnp.asarray, inputs))
            result, values, parts, gradients = execute_program(self._call, inputs, self._trace_made, values, parts)
            return values, parts, result, gradients
        result, values, parts, gradients, *_ = self._taken_trace(inputs).evaluate(values, parts, inputs)
        if self._homes:
            values = [
                x if x is None else lax.with_sharding_constraint(x, home)
                for x, home in zip(values, self._homes, strict=True)
            ]
        # State first: XLA hands donated buffers to outputs of their size in order, and a variable is to get its own back.
        return values, parts, result, gradients

    def _taken_trace(self, inputs: list[Any]) -> Discovery:
        """Returns the trace, which is not kept for longer; a new one where jax compiles again, for it is set otherwise."""
        found, self._trace_made = self._trace_made, None
        if found is None:
            found = self._trace(inputs)
            known = list(map(id, self._variables)), self._written
            if (list(map(id, found.variables)), found.written) != known:
                raise used_differently("a variable")
        return found

    def _trace(self, inputs: list[Any]) -> Discovery:
        return trace_program(self._call, inputs, eager=self._eager)

    def _call(self, inputs: list[Any]) -> list[Any]:
        """Calls the function, and returns the arrays that it does."""
        assert self._fn is not None
        args, kwargs, rows = Arguments.rebuild(self._structure, self._num_rows, inputs)
        parts = take_apart(self._fn(*args, **kwargs), lambda x: isinstance(x, jax.Array), rows)
        self._output = parts.structure
        return parts.arrays


def _checks_numbers() -> bool:
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs)


def _code_of(function: Any) -> types.CodeType | None:
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return getattr(function, "__code__", None)


def _strategy_of(found: Discovery) -> "Strategy":
    """Returns the strategy on whose devices a program runs: the one that runs in it, else the current one."""
    strategies = [s for s in found.strategies if s.topology is not None]
    if len(strategies) > 1:
        context.require_same(strategies[0], strategies[1], "Strategy.run")
        raise TraceError(
            f"one program with the strategies {strategies}",
            "a program runs on the devices of one strategy.",
            "one phalanx.function for each strategy",
        )
    return strategies[0] if strategies else context.get_strategy()


def _homes(found: Discovery, topology: Topology) -> list[NamedSharding]:
    """Returns where the variables live that a program writes.

    Raises:
      InvalidArgumentError: variables are trained, and a rule of the layout has met none.
    """
    homes = [topology.sharding_of(compat.layout_path(v), v.shape) for v in found.variables]
    if topology.layout is not None and found.optimizers:
        topology.layout.require_used()
    return [home for home, written in zip(homes, found.written, strict=True) if written]


def _spec(array: Any) -> Hashable:
    """What about an array selects the program."""
    if isinstance(array, jax.core.Tracer):
        raise TraceError(
            "a phalanx program called on traced values",
            "it is inside jax.jit or another transformation of jax, which knows nothing of its variables.",
            "@phalanx.function instead of @jax.jit",
        )
    if isinstance(array, tuple):
        raise TraceError(
            f"an argument PerReplica({array!r})",
            "its components are Python objects, and all replicas run one program.",
            "pass arrays, and let the replica function choose by replica_id_in_sync_group",
        )
    if isinstance(array, jax.Array):
        # Arrays of random keys have no weak types.
        return (array.shape, array.dtype, getattr(array, "weak_type", False))
    if isinstance(array, (np.ndarray, np.generic)):
        return (array.shape, array.dtype)
    return type(array).__name__
