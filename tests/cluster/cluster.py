"""Several processes on this machine that are the workers of one cluster, and do what the test tells them."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from tests import forks

from phalanx._src.launch.plan import free_ports

_HERE = Path(__file__).resolve().parent
_ROOMS = ("contract", "hub", "sources")
_OF_THIS_PROCESS = ("NPROC", "PHALANX_CPU_DEVICES")
_START_S = 300.0


class ClusterError(RuntimeError):
    """A worker died or was late. Its log says why."""


class Cluster:
    """Workers that run the functions of a module; all of them the same one at a time.

    Args:
      workers: how many processes.
      devices: how many CPU devices each of them has.
      tasks: the name of the module.
    """

    def __init__(self, workers: int, devices: int, tasks: str = "tasks") -> None:
        self.workers, self.devices, self._tasks = workers, devices, tasks
        self._processes: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._logs: list[Any] = []

    def __enter__(self) -> Self:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(self.workers)]
        for index in range(self.workers):
            self._start(index, addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        for closable in (*self._pipes, *self._logs):
            closable.close()

    def call(self, task: str, deadline_s: float = 300.0, **kwargs: Any) -> list[Any]:
        """Calls `<task>(strategy, **kwargs)` of the module in every worker, and returns what each of them returned.

        An exception there is returned as the text "Class: message".

        Raises:
          ClusterError: a worker died, or took longer than it may.
        """
        for pipe in self._pipes:
            pipe.send((task, kwargs))
        return self._replies(deadline_s, f"{task}({kwargs})")

    @property
    def is_alive(self) -> bool:
        """Whether all workers are still there."""
        return all(process.poll() is None for process in self._processes)

    def _start(self, index: int, addresses: list[str]) -> None:
        ours, theirs = multiprocessing.Pipe()
        log = tempfile.TemporaryFile("a+")  # noqa: SIM115
        path = filter(None, [os.environ.get("PYTHONPATH")])
        one_device = {"NPROC": str(max(1, (os.cpu_count() or 1) // self.workers))}
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THIS_PROCESS} | {
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}),
            "PYTHONPATH": os.pathsep.join(map(str, (_HERE, *(_HERE.parent / name for name in _ROOMS), *path))),
            **(one_device if self.devices == 1 else {"PHALANX_CPU_DEVICES": str(self.devices)}),
        }
        command = [sys.executable, _HERE / "worker.py", theirs.fileno(), self._tasks]
        self._processes.append(
            forks.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log, pass_fds=[theirs.fileno()])
        )
        theirs.close()
        self._pipes.append(ours)
        self._logs.append(log)

    def wait_until_ready(self) -> None:
        """Waits until all workers have found each other."""
        self._replies(_START_S, "the start")

    def _replies(self, deadline_s: float, what: str) -> list[Any]:
        deadline, replies = time.monotonic() + deadline_s, {}
        while waiting := [pipe for pipe in self._pipes if pipe not in replies]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(waiting[0], f"is late in {what}")
            for pipe in ready:
                try:
                    replies[pipe] = pipe.recv()
                except (EOFError, ConnectionError) as e:
                    raise self._failure(pipe, f"has died in {what}") from e
        return [replies[pipe] for pipe in self._pipes]

    def _failure(self, pipe: Any, problem: str) -> ClusterError:
        """Ends all workers, for those that are left would wait for each other."""
        self._kill_all()
        return ClusterError(f"worker {self._pipes.index(pipe)} of {self.workers} {problem}")

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def logs(self) -> str:
        """What the workers have printed last."""
        for log in self._logs:
            log.seek(0)
        return "\n".join(f"--- worker {i} of {self.workers}:\n{log.read()[-4000:]}" for i, log in enumerate(self._logs))
