# SPDX-License-Identifier: Apache-2.0
"""Defers signal handlers while state is only partly written.

A Python signal handler runs in the main thread between two bytecodes, and may raise there: `KeyboardInterrupt` after Ctrl-C,
or an exception of the user. Most steps do not need this module, because `State.run` executes a program and stores its results
between two bytecodes.
"""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, final

_NAMES = (
    "INT",
    "TERM",
    "HUP",
    "QUIT",
    "BREAK",
    "ALRM",
    "VTALRM",
    "PROF",
    "USR1",
    "USR2",
    "CHLD",
    "CONT",
    "IO",
    "URG",
    "XCPU",
)
_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""Signals from a terminal, a timer or another process. Signals for errors of this process are not among them."""


@final
class Interrupts:
    """Defers signal handlers inside `held`.

    Only the main thread runs signal handlers, so in other threads this does nothing. A handler that is installed after
    `__enter__` is not deferred.

    Args:
      again_at_once: whether a second signal of the same kind is handled at once, for users who press Ctrl-C twice.
    """

    def __init__(self, *, again_at_once: bool = False) -> None:
        self._again_at_once = again_at_once
        self._is_held = False
        self._due: list[int] = []
        self._installed: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = ((number, signal.getsignal(number)) for number in _SIGNALS)
        # SIG_DFL, SIG_IGN and None (a handler that was not installed from Python) run no Python code.
        self._handlers = {number: handler for number, handler in handlers if callable(handler)}
        self._is_held = True
        try:
            for number in self._handlers:
                self._installed.append(number)
                signal.signal(number, self._handle)
        except BaseException:
            self._restore()
            raise
        self._is_held = False
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_held = True
        self._restore()
        self._run_due()

    def _restore(self) -> None:
        # A handler that is already restored may raise here. The others must still be restored.
        try:
            while self._installed:
                number = self._installed[-1]
                # Somebody may have installed another handler in the block. It stays.
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, self._handlers[number])
                self._installed.pop()
        finally:
            if self._installed:
                self._restore()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Runs the handlers of signals that arrive in this block when the block ends."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._run_due()

    def _run_due(self) -> None:
        while self._due:
            number = self._due.pop(0)
            self._handlers[number](number, None)  # The frame that was interrupted may have ended.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and not (self._again_at_once and number in self._due):
            self._due.append(number)
        else:
            self._handlers[number](number, frame)


@contextmanager
def deferred() -> Iterator[None]:
    """Runs the handlers of signals that arrive in this block when the block ends."""
    with Interrupts() as interrupts, interrupts.held():
        yield


def handler_of(number: int) -> Any:
    """Returns the handler of a signal, even while `Interrupts` defers it."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return owner._handlers[number] if isinstance(owner, Interrupts) else handler


_HOOK_RETURNS_WITHIN_S = 0.001


def raise_what_is_ignored() -> None:
    """Installs a hook that raises a signal handler's exception again if Python had to ignore it.

    Python ignores exceptions in destructors and in callbacks of weak references and of the garbage collector, so a Ctrl-C
    there would have no effect. JAX registers such a callback, which runs at every collection.
    Source: https://docs.python.org/3/library/sys.html#sys.unraisablehook
    """
    # As the interpreter ends, it sets the names of modules to None, and calls the hook after that.
    show, is_finalizing = sys.unraisablehook, sys.is_finalizing

    def raise_later(ignored: "sys.UnraisableHookArgs") -> None:
        if is_finalizing() or threading.current_thread() is not threading.main_thread():
            show(ignored)
            return
        number = _signal_of(ignored.exc_value, ignored.exc_traceback)
        if number is None:
            show(ignored)
            return
        handler, error = signal.getsignal(number), ignored.exc_value

        def raise_again(number: int, frame: FrameType | None) -> None:
            signal.signal(number, handler)
            assert error is not None
            raise error

        signal.signal(number, raise_again)
        # Another thread sends the signal after this hook has returned. In the hook, Python would ignore the exception again.
        _thread.start_new_thread(_interrupt_soon, (number,))

    sys.unraisablehook = raise_later


def _interrupt_soon(number: int) -> None:
    time.sleep(_HOOK_RETURNS_WITHIN_S)
    _thread.interrupt_main(signal.Signals(number))


def _signal_of(error: BaseException | None, traceback: TracebackType | None) -> int | None:
    """Returns the signal whose handler raised an error. None if no handler did."""
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return signal.SIGINT
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        numbers = [n for n in _SIGNALS if getattr(signal.getsignal(n), "__code__", None) is frame.f_code]
        if numbers:
            # One function may handle several signals. Its argument shows which one arrived.
            arguments = [x for x in frame.f_locals.values() if isinstance(x, int)]
            number: int = next((n for n in numbers if n in arguments), numbers[0])
            return number
    return None


raise_what_is_ignored()
