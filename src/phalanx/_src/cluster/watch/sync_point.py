# SPDX-License-Identifier: Apache-2.0
"""Finds a step after which all processes of a cluster can act together, although each learns at another moment that it must.

A process cannot simply name a coming step, because others may have passed it. So rank 0 asks all processes to pass no further
point, collects how many each has passed, and answers with the first point that nobody has passed. The threads of the watchdog do
this while the steps run. No step waits for a message unless a process is asked to act. Uses the standard library only.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, final

from phalanx._src.cluster.connections.messages import Message


class PointRequest(Message):
    """The sender asks rank 0 that all act."""

    reason: str


class PointHold(Message):
    """Rank 0 asks all to pass no further point."""

    reason: str


class PointCount(Message):
    """The number of points that the sender has passed."""

    passed: int


class PointAgreement(Message):
    """Rank 0 has chosen the point of this number."""

    point: int
    reason: str


PointMessage: TypeAlias = PointRequest | PointHold | PointCount | PointAgreement


@final
class SyncPoint:
    """A point between two steps, on which all processes agree. Each process reports every point that it passes.

    Args:
      rank: rank of this process.
      others: ranks of the other processes.
      say: sends a message: on rank 0 to all others, on any other rank to rank 0.
      waiting: returns a context for the time in which `is_reached` waits for the others.

    Example:
      >>> point = SyncPoint()
      >>> point.is_reached()
      >>> point.request("rank 0 received SIGTERM")
      >>> point.is_reached(), point.is_reached()
      ('rank 0 received SIGTERM', None)
    """

    def __init__(
        self,
        rank: int = 0,
        others: Iterable[int] = (),
        say: Callable[[PointMessage], None] = lambda message: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._rank, self._others, self._say, self._waiting = rank, set(others), say, waiting
        self._changed = threading.Condition()
        self._passed = 0
        self._counts: dict[int, int] = {}
        self._is_held = False
        # Points to come, with their reasons. There are two if rank 0 has passed the first and this process has not.
        self._agreed: deque[tuple[int, str]] = deque()
        self._reason = ""
        self._first_reason: str | None = None

    @property
    def first_reason(self) -> str | None:
        """The reason of the first request of any process, or None."""
        return self._first_reason

    def request(self, reason: str) -> None:
        """Asks all processes to act after one of the next steps. May be called in any thread, but not in a signal handler.

        Args:
          reason: what `is_reached` returns then. Of several requests at the same time, one counts.
        """
        if self._rank == 0:
            self._hold(reason)
        else:
            self._say(PointRequest(reason))

    def ask(self, reason: str) -> None:
        """Asks all processes to act at the next point that none has passed. Here `is_reached` waits until that point is known.

        If all ask after the same step, they act there. Unlike after a `request`, the act must be a collective call, so that no
        process can ask again before all have acted.

        Args:
          reason: see `request`.
        """
        with self._changed:
            if self._is_held or self._agreed:
                return  # They will act anyway.
            # On rank 0, `_hold` sets it, and would do nothing if it were set already.
            self._is_held = self._rank != 0
        self.request(reason)

    def is_reached(self) -> str | None:
        """Passes a point between two steps. Returns the reason to act there, or None to continue."""
        with self._changed:
            if self._is_held:
                with self._waiting():
                    self._changed.wait_for(lambda: not self._is_held)
            self._passed += 1
            if self._agreed and self._agreed[0][0] == self._passed:
                return self._agreed.popleft()[1]
            return None

    def hear(self, rank: int, message: PointMessage) -> None:
        """Handles a message of another process."""
        with self._changed:
            match message:
                case PointRequest(reason):
                    self._hold(reason)
                case PointHold(reason):
                    self._note(reason)
                    self._is_held = True
                    # Under the lock, so that no point is passed between the count and the hold.
                    self._say(PointCount(self._passed))
                case PointCount(passed):
                    self._counts[rank] = passed
                    self._settle()
                case _:
                    self._agree(message.point, message.reason)

    def lose(self, rank: int) -> None:
        """Goes on without a process that has ended."""
        with self._changed:
            self._others.discard(rank)
            if self._rank == 0:
                self._settle()
            else:
                self._is_held = False
                self._changed.notify_all()

    def _hold(self, reason: str) -> None:
        """Asks all processes, on rank 0, to pass no further point and to say how many they have passed."""
        with self._changed:
            if self._is_held or self._agreed:
                return
            self._note(reason)
            self._is_held, self._counts = True, {}
            self._say(PointHold(reason))
            self._settle()

    def _note(self, reason: str) -> None:
        self._reason = reason
        self._first_reason = self._first_reason or reason

    def _settle(self) -> None:
        """Chooses the point, on rank 0, once all processes have answered."""
        if self._is_held and self._others <= set(self._counts):
            point = max([self._passed, *self._counts.values()]) + 1
            self._say(PointAgreement(point, self._reason))
            self._agree(point, self._reason)

    def _agree(self, point: int, reason: str) -> None:
        self._agreed.append((point, reason))
        self._is_held = False
        self._changed.notify_all()
