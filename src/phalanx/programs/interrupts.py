# SPDX-License-Identifier: Apache-2.0
"""Signals that arrive while state is half written: their handlers run when it is whole.

A Python signal handler runs in the main thread between two bytecodes, and may raise there: `KeyboardInterrupt` after Ctrl-C,
or an exception of the user's. Most steps need nothing of this, because `State.run` executes a program and stores what it
wrote between two bytecodes.
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
"""Signals that come from a terminal, a timer or another process, and are not errors of this one."""


@final
class Interrupts:
    """Defers signal handlers while something is `held`.

    Only the main thread runs signal handlers, so that in other threads there is nothing to defer. A handler that is
    installed after `__enter__` is not deferred.

    Args:
      again_at_once: whether the second signal of one kind is not deferred, for users who press Ctrl-C twice.
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
        # A handler that is back already may raise, and the others must be put back all the same.
        try:
            while self._installed:
                number = self._installed[-1]
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, self._handlers[number])
                self._installed.pop()
        finally:
            if self._installed:
                self._restore()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Runs the handlers of signals that arrive inside at its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._run_due()

    def _run_due(self) -> None:
        while self._due:
            number = self._due.pop(0)
            self._handlers[number](number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and not (self._again_at_once and number in self._due):
            self._due.append(number)
        else:
            self._handlers[number](number, frame)


@contextmanager
def deferred() -> Iterator[None]:
    """Runs the handlers of signals that arrive inside at its end."""
    with Interrupts() as interrupts, interrupts.held():
        yield


_AFTER_HOOK_S = 0.001


def raise_what_is_ignored() -> None:
    """Installs a hook that raises again what a signal handler raised where Python had to ignore it.

    Python ignores what is raised in a destructor, or in a callback of a weak reference or of the garbage collector, so that a
    Ctrl-C there would have no effect. JAX has such a callback, which runs at every collection.
    Source: https://docs.python.org/3/library/sys.html#sys.unraisablehook
    """
    show = sys.unraisablehook

    def hear(ignored: "sys.UnraisableHookArgs") -> None:
        number = _signal_of(ignored.exc_value, ignored.exc_traceback)
        if number is None or sys.is_finalizing() or threading.current_thread() is not threading.main_thread():
            show(ignored)
            return
        handler, error = signal.getsignal(number), ignored.exc_value

        def raise_again(number: int, frame: FrameType | None) -> None:
            signal.signal(number, handler)
            assert error is not None
            raise error

        signal.signal(number, raise_again)
        # By another thread, and later: here it would be raised in this hook, and ignored again.
        _thread.start_new_thread(_interrupt_soon, (number,))

    sys.unraisablehook = hear


def _interrupt_soon(number: int) -> None:
    time.sleep(_AFTER_HOOK_S)
    _thread.interrupt_main(signal.Signals(number))


def _signal_of(error: BaseException | None, traceback: TracebackType | None) -> int | None:
    """Returns the signal whose handler raised an error, if one did."""
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return signal.SIGINT
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        numbers = [n for n in _SIGNALS if getattr(signal.getsignal(n), "__code__", None) is frame.f_code]
        if numbers:
            # One function may handle several signals: its argument tells which one came.
            arguments = [x for x in frame.f_locals.values() if isinstance(x, int)]
            return next((n for n in numbers if n in arguments), numbers[0])
    return None


raise_what_is_ignored()
