# SPDX-License-Identifier: Apache-2.0
"""The progress of this process, and how the others learn of it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

from phalanx._src.cluster.connections.listener import Connection
from phalanx._src.cluster.connections.messages import encoded
from phalanx._src.cluster.connections.ports import Socket
from phalanx._src.cluster.watch.messages import PaceReport, ProgressReport, WatchMessage
from phalanx._src.cluster.watch.pace import Paces, Stopwatch


@final
class Operations:
    """The operations of this process that need all processes.

    Args:
      clock: returns the time in seconds.

    Attributes:
      turn: number of operations that have begun.
      step: number of them that were steps.
      depth: number of operations that are running, one inside the other.
      stopwatch: measures the operations.
      has_left: whether the program of this process has finished.
      is_told: whether SIGTERM caused that.
      has_lost_step: whether a step has failed, and this process waits for the reason.
      saves: the last files that rank 0 has written, each after the turn of its number.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.stopwatch = clock, Stopwatch()
        self.turn = self.step = self.depth = 0
        self.has_left = self.is_told = self.has_lost_step = False
        self.saves: deque[tuple[int, str]] = deque(maxlen=100)

    def begin(self, *, is_step: bool) -> None:
        """Records the start of an operation that needs all processes. Calls may be nested."""
        self.depth += 1
        if self.depth == 1:
            self.turn += 1
            self.step += is_step
            self.stopwatch.begin(self.step, self.turn, self._clock(), is_step=is_step)

    def end(self, *, is_step: bool, has_failed: bool) -> None:
        """Records the end of the operation that the matching `begin` started."""
        self.depth -= 1
        if self.depth == 0 and has_failed:
            # The others may not have begun it either, so this process must not count as ahead of them.
            self.turn -= 1
            self.step -= is_step
            self.stopwatch.cancel()
        elif self.depth == 0:
            self.stopwatch.end(self._clock())

    @contextmanager
    def waiting(self, *, is_step: bool = False) -> Iterator[None]:
        """Returns a context that counts as waiting for the others, so that a process that does not answer is named."""
        self.begin(is_step=is_step)
        try:
            yield
        finally:
            # As if it had failed, because a wait must not count among the operations that all processes have begun.
            self.end(is_step=is_step, has_failed=True)

    def report(self) -> ProgressReport:
        """Returns the report for the others."""
        return ProgressReport(self.turn, self.step, self.depth > 0, self.has_left, self.is_told, self.has_lost_step)


@final
class Connections:
    """The open connections of this process: on rank 0 to all other ranks, on any other rank to rank 0.

    Args:
      sockets: the connections by rank.

    Attributes:
      streams: the same connections, which carry messages.
    """

    def __init__(self, sockets: Mapping[int, Socket]) -> None:
        self.streams = {rank: Connection(socket) for rank, socket in sockets.items()}
        for socket in sockets.values():
            # A process that is stopped reads nothing. A send to it must not stop this one.
            socket.setblocking(False)

    def say(self, message: WatchMessage, rank: int | None = None) -> None:
        """Sends a message to one rank. None for all."""
        data = encoded(message)  # Once, because rank 0 may have thousands of connections.
        for stream in self.streams.values() if rank is None else [self.streams[rank]]:
            stream.say(data)

    def hang_up(self) -> None:
        """Sends nothing more."""
        for stream in self.streams.values():
            stream.hang_up()

    def close(self) -> None:
        """Closes the connections."""
        for stream in self.streams.values():
            stream.close()


@final
class Reporter:
    """Tells the others what this process does.

    Args:
      operations: what it does.
      connections: the connections to the others.
      paces: on rank 0, the measurements of all processes. None elsewhere.
    """

    def __init__(self, operations: Operations, connections: Connections, paces: Paces | None) -> None:
        self._operations, self._connections, self._paces = operations, connections, paces
        # Reentrant: a signal handler may interrupt the main thread inside `report`, and call it too.
        self._reporting = threading.RLock()

    def report(self, *more: WatchMessage) -> None:
        """Sends the progress of this process, and further messages."""
        # Two threads do, and an older report must not undo that the process has left.
        with self._reporting:
            for message in (self._operations.report(), *more):
                self._connections.say(message)

    def report_pace(self) -> None:
        """Sends the progress of this process, and the measurements since the last call."""
        samples = self._operations.stopwatch.take()
        if self._paces is not None:
            self._paces.hear(0, samples)
        self.report(*([PaceReport(samples)] if samples and self._paces is None else []))
