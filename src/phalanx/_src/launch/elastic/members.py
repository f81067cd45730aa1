# SPDX-License-Identifier: Apache-2.0
"""The processes that keep a connection with the rendezvous of an elastic group, and the generation to which they belong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from phalanx._src.cluster.connections.listener import Connection
from phalanx._src.cluster.watch import meeting
from phalanx._src.launch.elastic.messages import GroupStatus

_NO_RANK = 1 << 30


@dataclass
class GroupMember:
    """A process that keeps a connection with the rendezvous.

    Args:
      number: its number.
      peer: its connection.
      heard_s: time of its last message.
      generation: the last generation that it was in. 0 before the first.
      rank: its rank there.
      ready: what it has said about itself, if it waits for a generation.
      call: number of the training that its program is in.
      is_training: whether it is in the midst of that training.
    """

    number: int
    peer: Connection
    heard_s: float
    generation: int = 0
    rank: int = _NO_RANK
    ready: meeting.Readiness | None = None
    call: int = 0
    is_training: bool = False


@final
class GroupMembers:
    """The processes of all machines.

    Args:
      share: number of processes per machine.
      before: the state of the training when another machine held the rendezvous.

    Attributes:
      connected: the processes that keep a connection, by number.
      generation: number of the present generation. 0 before the first.
      numbers: numbers of its processes, by rank.
      gone: those of them that have ended and are not replaced.
      awaited: those of them that have not come here yet, after the rendezvous has moved.
      has_moved: whether another rendezvous has formed the present generation.
      steps: the most steps that a process has reported.
    """

    def __init__(self, share: int, before: GroupStatus) -> None:
        self._share = share
        self.connected: dict[int, GroupMember] = {}
        self.generation, self.numbers, self.steps = before.generation, before.members, before.steps
        self.gone: set[int] = set()
        self.awaited, self.has_moved = {*before.members}, before.generation > 0

    @property
    def machines(self) -> set[int]:
        """The indices of the machines of the present generation."""
        return {number // self._share for number in self.numbers}

    @property
    def survivors(self) -> list[GroupMember]:
        """The remaining processes of the present generation, by rank."""
        members = [m for m in self.connected.values() if m.generation == self.generation and self.generation]
        return sorted(members, key=lambda m: m.rank)

    @property
    def newcomers(self) -> list[GroupMember]:
        """The processes that wait to join the present generation, by number."""
        members = [m for m in self.connected.values() if m.ready and m.generation == 0]
        # One that is in a later training already waits until the others get there.
        return sorted((m for m in members if not self.generation or m.call == self.call), key=lambda m: m.number)

    @property
    def call(self) -> int:
        """Number of the training that the present generation is in."""
        return max((m.call for m in self.survivors), default=0)

    def call_of_others(self, member: GroupMember) -> int:
        """Returns the number of the training that the others are in, or that of the process itself if there are none."""
        return max((m.call for m in self.survivors if m is not member), default=member.call)

    def recognize(self, member: GroupMember, state: meeting.MemberState) -> bool:
        """Takes a process for a member of the present generation again, if it is one: its connection was lost, or the rendezvous has moved.

        Returns whether it may stay. If not, others train without this machine, whose rendezvous is a new one.
        """
        # The machine that had the rendezvous may have formed one more generation in its last moments.
        if state.generation > self.generation + self.has_moved:
            return False
        member.call, member.is_training = state.call, state.is_training
        # It may have missed the last one, and waits for it again.
        is_recent = state.generation and state.generation >= self.generation - 1
        if is_recent and member.number in self.numbers:
            self.generation, last = max(self.generation, state.generation), self.generation
            for other in self.connected.values():
                other.generation = self.generation if other.generation == last else other.generation
            member.generation, member.rank = self.generation, state.rank
            self.awaited.discard(member.number)
            self.gone.discard(member.number)
        elif not state.generation:
            # It has taken the place of the one that was in the generation.
            self.awaited.discard(member.number)
        return True

    def remove(self, member: GroupMember) -> None:
        """Forgets a process that has ended, or lost its connection."""
        del self.connected[member.number]
        if member.generation:
            self.gone.add(member.number)

    def dismiss(self) -> None:
        """Tells processes that wait in an earlier training that it is over. They join the next one as newcomers.

        They have come too late; or they were at its end, and did not learn that another process had reached it too.
        """
        call = self.call
        for member in self.connected.values():
            if member.ready and member.call < call:
                member.ready, member.generation = None, 0
                member.peer.say(meeting.Dismissal())

    def form(self, members: Sequence[GroupMember]) -> None:
        """Makes these processes, by rank, the next generation. They do not know it yet."""
        self.generation, self.numbers = self.generation + 1, tuple(m.number for m in members)
        self.gone, self.has_moved = set(), False
        # At once: without them, the launchers would learn that nobody is left.
        for rank, member in enumerate(members):
            member.generation, member.rank = self.generation, rank

    def tell(self, members: Sequence[GroupMember], service: str) -> None:
        """Tells the processes of the present generation, by rank, where they meet.

        Args:
          members: the processes.
          service: address of JAX's coordination service.
        """
        call, addresses = members[0].call, tuple(m.ready.address for m in members if m.ready)
        for rank, member in enumerate(members):
            member.ready, member.call = None, call
            member.peer.say(meeting.Generation(self.generation, service, addresses, rank))
