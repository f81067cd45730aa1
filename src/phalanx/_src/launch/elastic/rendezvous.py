# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of an elastic group: decides which processes form the next generation, and tells them.

All processes that train keep a connection with it. If one dies, the kernel closes its connection; the others leave their generation and
say that they are ready for the next. A process that has started later says so too, and is let in at the next step on which the others agree.
The launchers of other machines keep a connection too. If the machine with the rendezvous is lost, another one takes it over: see
`phalanx._src.launch.elastic.leadership`.
"""

import selectors
import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.filters import host_of_other
from phalanx._src.cluster.connections.hosts import LOOPBACK
from phalanx._src.cluster.connections.listener import Connection, Listener, expect_answers, split
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.cluster.watch import meeting
from phalanx._src.cluster.watch.contact import ANSWER_S
from phalanx._src.launch.elastic.launchers import Launchers, MachineLauncher
from phalanx._src.launch.elastic.members import GroupMember, GroupMembers
from phalanx._src.launch.elastic.messages import NO_STATUS, GroupStatus, LauncherReport, Presence
from phalanx._src.launch.elastic.service import Service
from phalanx._src.launch.output import wait
from phalanx._src.launch.plan import ALONE, Machines
from phalanx.errors import StartupError, listed

_TICK_S = 0.2
_SILENCE_S = 10.0
_ASK_S = 1.0
"""Time between two invitations. A process that is still entering its generation misses the first one."""
_ANSWER_S = 5.0
"""Time for which the answer of a launcher counts. A machine may be cut off long before its connections end."""
_RETURN_S = 3.0
"""Time in which the processes and launchers of a generation come to a rendezvous that has moved to another machine."""
_MOST = 128
"""Number of processes that may connect at the same time."""


@final
class Rendezvous(threading.Thread):
    """Forms the generations of a training run.

    Args:
      least: number of processes without which no generation is formed.
      environment: environment of the processes, with the secret.
      kill: called with the number of a process of this machine that keeps the others from continuing, and the reason.
      say: receives reports.
      machines: the machines of the group. This one holds the rendezvous.
      share: number of processes per machine.
      terms: what launchers of other machines must have been given. See `GroupTerms`.
      before: the state of the training when another machine held the rendezvous.
      ended: indices of the machines whose launcher had ended then.
      clock: returns the time in seconds. All limits are measured by it.

    Raises:
      InvalidArgumentError: PHALANX_START_TIMEOUT_S is not a number of seconds.
      StartupError: it cannot listen at the address of this machine.
    """

    def __init__(
        self,
        least: int,
        environment: Mapping[str, str],
        kill: Callable[[int, str], None],
        say: Callable[[str], None],
        machines: Machines = ALONE,
        *,
        share: int = 1,
        terms: str = "",
        before: GroupStatus = NO_STATUS,
        ended: Set[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="phalanx-rendezvous", daemon=True)
        self._least, self._say_once, self._clock = least, _without_repetitions(say), clock
        self.machine = machines.index
        patience_s = start_timeout_s(environment)
        address = machines.addresses[machines.index] if machines.addresses else f"{LOOPBACK}:0"
        try:
            self._listener = Listener(address, secret_of([address], environment), _MOST, say)
        except OSError as e:
            raise StartupError(
                f"the rendezvous at {address}",
                f"this machine cannot listen there: {e.strerror or e}.",
                "use a free port and the name of this machine in the address of its task",
            ) from e
        self._service = Service(environment, split(self.address)[0] if machines.count > 1 else "")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.fileno, selectors.EVENT_READ, None)
        self._members = GroupMembers(share, before)
        self._launchers = Launchers(
            machines.index, machines.count, patience_s, kill, self._selector, clock=clock, terms=terms
        )
        self._launchers.dropped |= {*before.dropped}
        self._launchers.ended |= ended
        self._lock = threading.Lock()
        self._is_over = False
        self._pending_s: float | None = None
        self._ask_s, self._since_s = 0.0, clock()

    @property
    def address(self) -> str:
        """The address at which it listens."""
        return self._listener.address

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self._members.generation

    @property
    def steps(self) -> int:
        """The most steps that a process has reported."""
        return self._members.steps

    def end(self, successor: Presence | None = None) -> None:
        """Ends the rendezvous.

        Args:
          successor: the rendezvous of another machine, if the group continues there.
        """
        self._is_over = True
        self.join()
        self._launchers.close(successor)
        self._service.end()

    def report(self, report: LauncherReport) -> GroupStatus:
        """Takes a report of the launcher of this machine, and returns the state of the training."""
        with self._lock:
            # The lock: this is the main thread of the launcher, while the thread of the rendezvous works.
            for number in report.finished:
                # The last words of a process are here before its end is known.
                member = self._members.connected.get(number)
                if member and wait([member.peer.fileno()], (), timeout_s=0.0):
                    self._hear(member)
            # A process that takes the place of another one is not gone.
            self._members.gone -= self._launchers.note(report)
            return self._standing()

    @property
    def has_majority(self) -> bool:
        """Whether it has formed a generation, and no other machine can form the next one."""
        return self.generation > 0 and self._launchers.are_majority(self._members.machines)

    def _standing(self) -> GroupStatus:
        members = self._members
        # One with exit code 0 in the midst of a training run was at `os._exit(0)`, and not at the end of its program.
        training = {number for number, member in members.connected.items() if member.is_training}
        if self._launchers.finished - self._launchers.dropped - training:
            self._launchers.has_finished = True
        # A process whose connection is closed may still be ending. The report without it says whether its program has finished.
        is_left = not members.survivors and not members.awaited and not members.gone & self._launchers.running
        # Those of machines that do not answer have not ended.
        is_left = is_left and self._launchers.are_majority(members.machines)
        return GroupStatus(
            members.generation,
            members.steps,
            members.numbers,
            tuple(sorted(members.gone)) if members.generation and is_left else None,
            self._launchers.hopeless(self._least, members.machines),
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
                            if isinstance(key.data, GroupMember):
                                self._hear(key.data)
                            elif isinstance(key.data, MachineLauncher):
                                self._members.gone -= self._launchers.hear(key.data)
                        self._settle()
                        self._launchers.tell(self._standing())
                    except Exception as e:  # Nobody would notice the end of this thread, and all would wait for it.
                        self._end_all(f"the rendezvous has failed: {e!r}")
            for member in self._members.connected.values():
                member.peer.close()

    def _admit(self, peer: Connection) -> None:
        expect_answers(peer.socket)
        # Nobody waits for a process that reads nothing.
        peer.socket.setblocking(False)
        number, machine = peer.hello.get("member"), peer.hello.get("machine")
        if peer.hello.get("looks"):
            peer.say(Presence(self.generation, self.machine))
            peer.close()
            return
        if self._launchers.knows(machine):
            # It may have missed the last one.
            known = peer.hello.get("generation")
            is_new = type(known) is not int or known < max(1, self.generation - 1)
            self._launchers.connect(machine, peer, is_new=is_new)
            return
        if type(number) is not int:
            peer.close()
            return
        # A process that was started again connects before the end of its predecessor's connection is noticed.
        if number in self._members.connected:
            self._forget(self._members.connected[number])
        self._launchers.dropped.discard(number)
        expect_answers(peer.socket, ANSWER_S)
        member = self._members.connected[number] = GroupMember(number, peer, self._clock())
        self._selector.register(peer, selectors.EVENT_READ, member)
        # A late process makes its variables alone, before it meets the others. See `Training.enter`.
        peer.say(meeting.Welcome(self.generation > 0))

    def _hear(self, member: GroupMember) -> None:
        # The connection was ready in this turn, and a newer one of the same process has replaced it since.
        if self._members.connected.get(member.number) is not member:
            return
        messages: list[meeting.MemberMessage]
        messages, is_open = member.peer.hear(meeting.TO_RENDEZVOUS)
        if not is_open:
            self._forget(member)
            return
        member.heard_s = self._clock()
        for message in messages:
            self._dispatch(member, message)

    def _dispatch(self, member: GroupMember, message: meeting.MemberMessage) -> None:
        match message:
            case meeting.MemberState():
                if not self._members.recognize(member, message):
                    self._forget(member)
            case meeting.Readiness(call, progress):
                member.ready, member.call = message, call
                self._members.steps = max(self.steps, progress[0])
            case meeting.RunStart(call):
                member.call, member.is_training = call, True
                member.peer.say(meeting.RunOfOthers(self._members.call_of_others(member)))
            case meeting.RunEnd():
                member.is_training = False
            case meeting.Accusation(ranks, generation, why) if generation == self.generation:
                for other in self._members.survivors:
                    # One that is ready has left the generation, and waits for the next.
                    if other.rank in ranks and not other.ready:
                        self._launchers.kill(other.number, why)

    def _look_for_members(self) -> None:
        """Gives up processes of the generation that do not come to the rendezvous after it has moved."""
        late_s = self._clock() - self._since_s - _RETURN_S
        for number in sorted(self._members.awaited):
            if number in self._launchers.running:
                if late_s > 3 * _SILENCE_S:
                    self._launchers.kill(number, "has not come to the machine that now coordinates the group")
            elif late_s > 0 or {*self._launchers.missing} <= self._launchers.ended:
                self._members.awaited.discard(number)
                self._members.gone.add(number)

    def _forget(self, member: GroupMember) -> None:
        self._selector.unregister(member.peer)
        member.peer.close()
        self._members.remove(member)
        if member.generation and member.is_training:
            self._launchers.dropped.add(member.number)

    def _settle(self) -> None:
        """Forms the next generation if its processes are ready."""
        self._members.dismiss()
        self._look_for_members()
        survivors, newcomers, now_s = self._members.survivors, self._members.newcomers, self._clock()
        if not self.generation:
            if awaited := [f"{index}" for index in self._launchers.missing]:
                self._say_once(f"Waiting for phalanx run on the machines of these tasks: {', '.join(awaited)}.")
            are_all_there = (
                self._launchers.running <= {m.number for m in newcomers} and not self._launchers.awaits_machine
            )
            if are_all_there and len(newcomers) >= self._least:
                self._form([], newcomers)
            return
        came = [m for m in survivors if m.ready]
        if not came:
            self._pending_s = None
            if survivors and (newcomers or self._members.has_moved) and now_s >= self._ask_s:
                self._ask_s = now_s + _ASK_S
                self._invite(survivors[0], newcomers)
            return
        if self._pending_s is None:
            self._pending_s, self._ask_s = now_s, 0.0
        if missing := [m for m in survivors if not m.ready]:
            self._wake(missing, now_s)
        elif self._members.awaited or self._lacks_majority(self._pending_s, now_s):
            return
        elif all(m.ready.progress[0] < 0 for m in came if m.ready):
            self._end_all("no process that has the variables is left")
        # Once a process has finished, none is started any more, so the others continue with fewer than the minimum.
        elif len(came) + len(newcomers) >= self._least or self._launchers.has_finished:
            self._form(came, newcomers)
        elif not self._launchers.hopeless(self._least, self._members.machines):
            self._say_once(f"Too few workers are left: {len(came)} of at least {self._least}. They wait for others.")

    def _lacks_majority(self, pending_s: float, now_s: float) -> bool:
        """Whether other machines may train without this one. They have been asked again since processes wait for a generation."""
        if now_s >= self._ask_s:
            self._ask_s = now_s + _ASK_S
            self._launchers.ask()
        since_s = max(pending_s, now_s - _ANSWER_S)
        if self._launchers.are_majority(self._members.machines, since_s):
            return False
        if now_s - pending_s > _SILENCE_S:
            away = listed([f"{index}" for index in sorted(self._launchers.silent(self._members.machines, since_s))])
            self._say_once(
                f"The machines of tasks {away} do not answer, and may train without this one: waiting for them."
            )
        return True

    def _invite(self, first: GroupMember, newcomers: list[GroupMember]) -> None:
        """Asks the present generation to meet newcomers after one of its next steps."""
        if not newcomers:
            first.peer.say(meeting.ChangeRequest("another machine coordinates the group"))
            return
        names = ", ".join(f"worker {member.number}" for member in newcomers)
        first.peer.say(meeting.ChangeRequest(f"{names} joins" if len(newcomers) == 1 else f"{names} join"))

    def _wake(self, missing: list[GroupMember], now_s: float) -> None:
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

    def _form(self, survivors: list[GroupMember], newcomers: list[GroupMember]) -> None:
        # Survivors come first and keep their order, so that the chief stays the chief unless it is lost.
        members = survivors + newcomers
        try:
            service = self._service.start([host_of_other(m.peer.socket) for m in members])
        except OSError as e:
            self._end_all(f"{e}")
            return
        self._members.form(members)
        self._launchers.begin()
        # Before the processes: the launcher that takes over the rendezvous must know who they are.
        self._launchers.tell(self._standing())
        self._members.tell(members, service)
        self._pending_s = None
        if self.generation > 1:
            numbers = ", ".join(map(str, self._members.numbers))
            who = f"worker {numbers} continues" if len(members) == 1 else f"workers {numbers} continue"
            self._say_once(f"Generation {self.generation}: {who}.")

    def _end_all(self, why: str) -> None:
        for number in list(self._members.connected):
            self._launchers.kill(number, why)


def _without_repetitions(say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that says a text unless it has been the last one."""
    last = ""

    def say_once(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            say(text)

    return say_once
