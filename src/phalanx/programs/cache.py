# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of functions: found again by function, arguments and settings, and dropped with the function."""

import functools
import gc
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from phalanx.errors import RecompilationWarning
from phalanx.errors.frames import is_of_user
from phalanx.programs.explain import explained
from phalanx.programs.program import Program, checks_numbers
from phalanx.tracing import context
from phalanx.tracing.structure import (
    Arguments,
    require_alive,
)

_NEW_FUNCTIONS_BEFORE_WARNING = 3


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

        Raises:
          InputError: an argument is no array that JAX can hold, or a deleted one.
        """
        arguments = Arguments(args, kwargs)
        try:
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
            full_key = (name, key, arguments.key, mode.strategy, mode.replica is None, eager, checks_numbers())
            known = programs.get(full_key, ())
            for program in known:
                if program.fits():
                    batches = program.draws.look(arguments) if program.draws else ()
                    if batches is not None:
                        self._made_anew.forgive(function)
                        return program(fn, arguments, batches)
            with without_collections(), explained():
                program = Program(fn, arguments, eager=eager)
                batches = program.draws.look(arguments) if program.draws else ()
                assert batches is not None
                program.require_equal((arguments, *batches))
                result = program(fn, arguments, batches)
            programs[full_key] = [*known, program]
            return result
        except RuntimeError:
            require_alive(args, kwargs)
            raise

    def lower(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> jax.stages.Lowered:
        """Returns the program of `fn(*args, **kwargs)` without running it."""
        arguments = Arguments(args, kwargs)
        program = Program(fn, arguments, eager=False)
        batches = program.draws.look(arguments) if program.draws else ()
        assert batches is not None
        return program.lower(fn, arguments, batches)


class MadeAnew:
    """Warns of functions that are made anew for each call, and so compiled each time."""

    def __init__(self) -> None:
        self._times: dict[types.CodeType, int] = {}

    def note(self, function: Any) -> None:
        """Hears of a function that was not called before."""
        code = _code_of(function)
        if code is None or not is_of_user(code.co_filename):
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


def _code_of(function: Any) -> types.CodeType | None:
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return getattr(function, "__code__", None)
