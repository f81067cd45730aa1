# SPDX-License-Identifier: Apache-2.0
"""Processes that are started together, and end together."""

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx._src.cluster.processes.guard import Guard
from phalanx._src.launch.outcome import Ending
from phalanx._src.launch.output import Stream
from phalanx._src.launch.plan import ProcessSpec
from phalanx._src.launch.processes import AbstractWorkerProcess, WorkerProcess, guard, strays, tell_all
from phalanx._src.launch.relay import LONGEST_WAIT_S, TICK_S, Relay
from phalanx.errors import StartupError

_DRAIN_S = 1.0


Start = Callable[[ProcessSpec, str, float], AbstractWorkerProcess]
"""Starts a process. It gets the mark of the group, and the time at which the group was started."""


class Group:
    """The processes of one start.

    Args:
      specs: the processes to start.
      relay: forwards their output.
      beside: function to call again and again while the group runs and ends, to look after other processes.
      start: starts a process.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        relay: Relay,
        beside: Callable[[], None] = lambda: None,
        start: Start = WorkerProcess,
    ) -> None:
        self._specs, self._relay, self._beside, self._start_process = specs, relay, beside, start
        self._mark = secrets.token_hex(16)
        self._started_s = time.monotonic()
        self._told_s: float | None = None
        self._workers: list[AbstractWorkerProcess] = []
        self._guard: Guard | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a process of the group is running."""
        return bool(self._alive())

    @property
    def has_failed(self) -> bool:
        """Whether a process of the group has ended with an exit code other than 0."""
        return any(not worker.is_alive and worker.has_failed for worker in self._workers)

    @property
    def unfinished(self) -> str:
        """Why the training has ended before its end, if that was not the failure of a process of this launcher."""
        return ""

    def start(self) -> None:
        """Starts all processes.

        Raises:
          StartupError: a process cannot be started.
        """
        # The guard only matters if this process is killed, so the workers can run without it.
        with suppress(OSError):
            self._guard = guard(self._mark)
        for spec in self._specs:
            # If one cannot be started, `end` finds those before it here.
            self._workers.append(self._started(spec))

    def run(self) -> None:
        """Forwards output until a process fails, all have ended, a signal arrives, or the output cannot be written."""
        while self.is_alive and not self.has_failed and not self._relay.is_interrupted:
            self._turn(LONGEST_WAIT_S)

    def tell(self) -> None:
        """Sends SIGTERM to all processes, once."""
        if self._told_s is None:
            self._told_s = time.monotonic()
            tell_all(signal.SIGTERM, self._mark, self._workers)
            # A stopped process would not handle SIGTERM.
            tell_all(signal.SIGCONT, self._mark, self._workers)

    def end(self, grace_s: float, word_s: float = 0.0) -> None:
        """Ends the remaining processes and forwards their last lines.

        Sends SIGTERM first, and SIGKILL after `grace_s` or a second signal.

        Args:
          grace_s: time from SIGTERM to SIGKILL, in seconds.
          word_s: time before SIGTERM, in seconds. There is none after a signal.
        """
        tell_s = time.monotonic() + (0.0 if self._relay.signals.first is not None else word_s)
        while self._alive() or strays(self._mark, self._workers):
            now_s = time.monotonic()
            deadline_s = grace_s + (tell_s if self._told_s is None else self._told_s)
            if now_s >= deadline_s or self._relay.signals.is_urgent:
                tell_all(signal.SIGKILL, self._mark, self._workers)
            elif self._relay.signals.first is not None or now_s >= tell_s:
                self.tell()
            self._turn(TICK_S)
        if self._guard:
            self._guard.release()
        self._drain(grace_s)
        self._relay.flush(grace_s)

    def endings(self) -> tuple[Ending, ...]:
        """Returns how the processes ended, once all have."""
        return tuple(worker.ending() for worker in self._workers)

    def _started(self, spec: ProcessSpec) -> AbstractWorkerProcess:
        """Starts a process, and returns it."""
        try:
            process = self._start_process(spec, self._mark, self._started_s)
        except OSError as error:
            raise StartupError(
                f"the command of {spec.name}: {' '.join(spec.argv)}", f"cannot be started: {error}."
            ) from error
        if self._guard is not None:
            self._guard.watch(group for worker in (*self._alive(), process) for group in worker.groups)
        self._relay.add(process.streams)
        return process

    def _alive(self) -> list[AbstractWorkerProcess]:
        return [worker for worker in self._workers if worker.is_alive]

    def _turn(self, timeout_s: float) -> None:
        self._beside()
        self._relay.pass_output(timeout_s)

    def _open_streams(self) -> list[Stream]:
        return [stream for worker in self._workers for stream in worker.streams if stream.is_open]

    def _drain(self, patience_s: float) -> None:
        """Forwards the rest of the output and closes the pipes, even if an unknown process still holds them."""
        started_s = moved_s = time.monotonic()
        while streams := self._open_streams():
            has_moved = any(stream in streams for stream in self._relay.pass_output(TICK_S))
            # While a slow reader keeps the sink full, nothing is read, although more may be in the pipes.
            if has_moved or self._relay.sink.is_full:
                moved_s = time.monotonic()
            if self._relay.is_too_late(started_s, patience_s) or time.monotonic() - moved_s > _DRAIN_S:
                break
        for stream in self._open_streams():
            self._relay.sink.put(stream.close())
