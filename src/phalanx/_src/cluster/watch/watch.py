# SPDX-License-Identifier: Apache-2.0
"""The watch: tells every process of a cluster which process has died or stalled.

JAX does not notice a process that is alive but makes no progress, and does not report the step. The connections of the roll
call stay open, and a thread in each process reports its progress over them. Rank 0 judges the reports and informs the others, which judge
for themselves once it has left.
Uses the standard library only.
"""

import json
import math
import os
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, final

from typing_extensions import override

from phalanx._src.cluster.connections.hosts import PRIVATE, is_private
from phalanx._src.cluster.connections.listener import Message, MessageStream, encoded
from phalanx._src.cluster.connections.ports import Socket, descriptors_at
from phalanx._src.cluster.connections.strangers import write_line
from phalanx._src.cluster.processes.guard import start_apart
from phalanx._src.cluster.spec import host_and_port
from phalanx._src.cluster.watch.agreement import READ, Difference, Signature, compare, shortened
from phalanx._src.cluster.watch.pace import REPORT, Paces, StepTimes, Stopwatch, table_of
from phalanx._src.cluster.watch.pairs import Pairs
from phalanx._src.cluster.watch.pulse import Pulse
from phalanx._src.cluster.watch.sync_point import SyncPoint
from phalanx._src.cluster.watch.verdict import Member, Verdict, judge_failure, judge_presence, judge_progress, silence_s

STALL_TIMEOUT_S = 600.0
"""Default time without progress in any process, in seconds, after which a waiting cluster counts as stalled.

The caller or PHALANX_STALL_TIMEOUT_S can override it.
"""

_TICK_S = 1.0
_JUDGE_S = 0.1
_GRACE_IN_STEP_S = 5.0
_GRACE_S = 20.0
_LEAVE_S = 2.0, 10.0
"""Shortest and longest time in seconds in which a process must leave a group that has lost another one: some steps."""
_STEPS_TO_LEAVE = 4
_CONNECT_S = 60.0
"""Longest time in seconds in which a process must leave a group that has lost another one before its first step."""
_NO_PROGRESS = 75
_SIGNS = 6
"""Signs of life in the time after which a silent process counts as standing still."""

_HOLD = """
import select, sys, time
end_s, held, poll = time.monotonic() + float(sys.argv[1]), set(map(int, sys.argv[2:])), select.poll()
for fd in held:
    poll.register(fd, select.POLLRDHUP)
while held and (left_s := end_s - time.monotonic()) > 0:
    for fd, _ in poll.poll(1000 * left_s):
        poll.unregister(fd)
        held.discard(fd)
"""


