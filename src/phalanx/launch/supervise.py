# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a group, forwards their output, and ends all of them when one fails."""

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from phalanx.cluster.guard import Guard
from phalanx.errors import PhalanxError, StartupError
from phalanx.launch.outcome import Outcome, report
from phalanx.launch.output import Sink, Stream, wait
from phalanx.launch.plan import ProcessSpec
from phalanx.launch.processes import WorkerProcess, guard, strays, tell_all
from phalanx.launch.signals import Signals

_TICK_S = 0.05
_LONGEST_WAIT_S = 1.0
_DRAIN_S = 1.0
_WORD_S = 2.0


def run_group(
    plan: Callable[[int], Sequence[ProcessSpec]],
    *,
    max_restarts: int = 0,
    grace_s: float = 5.0,
    sink: Sink | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Runs a group of processes to its end, and restarts it if one of them fails.

    Args:
      plan: function from the number of earlier starts to the processes to start.
      max_restarts: how often to restart the group.
      grace_s: time that processes have to end after SIGTERM, in seconds.
      sink: receives the output of the processes. None means the standard output.
      say: receives the reports.

    Returns:
      The outcome of the last run.

    Raises:
      StartupError: a process cannot be started.
    """
    sink = sink or Sink(1)
    with Signals() as signals:
        for restart in range(max_restarts + 1):
            outcome = supervise(plan(restart), signals, sink, grace_s=grace_s)
            if text := report(outcome):
                say(text)
            if outcome.culprit is None or outcome.signal is not None or restart == max_restarts:
                break
            say(f"The group starts again: {restart + 1} of {max_restarts}.")
    return outcome


def supervise(specs: Sequence[ProcessSpec], signals: Signals, sink: Sink, *, grace_s: float) -> Outcome:
    """Runs a group of processes once, until all of them have ended.

    Args:
      specs: the processes to start.
      signals: the signals that this process receives in the meantime.
      sink: receives the output of the processes.
      grace_s: time that processes have to end after SIGTERM, in seconds.

    Returns:
      The outcome of the group.

    Raises:
      StartupError: a process cannot be started. The others have been ended.
    """
    group = _Group(specs, signals, sink)
    try:
        group.start()
        group.run()
    finally:
        group.end(grace_s)
    return group.outcome()


@final
class _Group:
    """The processes of one run."""

    def __init__(self, specs: Sequence[ProcessSpec], signals: Signals, sink: Sink) -> None:
        self._specs, self._signals, self._sink = specs, signals, sink
        self._mark = secrets.token_hex(16)
        self._started_s = time.monotonic()
        self._workers: list[WorkerProcess] = []
        self._guard: Guard | None = None

    def start(self) -> None:
        """Starts all processes."""
        for spec in self._specs:
            try:
                self._workers.append(WorkerProcess(spec, self._mark, self._started_s))
            except OSError as error:
                raise StartupError(
                    f"the command of {spec.name}: {' '.join(spec.argv)}", f"cannot be started: {error}."
                ) from error
        # The guard only matters if this process is killed, so the workers can run without it.
        with suppress(OSError):
            self._guard = guard(self._workers, self._mark)

    def run(self) -> None:
        """Forwards output until a process fails, all have ended, a signal arrives, or the output cannot be written."""
        while (alive := self._alive()) and not self._is_over(alive):
            self._pass_output(_LONGEST_WAIT_S)

    def end(self, grace_s: float) -> None:
        """Ends the remaining processes and forwards their last lines.

        Sends SIGTERM first, and SIGKILL after `grace_s` or a second signal.
        """
        # If a process has failed, the others first get time to report which one they miss.
        word_s = 0.0 if self._signals.first is not None else min(_WORD_S, grace_s)
        tell_s = time.monotonic() + word_s
        deadline_s = tell_s + grace_s
        is_told = False
        while self._alive() or strays(self._mark, self._workers):
            if time.monotonic() >= deadline_s or self._signals.is_urgent:
                tell_all(signal.SIGKILL, self._mark, self._workers)
            elif not is_told and (self._signals.first is not None or time.monotonic() >= tell_s):
                tell_all(signal.SIGTERM, self._mark, self._workers)
                # A stopped process would not handle SIGTERM.
                tell_all(signal.SIGCONT, self._mark, self._workers)
                is_told = True
            self._pass_output(_TICK_S)
        if self._guard:
            self._guard.release()
        self._drain(grace_s)

    def outcome(self) -> Outcome:
        """Returns the outcome, once all processes have ended.

        Raises:
          PhalanxError: the output of the workers could not be written.
        """
        error, number = self._sink.error, self._signals.first
        if isinstance(error, BrokenPipeError):
            number = number or signal.SIGPIPE
        elif error is not None:
            raise PhalanxError("the output of the workers", f"cannot be written: {error}. They have been ended.")
        return Outcome(tuple(worker.ending() for worker in self._workers), number)

    def _alive(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.is_alive]

    def _is_over(self, alive: list[WorkerProcess]) -> bool:
        has_failed = any(worker.has_failed for worker in self._workers if worker not in alive)
        return has_failed or self._signals.first is not None or self._sink.error is not None

    def _open_streams(self) -> list[Stream]:
        return [stream for worker in self._workers for stream in worker.streams if stream.is_open]

    def _pass_output(self, timeout_s: float) -> bool:
        """Waits for output or a signal, and forwards the output. Returns whether there was any."""
        # If the reader of the output is slow, the workers wait, as they would without a launcher.
        streams = [] if self._sink.is_full else self._open_streams()
        readers = [self._signals.fileno, *(stream.fileno for stream in streams)]
        ready = wait(readers, [] if self._sink.is_empty else [self._sink.fd], timeout_s=timeout_s)
        if self._signals.fileno in ready:
            self._signals.clear()
        readable = [stream for stream in streams if stream.fileno in ready]
        for stream in readable:
            self._sink.put(stream.read())
        self._sink.write()
        return bool(readable)

    def _drain(self, patience_s: float) -> None:
        """Forwards the rest of the output and closes the pipes, even if an unknown process still holds them."""
        started_s = moved_s = time.monotonic()
        while self._open_streams() or not self._sink.is_empty:
            if self._pass_output(_TICK_S) or not self._sink.is_empty:
                moved_s = time.monotonic()
            is_too_late = self._signals.first is not None and time.monotonic() - started_s > patience_s
            if is_too_late or time.monotonic() - moved_s > _DRAIN_S:
                break
        for stream in self._open_streams():
            self._sink.put(stream.close())
        self._sink.write()
