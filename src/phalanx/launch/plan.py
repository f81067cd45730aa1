# SPDX-License-Identifier: Apache-2.0
"""From what `phalanx run` was asked to the processes that it starts. Pure, but for `Machine.this` and `free_ports`."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.cluster.spec import ClusterSpec, Task, tf_config
from phalanx.errors import InvalidArgumentError

LOOPBACK = "127.0.0.1"
JOB = "worker"


@dataclass(frozen=True)
class Request:
    """What to run, and as how many processes.

    Args:
      target: the path of a script, or the name of a module.
      arguments: what the script gets.
      is_module: whether `target` is a module, as after `python -m`.
      workers: how many processes.
      devices_per_worker: how many devices each of them has; None leaves it to the machine and the environment.

    Raises:
      InvalidArgumentError: fewer than one worker or device.

    Example:
      >>> Request("train.py", ("--lr", "0.1"), workers=2).command("python")
      ('python', 'train.py', '--lr', '0.1')
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    workers: int = 1
    devices_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InvalidArgumentError(f"workers={self.workers}", "there is at least one.", "--workers 2")
        if self.devices_per_worker is not None and self.devices_per_worker < 1:
            raise InvalidArgumentError(
                f"devices_per_worker={self.devices_per_worker}",
                "a worker has at least one device.",
                "--devices-per-worker 1",
            )

    def command(self, python: str) -> tuple[str, ...]:
        """Returns the words of the command that runs it."""
        return (python, *(["-m"] if self.is_module else []), self.target, *self.arguments)

    def check_script(self) -> None:
        """Makes sure that the script is there, for as many processes would say the same that it is not.

        Raises:
          InvalidArgumentError: there is no such file, or it may not be read.
        """
        if self.is_module:
            return
        if not Path(self.target).exists():
            raise InvalidArgumentError(
                f"script={self.target!r}", f"there is no such file in {Path.cwd()}.", "phalanx run -m package.module"
            )
        if not os.access(self.target, os.R_OK):
            raise InvalidArgumentError(
                f"script={self.target!r}", "this user may not read it.", f"chmod u+r {self.target}"
            )


@dataclass(frozen=True)
class Machine:
    """What the workers share.

    Args:
      cores: how many this process may use.
      gpus: their names, as in CUDA_VISIBLE_DEVICES.
    """

    cores: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def this(cls, environment: Mapping[str, str]) -> Self:
        """Returns this machine, as far as the environment shows it to JAX."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return cls(cores, _visible_gpus(environment))


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    Args:
      rank: its place among all, from 0.
      task: its place in the cluster.
      argv: its command.
      environment: its whole environment.
    """

    rank: int
    task: Task
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """What output and reports call it."""
        return f"{self.task.type} {self.task.index}"


def plan(
    request: Request, machine: Machine, environment: Mapping[str, str], ports: Sequence[int], *, restart: int = 0
) -> list[ProcessSpec]:
    """Returns the processes to start; what `environment` sets wins, except for what makes them one cluster.

    Args:
      request: what to run.
      machine: what the workers share.
      environment: that of the launcher.
      ports: one for each worker.
      restart: how often the group was started before.

    Raises:
      InvalidArgumentError: the machine has too few GPUs, or the environment asks for another number of devices.

    Example:
      >>> first, second = plan(Request("train.py", workers=2), Machine(cores=8), {}, [4001, 4002])
      >>> second.environment["NPROC"]
      '4'
      >>> print(second.environment["TF_CONFIG"])
      {"cluster": {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}, "task": {"type": "worker", "index": 1}}
    """
    spec = ClusterSpec({JOB: [f"{LOOPBACK}:{port}" for port in ports]})
    devices = _device_settings(request, machine, environment)
    processes = []
    for rank in range(request.workers):
        task = Task(JOB, rank)
        cluster = {"TF_CONFIG": tf_config(spec, task), "PHALANX_RESTART": str(restart)}
        variables = {**_readable_output(), **devices[rank], **environment, **_gpus_of(devices[rank]), **cluster}
        processes.append(ProcessSpec(rank, task, request.command(sys.executable), variables))
    return processes


def thread_pool(devices: int, cores: int, workers: int) -> int:
    """Returns NPROC, the size of XLA's thread pool on CPUs, for each of `workers` processes.

    Fewer than two threads a device deadlock, once there are several; one device is fastest with its share of the cores.

    Example:
      >>> thread_pool(2, cores=16, workers=2), thread_pool(1, cores=16, workers=2), thread_pool(1, cores=2, workers=4)
      (4, 8, 1)
    """
    return 2 * devices if devices > 1 else max(1, cores // workers)


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine at which nothing listens; they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def _readable_output() -> dict[str, str]:
    """Lines come when they are printed, and a process that crashes says where."""
    return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _device_settings(request: Request, machine: Machine, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns for each worker the variables that give it its devices and threads."""
    if machine.gpus:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in _shares_of_gpus(request, machine.gpus)]
    devices = _cpu_devices(request, environment)
    threads = thread_pool(devices, machine.cores, request.workers)
    return [{"PHALANX_CPU_DEVICES": str(devices), "NPROC": str(threads)}] * request.workers


def _gpus_of(settings: dict[str, str]) -> dict[str, str]:
    """A worker's share of the GPUs that the environment shows."""
    return {name: value for name, value in settings.items() if name == "CUDA_VISIBLE_DEVICES"}


def _cpu_devices(request: Request, environment: Mapping[str, str]) -> int:
    asked, found = request.devices_per_worker, environment.get("PHALANX_CPU_DEVICES")
    if not found:
        return asked or 1
    if not found.isdecimal() or int(found) < 1 or asked not in (None, int(found)):
        raise InvalidArgumentError(
            f"devices_per_worker={asked}",
            f"the environment sets PHALANX_CPU_DEVICES={found!r}.",
            "unset PHALANX_CPU_DEVICES",
        )
    return int(found)


def _shares_of_gpus(request: Request, gpus: Sequence[str]) -> list[Sequence[str]]:
    each = request.devices_per_worker or max(1, len(gpus) // request.workers)
    if each * request.workers > len(gpus):
        raise InvalidArgumentError(
            f"workers={request.workers}, {each} GPU(s) each",
            f"this machine shows {len(gpus)}: {', '.join(gpus)}.",
            "JAX_PLATFORMS=cpu phalanx run ... to try it without",
        )
    return [gpus[rank * each : (rank + 1) * each] for rank in range(request.workers)]


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What JAX would see, by the files of NVIDIA's driver: asking JAX takes seconds and a share of the memory."""
    platforms = environment.get("JAX_PLATFORMS") or "cuda"
    if not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles"))
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted(numbers, key=int))
