# SPDX-License-Identifier: Apache-2.0
"""The end of this process in a group that cannot continue: it leaves the group, or ends with an explanation."""

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from phalanx._src.cluster.connections.hosts import PRIVATE, is_private
from phalanx._src.cluster.connections.ports import descriptors_at
from phalanx._src.cluster.connections.strangers import write_line
from phalanx._src.cluster.processes.guard import start_apart
from phalanx._src.cluster.spec import host_and_port
from phalanx._src.cluster.watch.messages import FailureReport, VerdictReport
from phalanx._src.cluster.watch.reporting import Connections, Operations
from phalanx._src.cluster.watch.verdict import Members, Verdict

GRACE_S = 20.0
"""Longest time in seconds in which the main thread can end with its own error."""
_GRACE_IN_STEP_S = 5.0
_LEAVE_S = 2.0, 10.0
"""Shortest and longest time in seconds in which a process must leave a group that has lost another one: some steps."""
_STEPS_TO_LEAVE = 4
_CONNECT_S = 60.0
"""Longest time in seconds in which a process must leave a group that has lost another one before its first step."""
_POLL_S = 0.1
# EX_TEMPFAIL of BSD's sysexits.h: another attempt may succeed.
_NO_PROGRESS = 75

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


@dataclass(frozen=True)
class WatchTime:
    """The time by which a watch measures all limits.

    Args:
      clock: returns the time in seconds.
      sleep: waits for some seconds of this time.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@final
class Departure:
    """Ends this process, or gets it out of its group, when the group cannot continue.

    Args:
      members: what is known of the processes.
      operations: what this process does.
      connections: the connections to the others.
      outlive: see `Watch`.
      service: address of JAX's service.
      time: see `WatchTime`.
      tick_s: time between two looks at what the main thread does, in seconds.

    Attributes:
      verdict: why the group cannot continue. None as long as it can.
      is_told: set once the main thread may know of the verdict.
      has_told_loss: whether the main thread was told that a process is lost.
      has_failed: whether this process is about to end because of an error.
      is_closed: whether this process has left the group.
    """

    def __init__(
        self,
        members: Members,
        operations: Operations,
        connections: Connections,
        outlive: Callable[[Sequence[int], str], None] | None,
        *,
        service: str,
        time: WatchTime,
        tick_s: float,
    ) -> None:
        self._members, self._operations, self._connections, self._outlive = members, operations, connections, outlive
        self._service = service.removeprefix(PRIVATE) if is_private(service) else host_and_port(service)[1]
        self._time, self._tick_s = time, tick_s
        self.verdict: Verdict | None = None
        self.is_told = threading.Event()
        self.has_told_loss = self.has_failed = self.is_closed = False

    @property
    def may_lose(self) -> bool:
        """Whether the group may continue without some processes."""
        return self._outlive is not None

    def act(self, verdict: Verdict) -> None:
        """Ends this process, after a grace period in which the main thread can end it or leave the group."""
        # If all have stalled, the verdict names nobody without whom the others could continue.
        survives = self.may_lose and not self.has_failed and bool(verdict.is_loss or verdict.still)
        if survives:
            self._wait_for_leave(verdict)
            if self.is_closed:
                return
        elif self._members.rank == 0:
            self._connections.say(VerdictReport(verdict.text, verdict.is_loss, verdict.hint))
        elif not verdict.is_loss:
            # Rank 0 has stalled and may recover. It must not name this process as the cause.
            self._connections.say(FailureReport(f"exited because {verdict.text}"))
        if self.has_failed:
            # This process caused the others to end, so they must not be named.
            verdict = Verdict("its last error is above, and it has not exited since", is_loss=True)
        elif verdict.is_loss:
            # Write at once: if rank 0 dies, JAX aborts the others within a tenth of a second.
            write_line(f"{verdict}")
        self.is_told.set()
        started_s = self._time.clock()
        while verdict.is_loss and not survives and self._time.clock() - started_s < self._grace_s:
            self._time.sleep(self._tick_s)
        with suppress(OSError, ValueError):
            # `os._exit` below flushes nothing.
            sys.stdout.flush()
        end = f"The cluster cannot continue, so rank {self._members.rank} exits."
        write_line(f"{verdict}\n{end}\n{_stacks()}".rstrip("\n"))
        if verdict.is_loss:
            self.hold_service()
        # Not `sys.exit`: this is not the main thread, and JAX's exit function would wait for the other processes.
        os._exit(_NO_PROGRESS)

    def _wait_for_leave(self, verdict: Verdict) -> None:
        """Tells the main thread and the others that a process is lost, and waits until the main thread has left the group.

        Returns before that if the main thread does not get out of a step.
        """
        assert self._outlive is not None
        # As a loss, so that `Watch.loss` tells the main thread, and its step raises PeerLostError.
        lost = self.verdict = replace(verdict, is_loss=True)
        if self._members.rank == 0:
            self._connections.say(VerdictReport(lost.text, is_loss=True, hint=lost.hint))
        write_line(f"{lost.text}.")
        self.is_told.set()
        still = [rank for rank, member in self._members.by_rank.items() if member.name in verdict.still]
        self._outlive(still, verdict.text)
        inside_s = self._time.clock()
        # Before the first step, gloo may still try to connect with the lost process, and gives up by itself.
        steps_s = min(max(_LEAVE_S[0], _STEPS_TO_LEAVE * self._operations.stopwatch.last_s), _LEAVE_S[1])
        leave_s = steps_s if self._operations.step else _CONNECT_S
        while not self.is_closed and self._time.clock() - inside_s < leave_s:
            self._time.sleep(min(self._tick_s, _POLL_S))
            # Only time inside a step counts. The user's code between two steps may take any time.
            if not self._operations.depth:
                inside_s = self._time.clock()

    def hold_service(self) -> None:
        """Keeps the connections to JAX's service open for a while after this process has ended.

        Rank 0 hosts the service. When it ends, JAX aborts the other processes within a tenth of a second, and their
        `finally` blocks would not run. A child process holds the connections until the others close them.
        """
        if self._members.rank != 0:
            return
        with suppress(OSError):
            ours = {stream.fileno() for stream in self._connections.streams.values()}
            connections = descriptors_at(self._service, but=ours)
            start_apart(["-c", _HOLD, str(GRACE_S), *map(str, connections)], connections, subprocess.DEVNULL)

    @property
    def _grace_s(self) -> float:
        """Time for the main thread to end with its own error, which shows its current line."""
        if self._operations.has_left:
            return 0.0
        return _GRACE_IN_STEP_S if self._operations.depth else GRACE_S


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
