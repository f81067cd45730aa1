# SPDX-License-Identifier: Apache-2.0
"""Runs the workers on the nodes of a Ray cluster: an actor per worker starts its process, and passes output and signals on."""

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Self, final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import reach
from phalanx._src.cluster.processes.owned import job_of_ray
from phalanx._src.cluster.processes.places import Places, cores_per_process, needs_gpus
from phalanx._src.cluster.resolvers.base import optional_module, start_timeout_s
from phalanx._src.launch.outcome import Ending
from phalanx._src.launch.output import Stream, kept_lines, wait
from phalanx._src.launch.plan import Machine, Machines, ProcessSpec, Request, free_ports, plan
from phalanx._src.launch.processes import AbstractWorkerProcess, WorkerProcess, guard, tell_all
from phalanx.errors import StartupError

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.2
_OF_LAUNCHER = re.compile(r"(JAX|KERAS|NCCL|PHALANX|XLA)_|(NPROC|PYTHONFAULTHANDLER|PYTHONUNBUFFERED|TF_CONFIG)$")
"""The variables whose value in the launcher counts, even if the node has others."""
_OF_NODE = re.compile(r"(CUDA_VISIBLE_DEVICES|PHALANX_SERVERS_FOLDER)$|RAY_")
"""The variables of the launcher that mean something else on another node."""