@final
class Watch(threading.Thread):
    """A thread that reports the progress of this process, and ends the process when the cluster cannot continue.

    Args:
      addresses: addresses of all ranks.
      rank: rank of this process.
      lines: open connections by rank: on rank 0 to all other ranks, on any other rank to rank 0.
      stall_s: time that no process may make progress while one of them waits, in seconds.
      outlive: called when the group has lost processes, so that this one leaves it. Takes the ranks of processes that stand still
        and must be ended, and the reason. None if the group cannot lose a process.
      service: address of JAX's service, if rank 0 has it. By default the address of rank 0.
      clock: returns the time in seconds. All limits are measured by it.
      sleep: waits for some seconds of this time.

    Attributes:
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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(name="phalanx-watch", daemon=True)
        self._clock, self._sleep = clock, sleep
        now_s = clock()
        self._members = {r: Member(f"rank {r} ({addresses[r]})", now_s, now_s) for r in {rank, *lines}}
        self._rank, self._stall_s, self._outlive = rank, stall_s, outlive
        service = service or addresses[0]
        self._service = service.removeprefix(PRIVATE) if is_private(service) else host_and_port(service)[1]
        self._lines = {r: MessageStream(connection) for r, connection in lines.items()}
        self._points = {name: self._new_point(name) for name in ("sync", "change", "stop")}
        # At the first point all processes save, at the second they form another group, and at the third they agree whether a
        # loop over batches stops.
        self.sync_point, self.change_point, self.stop_point = self._points.values()
        self.pairs = Pairs(rank, len(addresses), self._say_to)
        self._tick_s = min(_TICK_S, stall_s / 4)
        self._turn = self._step = self._depth = 0
        self._stopwatch, self._paces = Stopwatch(), Paces(len(addresses)) if rank == 0 else None
        self._has_left = self._is_told_to_end = self._has_failed = self._is_closed = self._has_lost_step = False
        self._has_told_loss = False
        self.pulse: Pulse | None = None
        self._verdict: Verdict | None = None
        self._is_told = threading.Event()
        self._settling = threading.Lock()
        self._reporting = threading.RLock()
        self._agreed: set[str] = set()
        self._asked: Signature | None = None
        self._is_answered, self._difference = threading.Event(), None  # type: threading.Event, Difference | None

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._rank

    @property
    def place(self) -> str:
        """Rank and address of this process."""
        return self._members[self._rank].name

    @property
    def steps(self) -> int:
        """The number of steps that this process has finished, and the one that it is in."""
        return self._step

    @property
    def has_others(self) -> bool:
        """Whether this process was connected with others."""
        return bool(self._lines)

    @property
    def others_have_left(self) -> bool:
        """Whether the programs of all processes to which this one is connected have ended."""
        return all(self._members[rank].has_left or self._members[rank].end for rank in self._lines)

    def agree(self, signature: Signature) -> Difference | None:
        """Waits until all processes are about to run a program for the first time, or to read the same values.

        Args:
          signature: the properties of the program that must be equal in all processes.

        Returns:
          The first difference between the programs, or None if they are equal.
        """
        if self._depth:
            return None
        self._is_answered.clear()
        self._difference, self._asked = None, shortened(signature)
        self.begin(is_step=True)
        try:
            self._report(asked=self._asked)
            self._settle()
            while not self._is_answered.wait(self._tick_s) and self._verdict is None:
                pass
            return self._difference
        finally:
            self._asked = None
            self._say({"asked": None})
            self.end(is_step=True, has_failed=True)

    def _new_point(self, name: str) -> SyncPoint:
        say = self._say
        return SyncPoint(self._rank, self._lines, lambda message: say({name: message["sync"]}), self.waiting)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Returns a context that counts as waiting for the others, so that a process that does not answer is named."""
        self.begin(is_step=False)
        try:
            yield
        finally:
            self.end(is_step=False, has_failed=True)

    def begin(self, *, is_step: bool) -> None:
        """Records the start of an operation that needs all processes. Calls may be nested."""
        self._depth += 1
        if self._depth == 1:
            self._turn += 1
            self._step += is_step
            self._stopwatch.begin(self._step, self._turn, self._clock(), is_step=is_step)

    def end(self, *, is_step: bool, has_failed: bool) -> None:
        """Records the end of the operation that the matching `begin` started."""
        self._depth -= 1
        if self._depth == 0 and has_failed:
            # The others may not have begun it either, so this process must not count as ahead of them.
            self._turn -= 1
            self._step -= is_step
            self._stopwatch.cancel()
        elif self._depth == 0:
            self._stopwatch.end(self._clock())

    def loss(self, wait_s: float = 0.0) -> str | None:
        """Returns the verdict text if a process has died, otherwise None. Waits up to `wait_s` seconds for a verdict."""
        if wait_s and self._verdict is None:
            self._has_lost_step = True
            self._report()
        if wait_s and self._is_told.wait(wait_s) and self._verdict and not self._verdict.is_loss:
            # The watch is about to end this process with an explanation. An error in the main thread must not come first.
            self.join(_GRACE_S)
        if self._verdict is None or not self._verdict.is_loss:
            return None
        self._has_told_loss = True
        return self._verdict.text

    @property
    def has_told_loss(self) -> bool:
        """Whether `loss` has returned a verdict, so that the program of this process should know of it."""
        return self._has_told_loss

    @property
    def step_times(self) -> list[StepTimes]:
        """The step times of all processes, on rank 0. Empty elsewhere."""
        return self._paces.step_times() if self._paces else []

    def leave(self, *, is_told: bool = False) -> None:
        """Announces that the program of this process has finished. `is_told` is whether SIGTERM caused it."""
        self._has_left, self._is_told_to_end = True, is_told
        self._report_pace()
        if self._paces and os.environ.get(REPORT):
            self._show_pace()

    def _show_pace(self) -> None:
        """Prints the step times of this group, once the others have sent theirs."""
        until_s = self._clock() + _TICK_S
        while not self.others_have_left and self._verdict is None and self._clock() < until_s:
            self._sleep(_JUDGE_S)
        if times := self.step_times:
            places = {rank: member.name for rank, member in self._members.items()}
            with suppress(OSError):
                os.write(2, f"\nPhalanx: {self._step} steps.\n{table_of(times, places)}\n".encode())

    def fail(self, end: str) -> None:
        """Announces that this process is about to end because of the error that `end` describes."""
        self._has_failed = True
        self._report(end=end)
        for line in self._lines.values():
            line.hang_up()
        self._hold_service()

    def close(self) -> None:
        """Ends the watch, because this process leaves the group and continues in another one."""
        self.leave()
        self._is_closed = True
        if self.pulse is not None:
            self.pulse.release()
        for line in self._lines.values():
            line.hang_up()

    @override
    def run(self) -> None:
        for _ in self.turns():
            pass

    def turns(self, longest_s: float = math.inf) -> Iterator[None]:
        """Watches until the cluster cannot continue or this process has left it, and then acts. Yields after each event.

        Args:
          longest_s: longest time to wait for an event, in seconds. By default until the next report is due.
        """
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, rank)
            due_s = judge_s = self._clock()
            while self._verdict is None and not self._is_closed:
                began_s = self._clock()
                ready = selector.select(min(longest_s, max(0.0, due_s - began_s)))
                now_s = self._clock()
                for key, _ in ready:
                    is_open, is_urgent = self._listen(key.data, now_s)
                    if not is_open:
                        selector.unregister(key.fileobj)
                    if is_urgent:
                        judge_s = now_s
                # Report only once per tick: two processes that answered each message would never rest.
                if now_s >= due_s:
                    due_s, judge_s = now_s + self._tick_s, now_s
                    self._members[self._rank].hear(self._progress(), now_s)
                    self._report_pace()
                    self.pairs.look()
                # Judging takes time for each member, so rank 0 of a large cluster must not do it for each message.
                if now_s >= judge_s:
                    judge_s = now_s + min(_JUDGE_S, self._tick_s)
                    self._settle()
                    self._verdict = self._verdict or self._judged(began_s)
                yield
        if self._verdict is not None and not self._is_closed:
            self._act(self._verdict)
        for line in self._lines.values():
            line.connection.close()

    def _settle(self) -> None:
        """Answers the processes that wait in `agree`, on rank 0, once every process waits there or in that step."""
        if self._rank != 0:
            return
        with self._settling:
            now_s = self._clock()
            self._members[0].hear(self._progress() | {"asked": self._asked}, now_s)
            requests = {rank: m.asked for rank, m in self._members.items() if m.asked is not None}
            if not requests:
                return
            turn = min(self._members[rank].turn for rank in requests)
            known = [rank for rank, m in self._members.items() if rank not in requests and m.is_waiting(turn, now_s)]
            if len(requests) + len(known) < len(self._members):
                return
            difference = self._difference_of(requests, known)
            for member in self._members.values():
                member.asked = None
            self._asked = None
            self._answer(difference)
            self._say({"agreed": difference and difference.as_list()})

    def _difference_of(self, requests: Mapping[int, Signature], known: list[int]) -> Difference | None:
        """Compares the programs of the ranks that wait for agreement. The `known` ranks run a program that was agreed on before."""
        difference = compare(requests)
        is_read = any(READ in signature for signature in requests.values())
        texts = {json.dumps(signature) for signature in requests.values()}
        if known and difference is None and (is_read or not texts <= self._agreed):
            difference = Difference(
                "program", None, [(list(requests), "a new one"), (known, "one that it has run before")]
            )
        if difference is None and not is_read:
            self._agreed |= texts
        return difference

    def _answer(self, difference: Difference | None) -> None:
        self._difference = difference
        self._is_answered.set()

    def _judged(self, now_s: float) -> Verdict | None:
        member = self._members[self._rank]
        verdict = judge_presence([self._members[rank] for rank in self._lines], now_s, self._stall_s, member)
        # Rank 0 alone judges progress, so that all ranks report the same. When it has left, each other rank judges for itself: it
        # knows of rank 0 and of itself.
        if verdict is None and (self._rank == 0 or self._members[0].is_gone):
            known = list(self._members.values())
            verdict = judge_failure(known) if self._outlive is not None else None
            verdict = verdict or judge_progress(known, now_s, self._stall_s)
        return verdict

    def _progress(self) -> dict[str, Any]:
        inside = self._depth > 0
        return {
            "turn": self._turn,
            "step": self._step,
            "is_inside": inside,
            "has_left": self._has_left,
            "is_told": self._is_told_to_end,
            "has_lost_step": self._has_lost_step,
        }

    def _report_pace(self) -> None:
        samples = self._stopwatch.take()
        if self._paces:
            self._paces.hear(0, samples)
        self._report(**({"pace": samples} if samples and not self._paces else {}))

    def _report(self, **more: Any) -> None:
        """Sends the progress of this process. Two threads do, and an older report must not undo that it has left."""
        with self._reporting:
            self._say(self._progress() | more)

    def _say_to(self, message: Message, rank: int | None) -> None:
        data = encoded(message)
        for line in self._lines.values() if rank is None else [self._lines[rank]]:
            line.send(data)

    def _say(self, message: Message) -> None:
        self._say_to(message, None)

    def _listen(self, rank: int, now_s: float) -> tuple[bool, bool]:
        """Handles the messages of a process.

        Returns:
          Whether its connection is still open, and whether its messages must be judged at once.
        """
        messages, is_open = self._lines[rank].hear()
        for message in messages:
            if "verdict" in message:
                self._verdict = Verdict(message["verdict"], bool(message["is_loss"]), message["hint"])
            elif "agreed" in message:
                self._answer(Difference(*message["agreed"]) if message["agreed"] else None)
            elif "pairs" in message:
                self.pairs.hear(rank, message["pairs"])
            elif name := next((name for name in self._points if name in message), None):
                self._points[name].hear(rank, message[name])
            else:
                self._members[rank].hear(message, now_s)
                if self._paces and "pace" in message:
                    self._paces.hear(rank, message["pace"])
        if not is_open:
            self._members[rank].is_cut_off()
            self.pairs.lose(rank)
            for point in self._points.values():
                point.lose(rank)
        return is_open, not is_open or any("asked" in message or "end" in message for message in messages)

    def _act(self, verdict: Verdict) -> None:
        """Ends this process, after a grace period in which the main thread can end it or leave the group."""
        survives = self._outlive is not None and not self._has_failed and bool(verdict.is_loss or verdict.still)
        if survives:
            self._wait_for_leave(verdict)
            if self._is_closed:
                return
        elif self._rank == 0:
            self._say({"verdict": verdict.text, "is_loss": verdict.is_loss, "hint": verdict.hint})
        elif not verdict.is_loss:
            # Rank 0 has stalled and may recover. It must not name this process as the cause.
            self._say({"end": f"has ended, because {verdict.text}"})
        if self._has_failed:
            # This process caused the others to end, so they must not be named.
            verdict = Verdict("its last error stands above, and it has not ended by itself since", is_loss=True)
        elif verdict.is_loss:
            # Write at once: if rank 0 dies, JAX aborts the others within a tenth of a second.
            write_line(f"{verdict}")
        self._is_told.set()
        started_s = self._clock()
        while verdict.is_loss and not survives and self._clock() - started_s < self._grace_s:
            self._sleep(self._tick_s)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        write_line(f"{verdict}\nThe cluster cannot go on, and rank {self._rank} ends here.\n{_stacks()}".rstrip("\n"))
        if verdict.is_loss:
            self._hold_service()
        os._exit(_NO_PROGRESS)

    def _wait_for_leave(self, verdict: Verdict) -> None:
        """Tells the main thread and the others that a process is lost, and waits until the main thread has left the group.

        Returns before that if the main thread does not get out of a step.
        """
        assert self._outlive is not None
        lost = self._verdict = replace(verdict, is_loss=True)
        if self._rank == 0:
            self._say({"verdict": lost.text, "is_loss": True, "hint": lost.hint})
        write_line(f"{lost.text}.")
        self._is_told.set()
        self._outlive([rank for rank, m in self._members.items() if m.name in verdict.still], verdict.text)
        inside_s = self._clock()
        # Before the first step, gloo may still try to connect with the lost process, and gives up by itself.
        steps_s = min(max(_LEAVE_S[0], _STEPS_TO_LEAVE * self._stopwatch.last_s), _LEAVE_S[1])
        leave_s = steps_s if self._step else _CONNECT_S
        while not self._is_closed and self._clock() - inside_s < leave_s:
            self._sleep(min(self._tick_s, _JUDGE_S))
            if not self._depth:
                inside_s = self._clock()

    def _hold_service(self) -> None:
        """Keeps the connections to JAX's service open for a while after this process has ended.

        Rank 0 hosts the service. When it ends, JAX aborts the other processes within a tenth of a second, and their
        `finally` blocks would not run. A child process holds the connections until the others close them.
        """
        if self._rank != 0:
            return
        with suppress(OSError):
            connections = descriptors_at(self._service, but={line.connection.fileno() for line in self._lines.values()})
            start_apart(["-c", _HOLD, str(_GRACE_S), *map(str, connections)], connections, subprocess.DEVNULL)

    @property
    def _grace_s(self) -> float:
        """Time for the main thread to end with an error of its own, which shows its current line."""
        if self._has_left:
            return 0.0
        return _GRACE_IN_STEP_S if self._depth else _GRACE_S


