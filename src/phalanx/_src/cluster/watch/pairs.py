# SPDX-License-Identifier: Apache-2.0
"""Tells the connections at the ports of this process that belong to the group from those of strangers.

gloo, by which processes exchange arrays on CPUs, lets in whoever connects. So each process looks at the connections that have arrived at
its gloo ports, asks all others over the watchdog whose they are, and ends those that nobody claims. A message says where they come from.
Uses the standard library only.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import final

from phalanx._src.cluster.connections.messages import Message
from phalanx._src.cluster.connections.ports import cut, sockets_of_process
from phalanx._src.cluster.connections.strangers import End, Strangers

# Such a question has 10 to 20 KB. The sockets of the watchdog do not block, and cut off what exceeds their buffers.
_MOST_AT_ONCE = 500


class PairsQuestion(Message):
    """A process asks all whose these ends are, of connections that have arrived at its places."""

    asker: int
    ends: tuple[End, ...]
    places: tuple[End, ...]


class PairsAnswer(Message):
    """A process answers the asker: which of the ends are its own, and how many of its connections reach the places."""

    rank: int
    asker: int
    claimed: tuple[End, ...]
    reaches: int


@final
class Pairs:
    """The connections at the gloo ports of this process.

    Args:
      rank: rank of this process.
      size: number of processes.
      say: sends a message to a rank; without one, to all that this process is connected with. Only rank 0 is with more than one.
      tell: writes a line for the user. None means the standard error.
      clock: returns the time in seconds.

    """

    def __init__(
        self,
        rank: int,
        size: int,
        say: Callable[[PairsQuestion | PairsAnswer, int | None], None],
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._others, self._say, self._clock = rank, {*range(size)} - {rank}, say, clock
        self._places: set[End] = set()
        self._changed = threading.Condition()
        self._known: set[End] = set()
        self._ended: set[End] = set()
        self._doubted: set[End] = set()  # Unknown at the last look.
        self._asked: set[End] = set()  # Those of the open question. Empty if there is none.
        self._claimed: set[End] = set()
        self._reached = 0
        self._has_lost = False
        self._answered: set[int] = set()
        self._strangers = Strangers(f"the port of rank {rank} for arrays", tell, clock)

    @property
    def strangers(self) -> list[str]:
        """The places from which the connections came that this process has ended."""
        with self._changed:
            return sorted(self._strangers.places)

    def open(self, host: str, ports: Iterable[int]) -> None:
        """Looks at the connections at these ports of this machine from now on."""
        with self._changed:
            self._places = {(host, port) for port in ports}

    def confirm(self, timeout_s: float) -> None:
        """Waits until all connections that have arrived are known to belong to the group, or were ended."""
        deadline_s = self._clock() + timeout_s
        while (left_s := deadline_s - self._clock()) > 0:
            with self._changed:
                if self._has_lost:
                    return
                if not self._asked:
                    if not (unknown := self._arrived() - self._known - self._ended):
                        return
                    self._ask(unknown)
                self._changed.wait(min(left_s, 1.0))

    def look(self) -> None:
        """Asks whose the connections are that were here at the last look already. Call it once in a while."""
        with self._changed:
            if self._has_lost:
                return
            arrived = self._arrived()
            # A port may be used again, by another process, once its connection has ended.
            self._known &= arrived
            self._ended &= arrived
            unknown = arrived - self._known - self._ended
            # What is here for less than a turn may be on its way out, or not be accepted yet.
            lasting, self._doubted = unknown & self._doubted, unknown
            if lasting and not self._asked:
                self._ask(lasting)

    def hear(self, message: PairsQuestion | PairsAnswer) -> None:
        """Handles a message of another process. Questions and answers go through rank 0."""
        if isinstance(message, PairsAnswer):
            self._pass(message)
            return
        # Only rank 0 is connected with all.
        if self._rank == 0:
            self._say(message, None)
        # Rank 0 also sends a question back to its asker, who has counted its own ends already.
        if message.asker != self._rank:
            all_ends = _ends()
            claimed = {here for here, _ in all_ends} & {*message.ends}
            reaches = sum(other in message.places for _, other in all_ends)
            self._pass(PairsAnswer(self._rank, message.asker, tuple(sorted(claimed)), reaches))

    def lose(self, rank: int) -> None:
        """Leaves all connections alone from now on: nobody claims those of a process that has ended, and the group ends, or another one forms.

        Rank 0 knows of the end of each. The others are connected with rank 0 only, and get no answer any more.
        """
        with self._changed:
            self._has_lost, self._asked = True, set()
            self._changed.notify_all()

    def _arrived(self) -> set[End]:
        ports = {port for _, port in self._places}
        return {other for own, other in _ends() if own[1] in ports} if ports else set()

    def _ask(self, ends: Iterable[End]) -> None:
        self._asked, self._answered = set(sorted(ends)[:_MOST_AT_ONCE]), set()
        all_ends = _ends()
        # A process with several devices has connections with itself.
        self._claimed = {own for own, _ in all_ends}
        self._reached = sum(other in self._places for _, other in all_ends)
        self._say(PairsQuestion(self._rank, tuple(sorted(self._asked)), tuple(sorted(self._places))), None)

    def _pass(self, answer: PairsAnswer) -> None:
        """Takes an answer, or sends it on."""
        if answer.asker != self._rank:
            self._say(answer, answer.asker if self._rank == 0 else 0)
            return
        with self._changed:
            self._answered.add(answer.rank)
            self._claimed |= {*answer.claimed}
            self._reached += answer.reaches
            self._settle()

    def _settle(self) -> None:
        """Ends the connections that nobody claims, once all processes have answered."""
        if not self._asked or not self._others <= self._answered:
            return
        self._known |= self._asked & self._claimed
        strange, self._asked = self._asked - self._claimed, set()
        # If more have connected than have arrived as themselves, they may be on the way, or a router changes their addresses.
        if strange and self._reached <= len(self._known):
            # Their ends stay among the sockets of this process until gloo closes them.
            _end_those_from(strange, {port for _, port in self._places})
            self._ended |= strange
            self._strangers.note(strange)
        self._changed.notify_all()


def _ends() -> list[tuple[End, End]]:
    """Returns both ends of the connections of this process."""
    ends = []
    for connection in sockets_of_process():
        with connection, suppress(OSError):  # A socket that listens has one end.
            ends.append((_plain(connection.getsockname()), _plain(connection.getpeername())))
    return ends


def _end_those_from(ends: set[End], ports: set[int]) -> None:
    for connection in sockets_of_process():
        with connection, suppress(OSError):
            if connection.getsockname()[1] in ports and _plain(connection.getpeername()) in ends:
                cut(connection)


def _plain(name: Sequence[str | int]) -> End:
    # A socket for both versions of IP shows addresses of version 4 with this prefix.
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
