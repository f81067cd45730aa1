# SPDX-License-Identifier: Apache-2.0
"""Signals that arrive while state is half written: their handlers run when it is whole.

A Python signal handler runs in the main thread between two bytecodes, and may raise there: `KeyboardInterrupt` after Ctrl-C,
or an exception of the user's. Most steps need nothing of this, because `State.run` executes a program and stores what it
wrote between two bytecodes.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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
