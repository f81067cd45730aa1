# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of an elastic group: decides which processes form the next generation, and tells them.

All processes that train keep a connection with it. If one dies, the kernel closes its connection; the others leave their generation and
say that they are ready for the next. A process that has started later says so too, and is let in at the next step on which the others agree.
The launchers of other machines keep a connection too: see `phalanx._src.launch.elastic.remote_rendezvous`.
"""

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.filters import host_of_other
from phalanx._src.cluster.connections.hosts import LOOPBACK
from phalanx._src.cluster.connections.listener import Connection, Listener, expect_answers, split
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.cluster.watch import meeting
from phalanx._src.launch.elastic.launchers import Launchers, MachineLauncher
from phalanx._src.launch.elastic.messages import GroupStatus, LauncherReport
from phalanx._src.launch.elastic.service import Service
from phalanx._src.launch.output import wait
from phalanx._src.launch.plan import ALONE, Machines
from phalanx.errors import StartupError

_TICK_S = 0.2
_SILENCE_S = 10.0
_ASK_S = 1.0
"""Time between two invitations. A process that is still entering its generation misses the first one."""
_NO_RANK = 1 << 30
_MOST = 128
"""Number of processes that may connect at the same time."""


@dataclass
class _Member:
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


@dataclass
class _Generation:
    """A group between two changes.

    Args:
      number: its number. 0 before the first.
      members: numbers of its processes, by rank.
      gone: those of them that have ended and are not replaced.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    gone: set[int] = field(default_factory=set)


