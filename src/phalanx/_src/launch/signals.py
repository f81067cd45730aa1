# SPDX-License-Identifier: Apache-2.0
"""Handles the signals that ask the launcher to end, and the one that wakes it."""

import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, final

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SIGNAL_S = 0.5


@final
class Signals:
    """A context manager that records signals that ask this process to end, and wakes it when a child has ended.

    A signal that this process was started to ignore stays ignored, as Unix programs have it: `nohup` lets its program ignore SIGHUP, and
    a shell without job control lets its background jobs ignore SIGINT. SIGTERM still ends them. Works in the main thread only.

    Args:
      clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._received: list[tuple[int, float]] = []

    def __enter__(self) -> Self:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        # Python writes a byte per signal, and a full buffer must not block the handler (signal.set_wakeup_fd requires it).
        self._theirs.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        handled_signals = [s for s in _ENDING if signal.getsignal(s) is not signal.SIG_IGN]
        self._before: dict[int, Any] = {s: signal.signal(s, self._note) for s in handled_signals}
        # Without a handler in Python, the kernel ignores SIGCHLD, and nothing is written.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._ours.close()
        self._theirs.close()

    @property
    def first(self) -> int | None:
        """The first signal that asked this process to end, or None."""
        return self._received[0][0] if self._received else None

    @property
    def is_urgent(self) -> bool:
        """Whether a second signal followed later. Some senders signal twice at once, to a process and to its group."""
        return bool(self._received) and self._received[-1][1] - self._received[0][1] > _SAME_SIGNAL_S

    @property
    def fileno(self) -> int:
        """The file descriptor that is ready after a signal."""
        return self._ours.fileno()

    def clear(self) -> None:
        """Resets `fileno`, so that it becomes ready at the next signal."""
        self._ours.recv(1 << 12)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received.append((number, self._clock()))
