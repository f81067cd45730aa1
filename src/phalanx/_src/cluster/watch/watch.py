# SPDX-License-Identifier: Apache-2.0
"""The watchdog: reports to every process of a cluster which process has died or stalled.

JAX does not notice a process that is alive but makes no progress, and does not report the step. The connections of the
handshake stay open, and a thread in each process reports its progress over them. Rank 0 judges the reports and informs the others, which judge
for themselves once it has left.
Uses the standard library only.
"""

import functools
import math
import os
import selectors
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.ports import Socket
from phalanx._src.cluster.watch import messages
from phalanx._src.cluster.watch.agreement import Difference, Signature
from phalanx._src.cluster.watch.comparison import Comparison
from phalanx._src.cluster.watch.departure import GRACE_S, Departure, WatchTime
from phalanx._src.cluster.watch.pace import REPORT, Paces, StepTimes, table_of
from phalanx._src.cluster.watch.pairs import Pairs, PairsAnswer, PairsQuestion
from phalanx._src.cluster.watch.pulse import Pulse
from phalanx._src.cluster.watch.reporting import Connections, Operations, Reporter
from phalanx._src.cluster.watch.sync_point import PointMessage, SyncPoint
from phalanx._src.cluster.watch.verdict import Members, Verdict, silence_s

_TICK_S = 1.0
_JUDGE_S = 0.1
_SAVE_S = 0.02
_URGENT = messages.ComparisonRequest, messages.FailureReport
_SIGNS = 6
"""Number of signs of life in the time after which a silent process counts as stuck."""


