# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal that says how far the steps are, while somebody waits for them."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

_EVERY_S = 1.0
_CLEARED = "\r\x1b[K"


@dataclass(frozen=True)
class Status:
    """How a coordinator gets on.

    Args:
      workers: how many workers there are.
      alive: how many of them work.
      queued: how many steps wait.
      in_flight: how many are being done.
      done: how many were done.
      again: how many had to be given to another worker.
      updates: how many updates were applied.
      staleness: of how many steps it was how great.

    Example:
      >>> status = Status(workers=2, alive=2, queued=7, in_flight=2, done=40, again=0, updates=40, staleness={0: 30, 1: 10})
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
        """Returns it as one line. May be called in any context."""
        count = sum(self.staleness.values())
        mean = sum(value * times for value, times in self.staleness.items()) / max(1, count)
        return (
            f"{steps_per_s:.0f} steps/s | workers {self.alive}/{self.workers} | "
            f"queued {self.queued}, in flight {self.in_flight} | "
            f"staleness mean {mean:.2f}, max {max(self.staleness, default=0)}"
        )


@contextmanager
def shown(
    status: Callable[[], Status], done: int, terminal: TextIO | None = None, every_s: float = _EVERY_S
) -> Iterator[None]:
    """Shows a line that is refreshed meanwhile; none where there is no terminal.

    Args:
      status: how far the steps are; what it raises ends the line.
      done: how many were done before.
      terminal: where to show it; None for standard error.
      every_s: how often it is refreshed.
    """
    terminal = sys.stderr if terminal is None else terminal
    if not terminal.isatty():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_refresh, args=(status, done, terminal, every_s, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # It may be waiting for a server that does not answer any more.
        thread.join(every_s)


def _refresh(status: Callable[[], Status], done: int, terminal: TextIO, every_s: float, over: threading.Event) -> None:
    before, began = done, time.perf_counter()
    while not over.wait(every_s):
        try:
            now, ended = status(), time.perf_counter()
        except Exception:  # A server is lost, of which `join` tells.
            break
        rate = (now.done - before) / (ended - began)
        before, began = now.done, ended
        # A line that is wrapped could not be cleared.
        terminal.write(_CLEARED + now.line(rate)[: shutil.get_terminal_size().columns - 1])
        terminal.flush()
    terminal.write(_CLEARED)
    terminal.flush()
