# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a group, and signals them and all processes that they have started."""

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from typing_extensions import override

from phalanx._src.cluster.processes.guard import Guard, marked
from phalanx._src.launch.outcome import Ending
from phalanx._src.launch.output import Stream, kept_lines
from phalanx._src.launch.plan import ProcessSpec

MARK = "PHALANX_LAUNCH"
"""The variable that marks the processes of a group, which end with it."""


class AbstractWorkerProcess(ABC):
    """A process of a group.

    Attributes:
      spec: what was started.
      streams: its output and its error stream.
    """

    spec: ProcessSpec
    streams: list[Stream]

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The id of the process. None before it has started."""

    @property
    @abstractmethod
    def groups(self) -> list[int]:
        """Its process group, if that is one of this machine."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the process is running. Records its exit code and end time once it has ended."""

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """Whether the process has ended with an exit code other than 0."""

    @abstractmethod
    def tell(self, number: int) -> None:
        """Sends a signal to the process and its group."""

    def kill(self) -> None:
        """Kills the process and its group, as if it had failed."""
        self._signal(signal.SIGKILL)

    @abstractmethod
    def _signal(self, number: int) -> None:
        """Sends a signal, whatever it means for the end of the process."""

    @abstractmethod
    def ending(self) -> Ending:
        """Returns how the process ended."""


@final
class WorkerProcess(AbstractWorkerProcess):
    """A process of this machine in its own session, so that signals reach its child processes too."""

    def __init__(self, spec: ProcessSpec, mark: str, started_s: float) -> None:
        self.spec, self._started_s = spec, started_s
        self._process = subprocess.Popen(
            spec.argv,
            env={**spec.environment, MARK: mark},
            # Several processes that read one terminal would each get a part of what is typed.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # `poll` would not see what Python has read ahead.
            start_new_session=True,
        )
        assert self._process.stdout
        assert self._process.stderr
        prefix, self._kept = f"[{spec.name}] ", kept_lines()
        # Two pipes: with a shared one, lines of the two streams could be mixed.
        self.streams = [
            Stream(self._process.stdout, prefix, self._kept, is_error=False),
            Stream(self._process.stderr, prefix, self._kept, is_error=True),
        ]
        self._after_s: float | None = None
        self._is_told = self._is_stopped = False

    @property
    @override
    def pid(self) -> int:
        return self._process.pid

    @property
    @override
    def groups(self) -> list[int]:
        return [self.pid]

    @property
    @override
    def is_alive(self) -> bool:
        if self._after_s is None and self._process.poll() is not None:
            # The order of these times decides who failed first. SIGCHLD wakes the launcher, so they are close to the ends.
            self._after_s = time.monotonic() - self._started_s
        return self._after_s is None

    @property
    @override
    def has_failed(self) -> bool:
        return bool(self._process.returncode)

    @override
    def tell(self, number: int) -> None:
        if not self._is_told:
            self._is_told, self._is_stopped = True, _is_stopped(self.pid)
        self._signal(number)

    @override
    def ending(self) -> Ending:
        return Ending(
            self.spec.name,
            self._process.returncode,
            self._after_s or 0.0,
            is_told=self._is_told,
            is_stopped=self._is_stopped,
            rank=self.spec.task.index,
            last=tuple(self._kept),
        )

    @override
    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def guard(mark: str) -> Guard:
    """Starts a guard that kills workers with this mark and all processes that they have started, if the launcher is killed."""
    return Guard(f"{MARK}={mark}")


def strays(mark: str, workers: Sequence[AbstractWorkerProcess]) -> list[int]:
    """Returns the running processes that workers with this mark have started, in any session."""
    known = {worker.pid for worker in workers}
    return [pid for pid in marked(f"{MARK}={mark}") if pid not in known]


def tell_all(number: int, mark: str, workers: Sequence[AbstractWorkerProcess]) -> None:
    """Sends a signal to the running workers, and to all processes that workers with this mark have started."""
    alive = [worker for worker in workers if worker.is_alive]
    for worker in alive:
        worker.tell(number)
    groups = {worker.pid for worker in alive}
    for pid in strays(mark, workers):
        # The process may have ended. Members of a worker's group have received the signal already.
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) not in groups:
                os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    """Returns whether a child process is stopped by SIGSTOP."""
    if sys.platform != "linux":
        return False
    # WNOWAIT leaves the report in place, so that a later call gets it too.
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