@final
class Watch(threading.Thread):
    """A thread that reports the progress of this process, and ends the process when the cluster cannot continue.

    Args:
      addresses: addresses of all ranks.
      rank: rank of this process.
      lines: open connections by rank: on rank 0 to all other ranks, on any other rank to rank 0.
      stall_s: time that no process may make progress while one of them waits, in seconds.
      outlive: called when the group has lost processes, so that this one leaves it. Takes the ranks of processes that hang
        and must be ended, and the reason. None if the group cannot lose a process.
      service: address of JAX's service, if rank 0 has it. By default the address of rank 0.
      time: by which all limits are measured.

    Attributes:
      operations: the operations of this process that need all processes.
      sync_point: the point after which all processes save.
      change_point: the point after which they form another group.
      stop_point: the point at which they agree whether a loop over batches stops.
      pulse: the process that gives signs of life for this one. None if there is none.
      pairs: the connections by which processes exchange arrays on CPUs.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        lines: Mapping[int, Socket],
        stall_s: float,
        outlive: Callable[[Sequence[int], str], None] | None = None,
        *,
        service: str | None = None,
        time: WatchTime | None = None,
    ) -> None:
        super().__init__(name="phalanx-watch", daemon=True)
        # Under a short stall limit, reports must come more often, or each would be too old.
        self._time, self._tick_s = time or WatchTime(), min(_TICK_S, stall_s / 4)
        self.operations, self._connections = Operations(self._time.clock), Connections(lines)
        self._members = Members(addresses, rank, lines, stall_s, self._time.clock())
        self._paces = Paces(len(addresses)) if rank == 0 else None
        self._reporter = Reporter(self.operations, self._connections, self._paces)
        self._comparison = Comparison(self._members, self.operations, self._connections.say)
        self._points = {
            name: SyncPoint(rank, lines, functools.partial(self._say_at, name), self.operations.waiting)
            for name in ("sync", "change", "stop")
        }
        self.sync_point, self.change_point, self.stop_point = self._points.values()
        self.pairs = Pairs(rank, len(addresses), self._connections.say)
        self._departure = Departure(
            self._members,
            self.operations,
            self._connections,
            outlive,
            service=service or addresses[0],
            time=self._time,
            tick_s=self._tick_s,
        )
        self.pulse: Pulse | None = None

    def _say_at(self, name: str, content: PointMessage) -> None:
        self._connections.say(messages.MessageAtPoint(name, content))

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._members.rank

    @property
    def place(self) -> str:
        """Rank and address of this process."""
        return self._members.own.name

    @property
    def steps(self) -> int:
        """The number of steps that this process has finished, and the one that it is in."""
        return self.operations.step

    @property
    def has_others(self) -> bool:
        """Whether this process was connected with others."""
        return bool(self._connections.streams)

    @property
    def others_have_left(self) -> bool:
        """Whether the programs of all processes to which this one is connected have ended."""
        return self._members.others_have_left

    def agree(self, signature: Signature) -> Difference | None:
        """Waits until all processes are about to run a program for the first time, or to read the same values.

        Args:
          signature: the properties of the program that must be equal in all processes.

        Returns:
          The first difference between the programs, or None if they are equal.
        """
        # The program runs inside another one, with which it was compared.
        if self.operations.depth:
            return None
        self._comparison.ask(signature)
        with self.operations.waiting(is_step=True):
            try:
                self._reporter.report(messages.ComparisonRequest(self._comparison.signature))
                # Rank 0 may be the last one that asks, and need not wait for the watchdog to look.
                self._comparison.settle(self._time.clock())
                return self._comparison.wait(self._tick_s, lambda: self._departure.verdict is not None)
            finally:
                # Also after Ctrl-C, so that the others do not compare with a program that is not about to run.
                self._comparison.signature = None
                self._connections.say(messages.ComparisonRequest(None))

    def pass_save(self, name: str) -> bool:
        """Tells the others on rank 0 that it has written a file. On any other rank, waits for that, or until rank 0 continues without it.

        Returns:
          Whether rank 0 has written the file.
        """
        chief, turn, now = self._members.by_rank[0], self.operations.turn, self._time.clock
        if self.rank == 0:
            self._reporter.report(messages.SaveReport(turn, name))
            return True
        with self.operations.waiting():
            while (turn, name) not in self.operations.saves and self._departure.verdict is None:
                # The chief may have saved alone before, or has another name for the file.
                if chief.turn > turn or chief.is_waiting(0, now()) or self.others_have_left:
                    break
                self._time.sleep(_SAVE_S)
        return (turn, name) in self.operations.saves

    def loss(self, wait_s: float = 0.0) -> str | None:
        """Returns the verdict text if a process has died, otherwise None. Waits up to `wait_s` seconds for a verdict."""
        departure = self._departure
        if wait_s and departure.verdict is None:
            # Rank 0 needs it to judge a process that has ended its program. See `judge_failure`.
            self.operations.has_lost_step = True
            self._reporter.report()
        if wait_s and departure.is_told.wait(wait_s) and departure.verdict and not departure.verdict.is_loss:
            # The watchdog is about to end this process with an explanation. An error in the main thread must not come first.
            self.join(GRACE_S)
        if departure.verdict is None or not departure.verdict.is_loss:
            return None
        departure.has_told_loss = True
        return departure.verdict.text

    @property
    def has_told_loss(self) -> bool:
        """Whether `loss` has returned a verdict, so that the program of this process should know of it."""
        return self._departure.has_told_loss

    @property
    def step_times(self) -> list[StepTimes]:
        """The step times of all processes, on rank 0. Empty elsewhere."""
        return self._paces.step_times() if self._paces else []

    def leave(self, *, is_told: bool = False) -> None:
        """Announces that the program of this process has finished. `is_told` is whether SIGTERM caused it."""
        self.operations.has_left, self.operations.is_told = True, is_told
        self._reporter.report_pace()
        if self._paces and os.environ.get(REPORT):
            self._show_pace()

    def _show_pace(self) -> None:
        """Prints the step times of this group, once the others have sent theirs."""
        until_s = self._time.clock() + _TICK_S
        while not self.others_have_left and self._departure.verdict is None and self._time.clock() < until_s:
            self._time.sleep(_JUDGE_S)
        if times := self.step_times:
            places = {rank: member.name for rank, member in self._members.by_rank.items()}
            with suppress(OSError):
                os.write(2, f"\nPhalanx: {self.steps} steps.\n{table_of(times, places)}\n".encode())

    def fail(self, end: str) -> None:
        """Announces that this process is about to end because of the error that `end` describes."""
        # First: the others end because of this failure, and this process must not blame them for it.
        self._departure.has_failed = True
        self._reporter.report(messages.FailureReport(end))
        self._connections.hang_up()
        self._departure.hold_service()

    def close(self) -> None:
        """Ends the watchdog, because this process leaves the group and continues in another one."""
        self.leave()
        self._departure.is_closed = True
        if self.pulse is not None:
            self.pulse.release()
        self._connections.hang_up()

    @override
    def run(self) -> None:
        for _ in self.turns():
            pass

    def turns(self, longest_s: float = math.inf) -> Iterator[None]:
        """Watches until the cluster cannot continue or this process has left it, and then acts. Yields after each event.

        Args:
          longest_s: longest time to wait for an event, in seconds. By default until the next report is due.
        """
        departure, clock = self._departure, self._time.clock
        with selectors.DefaultSelector() as selector:
            for rank, stream in self._connections.streams.items():
                selector.register(stream, selectors.EVENT_READ, rank)
            due_s = judge_s = clock()
            while departure.verdict is None and not departure.is_closed:
                began_s = clock()
                ready = selector.select(min(longest_s, max(0.0, due_s - began_s)))
                now_s = clock()
                for key, _ in ready:
                    is_open, is_urgent = self._listen(key.data, now_s)
                    if not is_open:
                        selector.unregister(key.fileobj)
                    if is_urgent:
                        judge_s = now_s
                # Report only once per tick: two processes that answered each message would never rest.
                if now_s >= due_s:
                    due_s, judge_s = now_s + self._tick_s, now_s
                    self._members.own.hear(self.operations.report(), now_s)
                    self._reporter.report_pace()
                    self.pairs.look()
                # Judging takes time for each member, so rank 0 of a large cluster must not do it for each message.
                if now_s >= judge_s:
                    judge_s = now_s + min(_JUDGE_S, self._tick_s)
                    self._comparison.settle(now_s)
                    # By the time before the wait: a process that was stopped has only now read what the others sent in that time.
                    # Rank 0 may have sent its verdict already.
                    departure.verdict = departure.verdict or self._members.judge(began_s, may_lose=departure.may_lose)
                yield
        if departure.verdict is not None and not departure.is_closed:
            departure.act(departure.verdict)
        self._connections.close()

    def _listen(self, rank: int, now_s: float) -> tuple[bool, bool]:
        """Handles the messages of a process.

        Returns:
          Whether its connection is still open, and whether its messages must be judged at once.
        """
        arrived: list[messages.WatchMessage]
        arrived, is_open = self._connections.streams[rank].hear(messages.WATCH_MESSAGES)
        for message in arrived:
            self._dispatch(rank, message, now_s)
        if not is_open:
            self._members.by_rank[rank].is_cut_off()
            self.pairs.lose(rank)
            for point in self._points.values():
                point.lose(rank)
        return is_open, not is_open or any(isinstance(x, _URGENT) for x in arrived)

    def _dispatch(self, rank: int, message: messages.WatchMessage, now_s: float) -> None:
        match message:
            case messages.VerdictReport(text, is_loss, hint):
                self._departure.verdict = Verdict(text, is_loss, hint)
            case messages.ComparisonAnswer(difference):
                self._comparison.answer(difference)
            case messages.SaveReport(turn, name):
                self.operations.saves.append((turn, name))
            case PairsQuestion() | PairsAnswer():
                self.pairs.hear(message)
            case messages.MessageAtPoint(name, content):
                self._points[name].hear(rank, content)
            case messages.PaceReport(samples):
                if self._paces:
                    self._paces.hear(rank, samples)
            case _:
                self._members.by_rank[rank].hear(message, now_s)


_started: list[Watch] = []


def start(
    addresses: Sequence[str],
    rank: int,
    lines: Mapping[int, Socket],
    stall_s: float,
    outlive: Callable[[Sequence[int], str], None] | None = None,
    *,
    service: str | None = None,
) -> Watch:
    """Starts the watchdog of this process. See `Watch`."""
    watch = Watch(addresses, rank, lines, stall_s, outlive, service=service)
    if lines:
        # Without it, a call that holds the interpreter for long would look like a process that hangs.
        with suppress(OSError):
            watch.pulse = Pulse([line.fileno() for line in lines.values()], silence_s(stall_s) / _SIGNS)
    watch.start()
    _started.append(watch)
    return watch


def end() -> None:
    """Ends the watchdog of this process, if there is one, because the process leaves its group."""
    while _started:
        _started.pop().close()


def step_times() -> list[StepTimes]:
    """Returns how long the steps of each process take, and how often the others wait for it. May be called in any context.

    A process measures the time from the end of a collective operation to the beginning of the next: all leave an operation together, and the
    slowest process reaches the next one last. Differences within a compiled step cannot be seen.

    Returns:
      A list by rank, on the chief of a cluster of several processes. Empty in other processes, and before the first reports, which
      come once per second. In an elastic group the times belong to the current generation.

    Example:
      >>> step_times()  # This process is alone.
      []
    """
    watch = own()
    return watch.step_times if watch else []


def own() -> Watch | None:
    """Returns the watchdog of this process, or None if there is none because the process is alone in its cluster."""
    return _started[0] if _started else None