@final
class Rendezvous(threading.Thread):
    """Forms the generations of a training run.

    Args:
      least: number of processes without which no generation is formed.
      environment: environment of the processes, with the secret.
      kill: called with the number of a process of this machine that keeps the others from continuing, and the reason.
      say: receives reports.
      machines: the machines of the group, of which this one is the first.
      terms: what launchers of other machines must have been given. See `GroupTerms`.
      clock: returns the time in seconds. All limits are measured by it.

    Raises:
      InvalidArgumentError: PHALANX_START_TIMEOUT_S is not a number of seconds.
      StartupError: it cannot listen at the address of the first machine.
    """

    def __init__(
        self,
        least: int,
        environment: Mapping[str, str],
        kill: Callable[[int, str], None],
        say: Callable[[str], None],
        machines: Machines = ALONE,
        *,
        terms: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="phalanx-rendezvous", daemon=True)
        self._least, self._say, self._clock = least, say, clock
        patience_s = start_timeout_s(environment)
        address = machines.address or f"{LOOPBACK}:0"
        try:
            self._listener = Listener(address, secret_of([address], environment), _MOST, say)
        except OSError as e:
            raise StartupError(
                f"the rendezvous at {address}",
                f"this machine cannot listen there: {e.strerror or e}.",
                "use a free port and the name of this machine in the address of the first task",
            ) from e
        self._service = Service(environment, split(self.address)[0] if machines.count > 1 else "")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.fileno, selectors.EVENT_READ, None)
        self._members: dict[int, _Member] = {}
        self._launchers = Launchers(machines.count, patience_s, kill, self._selector, clock, terms=terms)
        self._lock = threading.Lock()
        self._is_over = False
        self._pending_s: float | None = None
        self._said = ""
        self._ask_s = 0.0
        self._generation, self.steps = _Generation(), -1
        """The present generation, and the most steps that a process has reported."""

    @property
    def address(self) -> str:
        """The address at which it listens."""
        return self._listener.address

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self._generation.number

    def end(self) -> None:
        """Ends the rendezvous."""
        self._is_over = True
        self.join()
        self._service.end()

    def report(self, report: LauncherReport) -> GroupStatus:
        """Takes a report of the launcher of this machine, and returns the state of the training."""
        with self._lock:
            # The lock: this is the main thread of the launcher, while the thread of the rendezvous works.
            for number in report.finished:
                # The last words of a process are here before its end is known.
                member = self._members.get(number)
                if member and wait([member.peer.fileno()], (), timeout_s=0.0):
                    self._hear(member)
            # A process that takes the place of another one is not gone.
            self._generation.gone -= self._launchers.note(report)
            return self._standing()

    def _standing(self) -> GroupStatus:
        # One with exit code 0 in the midst of a training run was at `os._exit(0)`, and not at the end of its program.
        training = {number for number, member in self._members.items() if member.is_training}
        if self._launchers.finished - self._launchers.dropped - training:
            self._launchers.has_finished = True
        gone = self._generation.gone
        # A process whose connection is closed may still be ending. The report without it says whether its program has finished.
        is_over = self.generation and not self._survivors() and not gone & self._launchers.running
        return GroupStatus(
            self.steps,
            self._generation.members,
            tuple(sorted(gone)) if is_over else None,
            self._launchers.hopeless(self._least),
            tuple(sorted(self._launchers.dropped)),
            self._launchers.has_finished,
            self._launchers.some_run_elsewhere,
        )

    @override
    def run(self) -> None:
        with self._listener, self._selector:
            while not self._is_over:
                ready = self._selector.select(_TICK_S)
                with self._lock:
                    try:
                        for peer in self._listener.accepted(0):
                            self._admit(peer)
                        for key, _ in ready:
                            if isinstance(key.data, _Member):
                                self._hear(key.data)
                            elif isinstance(key.data, MachineLauncher):
                                self._generation.gone -= self._launchers.hear(key.data)
                        self._settle()
                        self._launchers.tell(self._standing())
                    except Exception as e:  # Nobody would notice the end of this thread, and all would wait for it.
                        self._end_all(f"the rendezvous has failed: {e!r}")
            for member in self._members.values():
                member.peer.close()
            self._launchers.close()

    def _admit(self, peer: Connection) -> None:
        expect_answers(peer.socket)
        # Nobody waits for a process that reads nothing.
        peer.socket.setblocking(False)
        number, machine = peer.hello.get("member"), peer.hello.get("machine")
        if self._launchers.knows(machine):
            self._launchers.connect(machine, peer)
            return
        if type(number) is not int:
            peer.close()
            return
        # A process that was started again connects before the end of its predecessor's connection is noticed.
        if number in self._members:
            self._forget(self._members[number])
        self._launchers.dropped.discard(number)
        member = self._members[number] = _Member(number, peer, self._clock())
        self._selector.register(peer, selectors.EVENT_READ, member)
        # A late process makes its variables alone, before it meets the others. See `Training.enter`.
        peer.say(meeting.Welcome(self.generation > 0))

    def _hear(self, member: _Member) -> None:
        # The connection was ready in this turn, and a newer one of the same process has replaced it since.
        if self._members.get(member.number) is not member:
            return
        messages: list[meeting.MemberMessage]
        messages, is_open = member.peer.hear(meeting.TO_RENDEZVOUS)
        if not is_open:
            self._forget(member)
            return
        member.heard_s = self._clock()
        for message in messages:
            self._dispatch(member, message)

    def _dispatch(self, member: _Member, message: meeting.MemberMessage) -> None:
        match message:
            case meeting.Readiness(call, progress):
                member.ready, member.call = message, call
                self.steps = max(self.steps, progress[0])
            case meeting.RunStart(call):
                member.call, member.is_training = call, True
                member.peer.say(meeting.RunOfOthers(self._call_of_others(member)))
            case meeting.RunEnd():
                member.is_training = False
            case meeting.Accusation(ranks, generation, why) if generation == self.generation:
                for other in self._survivors():
                    # One that is ready has left the generation, and waits for the next.
                    if other.rank in ranks and not other.ready:
                        self._launchers.kill(other.number, why)

    def _forget(self, member: _Member) -> None:
        self._selector.unregister(member.peer)
        member.peer.close()
        del self._members[member.number]
        if member.generation:
            self._generation.gone.add(member.number)
        if member.generation and member.is_training:
            self._launchers.dropped.add(member.number)

    def _survivors(self) -> list[_Member]:
        """Returns the remaining processes of the present generation, by rank."""
        members = [m for m in self._members.values() if m.generation == self.generation and self.generation]
        return sorted(members, key=lambda m: m.rank)

    def _dismiss_behind(self) -> None:
        """Tells processes that wait in an earlier training that it is over. They join the next one as newcomers.

        They have come too late; or they were at its end, and did not learn that another process had reached it too.
        """
        call = max((m.call for m in self._survivors()), default=0)
        for member in self._members.values():
            if member.ready and member.call < call:
                member.ready, member.generation = None, 0
                member.peer.say(meeting.Dismissal())

    def _call_of_others(self, member: _Member) -> int:
        calls = [m.call for m in self._survivors() if m is not member]
        return max(calls, default=member.call)

    def _settle(self) -> None:
        """Forms the next generation if its processes are ready."""
        self._dismiss_behind()
        survivors, now_s = self._survivors(), self._clock()
        newcomers = [m for m in self._members.values() if m.ready and m.generation == 0]
        if not self.generation:
            # 0 is this machine, whose launcher makes its first report in a moment.
            if awaited := [f"{index}" for index in self._launchers.missing if index]:
                self._say_once(f"Waiting for phalanx run on the machines of these tasks: {', '.join(awaited)}.")
            are_all_there = (
                self._launchers.running <= {m.number for m in newcomers} and not self._launchers.awaits_machine
            )
            if are_all_there and len(newcomers) >= self._least:
                self._form([], sorted(newcomers, key=lambda m: m.number))
            return
        came = [m for m in survivors if m.ready]
        call = max((m.call for m in survivors), default=0)
        # A process that is in a later training already waits until the others get there.
        newcomers = [m for m in newcomers if m.call == call]
        if not came:
            self._pending_s = None
            if survivors and newcomers and now_s >= self._ask_s:
                self._ask_s = now_s + _ASK_S
                self._invite(survivors[0], newcomers)
            return
        self._pending_s = self._pending_s or now_s
        if missing := [m for m in survivors if not m.ready]:
            self._wake(missing, now_s)
        elif all(m.ready.progress[0] < 0 for m in came if m.ready):
            self._end_all("no process that has the variables is left")
        # Once a process has finished, none is started any more, so the others continue with fewer than the minimum.
        elif len(came) + len(newcomers) >= self._least or self._launchers.has_finished:
            self._form(came, sorted(newcomers, key=lambda m: m.number))
        elif not self._launchers.hopeless(self._least):
            self._say_once(f"Too few workers are left: {len(came)} of at least {self._least}. They wait for others.")

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _invite(self, first: _Member, newcomers: list[_Member]) -> None:
        """Asks the present generation to meet newcomers after one of its next steps."""
        names = ", ".join(f"worker {member.number}" for member in newcomers)
        first.peer.say(meeting.ChangeRequest(f"{names} joins" if len(newcomers) == 1 else f"{names} join"))

    def _wake(self, missing: list[_Member], now_s: float) -> None:
        """Ends processes that answer nothing, while others wait for them: they are stopped, or their machine is."""
        assert self._pending_s is not None
        for member in missing:
            # Processes that train say nothing here, so silence counts from the first Ping.
            silent_s = now_s - max(member.heard_s, self._pending_s)
            if silent_s > _SILENCE_S:
                self._launchers.kill(
                    member.number, f"has been silent for {silent_s:.0f} s, while the others wait for it"
                )
            else:
                member.peer.say(meeting.Ping())

    def _form(self, survivors: list[_Member], newcomers: list[_Member]) -> None:
        # Survivors come first and keep their order, so that the chief stays the chief unless it is lost.
        members = survivors + newcomers
        try:
            service = self._service.start([host_of_other(m.peer.socket) for m in members])
        except OSError as e:
            self._end_all(f"{e}")
            return
        self._generation = _Generation(self.generation + 1, tuple(m.number for m in members))
        readies = [m.ready for m in members if m.ready]
        call, addresses = members[0].call, tuple(ready.address for ready in readies)
        for rank, member in enumerate(members):
            member.ready, member.generation, member.rank, member.call = None, self.generation, rank, call
            member.peer.say(meeting.Generation(self.generation, service, addresses, rank))
        self._pending_s = None
        if self.generation > 1:
            numbers = ", ".join(map(str, self._generation.members))
            who = f"worker {numbers} continues" if len(members) == 1 else f"workers {numbers} continue"
            self._say_once(f"Generation {self.generation}: {who}.")

    def _end_all(self, why: str) -> None:
        for number in list(self._members):
            self._launchers.kill(number, why)