def _stacks() -> str:
    """Returns the stacks of all other threads, with the main thread last."""
    frames, main = sys._current_frames(), threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is main)
    thread_frames = [(t, frames.get(t.ident or 0)) for t in threads if t is not threading.current_thread()]
    return "\n".join(
        f"Thread {thread.name} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
        for thread, frame in thread_frames
        if frame
    )


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
    """Starts the watch of this process. See `Watch`."""
    watch = Watch(addresses, rank, lines, stall_s, outlive, service=service)
    if lines:
        # Without it, a call that holds the interpreter for long would look like a process that stands still.
        with suppress(OSError):
            watch.pulse = Pulse([line.fileno() for line in lines.values()], silence_s(stall_s) / _SIGNS)
    watch.start()
    _started.append(watch)
    return watch


def end() -> None:
    """Ends the watch of this process, if there is one, because the process leaves its group."""
    while _started:
        _started.pop().close()


def step_times() -> list[StepTimes]:
    """Returns how long the steps of each process take, and how often the others wait for it. May be called in any context.

    A process measures the time from the end of a collective operation to the beginning of the next: all leave an operation together, and
    the one that needs the longest comes last. Differences within a compiled step cannot be seen.

    Returns:
      A list by rank, on the chief of a cluster of several processes. Empty in other processes, and before the first reports, which
      come once per second. In an elastic group the times are those of the present generation.

    Example:
      >>> step_times()  # This process is alone.
      []
    """
    watch = own()
    return watch.step_times if watch else []


def own() -> Watch | None:
    """Returns the watch of this process, or None if there is none because the process is alone in its cluster."""
    return _started[0] if _started else None
