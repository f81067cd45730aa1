# SPDX-License-Identifier: Apache-2.0
"""The progress line of `ClusterCoordinator.join`."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

_EVERY_S = 1.0
_EVERY_S_IN_LOGS = 30.0
_CLEARED = "\r\x1b[K"  # Moves to the start of the line, and clears it.


@dataclass(frozen=True)
class Status:
    """The progress of scheduled steps.

    Args:
      workers: number of workers.
      alive: number of workers that are running.
      queued: number of queued steps.
      in_flight: number of steps that are running.
      done: number of finished steps.
      again: number of steps that had to be given to another worker.
      updates: number of updates applied by the parameter servers.
      staleness: histogram, from staleness to number of steps.

    Example:
      >>> status = Status(
      ...     workers=2, alive=2, queued=7, in_flight=2, done=40, again=0, updates=40, staleness={0: 30, 1: 10}
      ... )
      >>> status.line(steps_per_s=20.0)
      '20 steps/s | workers 2/2 | queued 7, in flight 2 | staleness mean 0.25, max 1'
    """

    workers: int
    alive: int
    queued: int
    in_flight: int
    done: int
    again: int
    updates: int
    staleness: dict[int, int]

    def line(self, steps_per_s: float) -> str:
        """Returns the progress as one line of text. May be called in any context."""
        count = sum(self.staleness.values())
        mean = sum(value * times for value, times in self.staleness.items()) / max(1, count)
        return (
            f"{steps_per_s:.0f} steps/s | workers {self.alive}/{self.workers} | "
            f"queued {self.queued}, in flight {self.in_flight} | "
            f"staleness mean {mean:.2f}, max {max(self.staleness, default=0)}"
        )


@contextmanager
def shown(
    status: Callable[[], Status], done: int, stream: TextIO | None = None, every_s: float | None = None
) -> Iterator[None]:
    """Shows a progress line until the end of the block: refreshed on a terminal, written repeatedly elsewhere.

    Args:
      status: returns the current progress. If it raises an error, the progress line ends.
      done: number of steps that were done before.
      stream: where to write. None is standard error.
      every_s: interval in seconds. None means 1 s on a terminal and 30 s elsewhere.
    """
    stream = sys.stderr if stream is None else stream
    if every_s is None:
        every_s = _EVERY_S if stream.isatty() else _EVERY_S_IN_LOGS
    over = threading.Event()
    thread = threading.Thread(target=_refresh, args=(status, done, stream, every_s, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # Waits with a timeout, because the thread may be blocked on a server that no longer answers.
        thread.join(_EVERY_S)


def _refresh(status: Callable[[], Status], done: int, stream: TextIO, every_s: float, over: threading.Event) -> None:
    before, began, is_terminal = done, time.perf_counter(), stream.isatty()
    while not over.wait(every_s):
        try:
            now, ended = status(), time.perf_counter()
        except Exception:  # A parameter server was lost. `join` raises the error.
            break
        line = now.line((now.done - before) / (ended - began))
        before, began = now.done, ended
        # Truncates the line, because the control sequence cannot clear a line that the terminal has wrapped.
        columns = shutil.get_terminal_size().columns
        stream.write(_CLEARED + line[: columns - 1] if is_terminal else f"{line}\n")
        stream.flush()
    if is_terminal:
        stream.write(_CLEARED)
        stream.flush()