def environment_on_node(of_node: Mapping[str, str], of_launcher: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a worker: that of its node, with the variables of the launcher that the node does not have.

    Example:
      >>> environment_on_node({"PATH": "/bin", "NPROC": "1"}, {"PATH": "/opt", "NPROC": "4", "EPOCHS": "3", "RAY_JOB": "1"})
      {'PATH': '/bin', 'NPROC': '4', 'EPOCHS': '3'}
    """
    passed_on = {
        name: value
        for name, value in of_launcher.items()
        if not _OF_NODE.match(name) and (_OF_LAUNCHER.match(name) or name not in of_node)
    }
    return {**of_node, **passed_on}


class NodeHost:
    """The process of one worker, on its node. An actor of Ray."""

    def start(self, spec: ProcessSpec, mark: str, folder: str) -> int:
        """Starts the process, and returns its id.

        Args:
          spec: the process, with the environment of the launcher.
          mark: marks the process and those that it starts.
          folder: working directory, if this node has it.
        """
        with suppress(OSError):
            os.chdir(folder)
        # Python may have another path on this node than on that of the launcher.
        spec = replace(
            spec, argv=(sys.executable, *spec.argv[1:]), environment=environment_on_node(os.environ, spec.environment)
        )
        # Ray kills this process if the launcher, or what connects this node with it, is gone.
        self._guard = guard(mark)
        self._mark, self._process = mark, WorkerProcess(spec, mark, time.monotonic())
        self._guard.watch(self._process.groups)
        return self._process.pid

    def read(self) -> list[tuple[bool, bytes]] | int:
        """Waits for output. Returns pieces of it, each with whether it is of the error stream; at the end, the exit code."""
        while True:
            # Before the pipes: all that the process wrote before its end is in them then, and nothing is lost.
            has_ended = not self._process.is_alive
            open_streams = {stream.fileno: stream for stream in self._process.streams if stream.is_open}
            pieces = []
            for fd in wait(open_streams, (), timeout_s=0.0 if has_ended else _POLL_S):
                # Whole lines are made of it, with the name of the worker, in the launcher.
                if data := os.read(fd, _CHUNK_BYTES):
                    pieces.append((open_streams[fd] is self._process.streams[1], data))
                else:
                    open_streams[fd].close()
            if pieces:
                return pieces
            if has_ended:
                return self._process.ending().code

    def tell(self, number: int) -> None:
        """Sends a signal to the process and to all that it has started."""
        tell_all(number, self._mark, [self._process])


@final
class RayProcess(AbstractWorkerProcess):
    """A worker on a node of a Ray cluster. A node that is lost looks like a process that was killed.

    Args:
      spec: the process to start.
      mark: marks the process and those that it starts.
      started_s: when its group was started.
      nodes: the nodes.
    """

    def __init__(self, spec: ProcessSpec, mark: str, started_s: float, nodes: "RayNodes") -> None:
        self.spec, self._started_s, self._nodes = spec, started_s, nodes
        self._kept = kept_lines()
        # The relay waits for file descriptors, so what Ray brings goes through pipes of this process.
        pipes = [os.pipe(), os.pipe()]
        self._ends = [end for _, end in pipes]
        self.streams = [
            Stream(os.fdopen(pipe, "rb", buffering=0), f"[{spec.name}] ", self._kept, is_error=is_error)
            for is_error, (pipe, _) in zip((False, True), pipes, strict=True)
        ]
        self._pid: int | None = None
        self._code: int | None = None
        self._after_s, self._is_told = 0.0, False
        self._host = nodes.ray.remote(NodeHost).options(**nodes.options(spec.task.index)).remote()
        threading.Thread(target=self._follow, args=(mark,), name=f"phalanx-{spec.name}", daemon=True).start()

    @property
    @override
    def pid(self) -> int | None:
        return self._pid

    @property
    @override
    def groups(self) -> list[int]:
        return []

    @property
    @override
    def is_alive(self) -> bool:
        return self._code is None

    @property
    @override
    def has_failed(self) -> bool:
        return bool(self._code)

    @override
    def tell(self, number: int) -> None:
        self._is_told = True
        self._signal(number)

    @override
    def ending(self) -> Ending:
        rank, last = self.spec.task.index, tuple(self._kept)
        return Ending(self.spec.name, self._code or 0, self._after_s, is_told=self._is_told, rank=rank, last=last)

    @override
    def _signal(self, number: int) -> None:
        if self._pid is None:
            # It waits for its place, so nothing runs that could hear a signal.
            self._nodes.ray.kill(self._host, no_restart=True)
        else:
            self._host.tell.remote(number)

    def _follow(self, mark: str) -> None:
        """Starts the process, and passes its output on until it ends."""
        ray, code = self._nodes.ray, -signal.SIGKILL
        try:
            started = self._host.start.remote(self.spec, mark, os.getcwd())
            self._pid = ray.get(started, timeout=self._nodes.timeout_s)
            while not isinstance(said := ray.get(self._host.read.remote()), int):
                for is_error, data in said:
                    self._write(data, is_error=is_error)
            code = said
        except ray.exceptions.RayError as error:
            if not self._is_told:
                why = f"{error}".strip().partition("\n")[0]
                self._write(f"Phalanx: Ray has no process for {self.spec.name}: {why}\n".encode(), is_error=True)
        finally:
            # Before the code, by which the main thread sees that the process has ended.
            self._after_s = time.monotonic() - self._started_s
            self._code = code
            for end in self._ends:
                os.close(end)
            # Its place is free for the next process.
            ray.kill(self._host, no_restart=True)

    def _write(self, data: bytes, *, is_error: bool) -> None:
        """Writes to the pipe from which the launcher reads. Waits if it is full, as the process would."""
        with suppress(BrokenPipeError):  # The launcher has ended.
            while data:
                data = data[os.write(self._ends[is_error], data) :]


@final
class RayNodes:
    """The places of the workers on the nodes of a Ray cluster. A context manager.

    Each place has as many cores as all workers can have, and GPUs if the cluster has some. Ray makes a place again on another
    node if its node is lost.

    Args:
      address: address of the cluster, as for `ray.init`.
      request: the script to run and the number of workers.
      environment: environment of the launcher.

    Attributes:
      ray: the module.
      timeout_s: how long to wait for a place, in seconds.
      machines: this machine, at an address that the nodes reach.

    Raises:
      MissingDependencyError: Ray is not installed.
      StartupError: the cluster does not answer.
    """

    def __init__(self, address: str, request: Request, environment: Mapping[str, str]) -> None:
        self.ray = optional_module("ray", f"phalanx run --ray {address}", "ray")
        self._address, self._request, self._environment = address, request, environment
        self.timeout_s = start_timeout_s(environment)

    def __enter__(self) -> Self:
        try:
            # Ray itself tries for minutes, and says nothing that a user understands.
            if re.fullmatch(r"[^/]+:[0-9]+", self._address):
                self._try_connection()
            job = job_of_ray(self.ray)
            self.ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR, job_config=job)
        except (OSError, RuntimeError, ValueError) as e:
            raise StartupError(
                f"phalanx run --ray {self._address}",
                f"this cluster does not answer: {f'{e}'.strip().partition(chr(10))[0]}",
                "ray start --head on the first machine, and --ray auto there",
            ) from e
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        workers = self._request.workers
        cores = cores_per_process([int(node.get("CPU", 0)) for node in nodes], workers)
        gpus = self._gpus_per_worker(int(sum(node.get("GPU", 0) for node in nodes)))
        # As if all places were one machine, which `plan` divides. Workers keep the CUDA_VISIBLE_DEVICES of their actors.
        self._machine = Machine(cores * workers, tuple(map(str, range(gpus * workers))))
        self._places = Places(
            lambda: [("worker", {"CPU": cores, **({"GPU": gpus} if gpus else {})})] * workers,
            subject=f"phalanx run --ray {self._address} --workers {workers}",
            hint="ray status    shows who has them; ask for fewer workers, or end other jobs",
            timeout_s=self.timeout_s,
            is_packed=bool(gpus),
        )
        self.machines = Machines(addresses=(f"{self.ray.util.get_node_ip_address()}:{free_ports(1)[0]}",))
        return self

    def __exit__(self, *_: object) -> None:
        self._places.close()
        self.ray.shutdown()

    def plan(self, restart: int) -> list[ProcessSpec]:
        """Returns the processes to start, once all places are there.

        Raises:
          StartupError: the cluster has no place for a worker.
        """
        hosts, ports = zip(*self._places.ask(_address), strict=True)
        return plan(self._request, self._machine, self._environment, ports, hosts=hosts, restart=restart)

    def start(self, spec: ProcessSpec, mark: str, started_s: float) -> AbstractWorkerProcess:
        """Starts a process at its place. See `AbstractNodes`."""
        return RayProcess(spec, mark, started_s, self)

    def options(self, index: int) -> dict[str, object]:
        """Returns the options of an actor at the place of a worker."""
        # One thread waits for output, and another passes a signal on.
        return {**self._places.options(index), "max_concurrency": 2}

    def _try_connection(self) -> None:
        if (connection := reach(self._address, time.monotonic() + self.timeout_s)) is not None:
            connection.close()

    def _gpus_per_worker(self, gpus: int) -> int:
        if not gpus or not needs_gpus(self._environment):
            return 0
        return self._request.devices_per_worker or max(1, gpus // self._request.workers)


def _address() -> tuple[str, int]:
    """Returns the address of this node, and a free port."""
    util = optional_module("ray.util", "phalanx run --ray", "ray")
    return util.get_node_ip_address(), free_ports(1)[0]
