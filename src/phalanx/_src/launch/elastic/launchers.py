# SPDX-License-Identifier: Apache-2.0
"""The launchers of an elastic group, as its rendezvous sees them: which processes they run, and which machines are awaited."""

import math
import selectors
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeGuard, final

from phalanx._src.cluster.connections.listener import Connection
from phalanx._src.cluster.watch.meeting import Ping
from phalanx._src.launch.elastic.messages import (
    NO_MAJORITY,
    GroupStatus,
    GroupTerms,
    KillRequest,
    LauncherReport,
    Presence,
)
from phalanx.errors import listed


@dataclass
class MachineLauncher:
    """The launcher of a machine.

    Args:
      until_s: time until which others wait for it if it has not connected, or was lost.
      peer: its connection. None on this machine.
      report: its last report. None if it has not connected yet, or was lost.
      sent_status: the last status that was sent to it.
      heard_s: time of its last message.
    """

    until_s: float
    peer: Connection | None = None
    report: LauncherReport | None = None
    sent_status: GroupStatus = GroupStatus()
    heard_s: float = -math.inf


@final
class Launchers:
    """The launchers of all machines, of which one runs in this process.

    Args:
      here: index of this machine.
      count: number of machines.
      patience_s: how long to wait for a machine, in seconds.
      kill: ends a process of this machine. Takes its number, and the reason.
      selector: waits for messages of the other launchers.
      clock: returns the time in seconds.
      terms: see `GroupTerms`.

    Attributes:
      dropped: numbers of the processes that have ended in the midst of a training run, whatever their exit code.
      has_finished: whether the program of a process has ended.
      ended: indices of the machines whose launcher has ended, and not only stopped answering.
    """

    def __init__(
        self,
        here: int,
        count: int,
        patience_s: float,
        kill: Callable[[int, str], None],
        selector: selectors.BaseSelector,
        *,
        clock: Callable[[], float],
        terms: str,
    ) -> None:
        self._patience_s, self._kill_here, self._selector, self._clock = patience_s, kill, selector, clock
        self._here, self._all = here, [MachineLauncher(self._until_s) for _ in range(count)]
        self.dropped: set[int] = set()
        self._new: set[int] = set()
        """The machines whose launcher knows nothing of the present generation, which may have been followed by others without this machine."""
        self.ended: set[int] = set()
        self.has_finished, self._terms = False, terms

    @property
    def _until_s(self) -> float:
        """Until when to wait for a machine from now on."""
        return self._clock() + self._patience_s

    @property
    def running(self) -> set[int]:
        """The numbers of all processes that run."""
        return {number for each in self._all if each.report for number in each.report.running}

    @property
    def finished(self) -> set[int]:
        """The numbers of the processes that have ended with exit code 0."""
        return {number for each in self._all if each.report for number in each.report.finished}

    @property
    def some_run_elsewhere(self) -> bool:
        """Whether a process of another machine runs."""
        elsewhere = (each for index, each in enumerate(self._all) if index != self._here)
        return any(each.report and each.report.running for each in elsewhere)

    @property
    def missing(self) -> list[int]:
        """The indices of the machines that have not connected, or were lost."""
        # The launcher of this machine makes its first report in a moment.
        return [index for index, each in enumerate(self._all) if each.report is None and index != self._here]

    def silent(self, machines: Set[int], since_s: float) -> set[int]:
        """Returns those of these machines that have not answered since a time, and may still train."""
        unheard = {i for i, each in enumerate(self._all) if each.heard_s < since_s and i != self._here}
        return {*machines} & (unheard | {*self.missing}) - self.ended

    def are_majority(self, machines: Set[int], since_s: float = -math.inf) -> bool:
        """Whether the others of these machines, which do not answer, cannot train without those that do.

        More than half of them answer, or half of them and the first. See S. Jajodia and D. Mutchler, "Dynamic voting algorithms for
        maintaining the consistency of a replicated database" (1990).

        Args:
          machines: indices of the machines.
          since_s: time since which they must have answered.
        """
        # Those whose launcher has ended train no more: it ends, or its guard ends, all processes of its machine.
        voters = sorted(machines - self.ended)
        silent = self.silent(machines, since_s)
        if not silent.intersection(voters):
            return True
        # What a launcher does not know may have been followed by a generation without this machine.
        here = [machine for machine in voters if machine not in silent | self._new]
        return 2 * len(here) > len(voters) or (2 * len(here) == len(voters) and voters[:1] == here[:1])

    @property
    def awaits_machine(self) -> bool:
        """Whether a machine has not come yet or may come back, so that nobody knows how many processes it will have."""
        now_s = self._clock()
        return any(each.report is None and now_s < each.until_s for each in self._all)

    def hopeless(self, least: int, machines: Set[int]) -> str:
        """Returns why the group can never continue. Empty as long as it may.

        Args:
          least: number of processes without which it cannot.
          machines: indices of the machines of the last generation.
        """
        # Of those that have ended with exit code 0, it may not be known yet whether they are replaced.
        hopeful = sum(each.report.hopeful + len(each.report.finished) for each in self._all if each.report)
        if self.has_finished or self.awaits_machine:
            return ""
        lost = list(map(str, self.missing))
        waited = f"after {self._patience_s:g} s without phalanx run on the machines of these tasks: {listed(lost)}"
        if hopeful < least:
            return f"too few workers are left, {hopeful} of at least {least}{f', {waited}' if lost else ''}"
        if not self.are_majority(machines):
            return f"{NO_MAJORITY}, so others may train without them, {waited}"
        return ""

    def knows(self, machine: object) -> TypeGuard[int]:
        """Returns whether a value is the index of another machine."""
        # For Python, `true` of JSON is an integer.
        return type(machine) is int and 0 <= machine < len(self._all) and machine != self._here

    def connect(self, machine: int, peer: Connection, *, is_new: bool = False) -> None:
        """Takes the connection of a launcher, which may have had another one before.

        Args:
          machine: index of its machine.
          peer: the connection.
          is_new: whether it knows nothing of the present generation.
        """
        if before := self._all[machine].peer:
            # It has lost its connection, or it is a mistake of the user, who learns of it here.
            before.say(
                GroupStatus(
                    gone=(), hopeless=f"another phalanx run of machine {machine} has taken the place of this one"
                )
            )
        self._lose(self._all[machine])
        self.ended.discard(machine)
        (self._new.add if is_new else self._new.discard)(machine)
        launcher = self._all[machine] = MachineLauncher(self._until_s, peer)
        self._selector.register(peer, selectors.EVENT_READ, launcher)
        peer.say(GroupTerms(self._terms))

    def begin(self) -> None:
        """Must be called when a generation is formed, of which all launchers that are connected will know."""
        self._new.clear()

    def note(self, report: LauncherReport, launcher: MachineLauncher | None = None) -> set[int]:
        """Takes a report of a launcher, by default of that of this machine. Returns the processes that have started since the last one."""
        launcher = launcher or self._all[self._here]
        before = launcher.report.running if launcher.report else ()
        launcher.report = report
        return set(report.running) - set(before)

    def hear(self, launcher: MachineLauncher) -> set[int]:
        """Takes the messages of another launcher. Returns the processes that have started."""
        assert launcher.peer
        started: set[int] = set()
        messages, is_open = launcher.peer.hear([LauncherReport])
        launcher.heard_s = self._clock() if messages else launcher.heard_s
        for message in messages:
            if isinstance(message, LauncherReport):
                started |= self.note(message, launcher)
        if not is_open:
            self._lose(launcher)
        return started

    def _lose(self, launcher: MachineLauncher) -> None:
        """Continues without a machine, which may reconnect."""
        if launcher.peer:
            if launcher.peer.is_closed:
                self.ended.add(self._all.index(launcher))
            self._selector.unregister(launcher.peer)
            launcher.peer.close()
            launcher.peer = launcher.report = None
            launcher.until_s = self._until_s

    def tell(self, status: GroupStatus) -> None:
        """Sends the launchers of other machines a status, unless they have it."""
        for launcher in self._all:
            # Called at each turn of the rendezvous, several times per second.
            if launcher.peer and launcher.sent_status != status:
                launcher.sent_status = status
                launcher.peer.say(status)

    def ask(self) -> None:
        """Asks the launchers of other machines for a sign of life. A machine may have been cut off before its connection ends."""
        for launcher in self._all:
            if launcher.peer:
                launcher.peer.say(Ping())

    def kill(self, number: int, why: str) -> None:
        """Ends a process of any machine."""
        # Only the launcher of its machine can send a signal to a process.
        for launcher in self._all:
            if launcher.peer and launcher.report and number in launcher.report.running:
                launcher.peer.say(KillRequest(number, why))
                return
        self._kill_here(number, why)

    def close(self, successor: Presence | None) -> None:
        """Closes all connections. Says before where the rendezvous is now, if it is elsewhere."""
        for launcher in self._all:
            if launcher.peer:
                if successor is not None:
                    launcher.peer.say(successor)
                launcher.peer.close()
