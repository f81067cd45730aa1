# SPDX-License-Identifier: Apache-2.0
"""Listens for notices that this process will soon be ended: SIGTERM, and the answer of a function. Uses the standard library only."""

import atexit
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import final

from typing_extensions import override

from phalanx.errors import ContextError
from phalanx.errors.deferred import failures

_POLL_S = 1.0
_STOP, _TERM = b"s", b"t"


@final
class Notices(threading.Thread):
    """A thread that reports each SIGTERM, and the first notice that a function returns. Create it in the main thread.

    SIGTERM no longer ends the process. `close` installs the handler that was there before.

    Args:
      caller: what the user called, for the message.
      told: called in this thread with what has happened, as the end of a sentence about this process.
      ask: called in this thread once per second, until it returns such an end of a sentence. If it raises, the next step raises
        the error. None for nothing to ask.

    Raises:
      ContextError: this is not the main thread, which alone can handle signals.
    """

    def __init__(self, caller: str, told: Callable[[str], None], ask: Callable[[], str | None] | None = None) -> None:
        super().__init__(name="phalanx-notices", daemon=True)
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                f"{caller} in the thread {threading.current_thread().name!r}",
                "it handles SIGTERM, which Python allows in the main thread only.",
                "create it in the main thread",
            )
        self._told, self._ask = told, ask
        # The handler only writes to a pipe: it may interrupt a thread that holds the lock of a condition or an event.
        self._read, self._write = os.pipe()
        # If thousands of signals fill the pipe, the handler drops one, because it must not wait.
        os.set_blocking(self._write, False)
        self._before = signal.signal(signal.SIGTERM, self._note)
        self.start()

    @override
    def run(self) -> None:
        """Waits for notices until `close`."""
        while True:
            ready, _, _ = select.select([self._read], [], [], None if self._ask is None else _POLL_S)
            news = os.read(self._read, 1) if ready else b""
            if news == _STOP:
                break
            notice = "received SIGTERM" if news == _TERM else self._asked()
            if notice is not None:
                self._told(notice)
        os.close(self._read)
        os.close(self._write)

    def _asked(self) -> str | None:
        assert self._ask is not None
        try:
            notice = self._ask()
        except Exception as e:
            failures.append(e)
            self._ask = None
            return None
        if notice is not None:
            self._ask = None  # It would say the same each time.
        return notice

    def close(self, *, is_ending: bool = False) -> None:
        """Ends the thread, and handles SIGTERM as before. May be called twice.

        Args:
          is_ending: whether this process ends now, with an exit code that another SIGTERM must not change.
        """
        if self.is_alive():
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, _ignore if is_ending else self._before)
            os.write(self._write, _STOP)
            self.join()
            if is_ending:
                # At its end, Python removes its own handlers.
                atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(self._write, _TERM)
        # Python has one handler per signal, so a second object passes each signal on to the first.
        earlier = getattr(self._before, "__self__", None)
        if isinstance(earlier, Notices):
            earlier._note(number, frame)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handles a signal. Programs that this process starts do not inherit it, other than SIG_IGN."""
