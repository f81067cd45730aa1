# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C between two steps, never within one; the second one at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Holds Ctrl-C back while a step runs and its results are stored, so that no weight is lost.

    Does nothing outside the main thread, where Python raises no KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._is_held = self._is_due = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises what came meanwhile at its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_due:
            self._is_due = False
            self._previous(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and not self._is_due:
            self._is_due = True
        else:
            self._previous(number, frame)
