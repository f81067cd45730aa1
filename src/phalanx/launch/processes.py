# SPDX-License-Identifier: Apache-2.0
"""The processes of a group, those that they start, and how none of them is left."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from phalanx.cluster.guard import Guard, marked
from phalanx.launch.outcome import Ending
from phalanx.launch.output import Stream, kept_lines
from phalanx.launch.plan import ProcessSpec

_MARK = "PHALANX_LAUNCH"


@final
class Worker:
    """One process that was started, in a session of its own, so that signals reach what it starts too."""

    def __init__(self, spec: ProcessSpec, mark: str, started_s: float) -> None:
        self.spec, self._started_s = spec, started_s
        self._process = subprocess.Popen(
            spec.argv,
            env={**spec.environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout
        assert self._process.stderr
        prefix, self._kept = f"[{spec.name}] ", kept_lines()
        # Two pipes: with one, a line of either stream could stand in the middle of one of the other.
        self.streams = [
            Stream(self._process.stdout, prefix, self._kept, is_error=False),
            Stream(self._process.stderr, prefix, self._kept, is_error=True),
        ]
        self._after_s: float | None = None
        self._is_told = self._is_stopped = False

    @property
    def pid(self) -> int:
        """Its number, and that of its group of processes."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended. What it ended with is noted by this."""
        if self._after_s is None and self._process.poll() is not None:
            self._after_s = time.monotonic() - self._started_s
        return self._after_s is None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with anything but 0."""
        return bool(self._process.returncode)

    def tell(self, number: int) -> None:
        """Sends a signal to it and to its group."""
        if not self._is_told:
            self._is_told, self._is_stopped = True, _is_stopped(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ending(self) -> Ending:
        """How it ended."""
        return Ending(
            self.spec.name,
            self._process.returncode,
            self._after_s or 0.0,
            is_told=self._is_told,
            is_stopped=self._is_stopped,
            last=tuple(self._kept),
        )


def guard(workers: Sequence[Worker], mark: str) -> Guard:
    """Starts what kills the workers, and all that they have started, if the launcher is killed itself."""
    return Guard(f"{_MARK}={mark}", groups=[worker.pid for worker in workers])


def strays(mark: str, workers: Sequence[Worker]) -> list[int]:
    """Returns the processes that workers with this mark have started, in whatever session, and that still run."""
    known = {worker.pid for worker in workers}
    return [pid for pid in marked(f"{_MARK}={mark}") if pid not in known]


def tell_all(number: int, mark: str, workers: Sequence[Worker]) -> None:
    """Sends a signal to the workers that are alive, and to all that workers with this mark have started."""
    alive = [worker for worker in workers if worker.is_alive]
    for worker in alive:
        worker.tell(number)
    groups = {worker.pid for worker in alive}
    for pid in strays(mark, workers):
        # One that ends meanwhile needs no signal; one of a group has got it.
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) not in groups:
                os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    """Whether a child stands still, by SIGSTOP."""
    if sys.platform != "linux":
        return False
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
