# SPDX-License-Identifier: Apache-2.0
"""Plans the processes that `phalanx run` starts. All functions are pure except `Machine.this`."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Self

from phalanx._src.cluster.connections.hosts import LOOPBACK
from phalanx._src.cluster.connections.ports import held_ports
from phalanx._src.cluster.spec import MOST_TASKS, ClusterSpec, Task, addresses_of_workers, id_in_cluster, tf_config
from phalanx._src.cluster.watch import membership
from phalanx.errors import InvalidArgumentError, arguments

JOB = "worker"
EVALUATOR = Task("evaluator", 0)
"""The process that does not train, and evaluates what the others save."""


@dataclass(frozen=True)
class Machines:
    """The machines of an elastic group, on each of which `phalanx run` starts a share of the workers.

    Args:
      index: index of this machine.
      addresses: `host:port` of each machine, at which it listens while it holds the rendezvous. Empty for a free port that only this machine can reach.
      leader: index of the machine that holds the rendezvous first.
    """

    index: int = 0
    addresses: tuple[str, ...] = ()
    leader: int = 0

    @classmethod
    def of(cls, spec: ClusterSpec, task: Task) -> Self:
        """Returns the machines of a cluster that has one task per machine."""
        return cls(id_in_cluster(spec, task), tuple(addresses_of_workers(spec)))

    @property
    def count(self) -> int:
        """The number of machines."""
        return max(1, len(self.addresses))

    def share(self, workers: int) -> int:
        """Returns how many of the workers run on each machine.

        Raises:
          InvalidArgumentError: the machines cannot have the same number.
        """
        if workers % self.count:
            raise InvalidArgumentError(
                f"workers={workers} on {self.count} machines",
                "each machine runs the same number of workers.",
                f"--workers {self.count}:{(workers // self.count + 1) * self.count}",
            )
        return workers // self.count


ALONE = Machines()
"""This machine alone."""


@dataclass(frozen=True)
class Request:
    """The script to run and the number of processes.

    Args:
      target: path of a script, or name of a module.
      arguments: command line arguments of the script.
      is_module: whether `target` is a module, as after `python -m`.
      workers: number of processes.
      least_workers: number of processes without which the group cannot continue. None if no process may be lost.
      devices_per_worker: number of devices per process. With None, the machine and the environment decide.
      evaluator: whether to start an evaluator alongside the workers.

    Raises:
      InvalidArgumentError: there is less than one worker, or less than one device per worker.

    Example:
      >>> Request("train.py", ("--lr", "0.1"), workers=2).command("python")
      ('python', 'train.py', '--lr', '0.1')
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    workers: int = 1
    least_workers: int | None = None
    devices_per_worker: int | None = None
    evaluator: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_TASKS:
            problem = f"there must be at {'least one worker' if self.workers < 1 else f'most {MOST_TASKS} workers'}."
            raise InvalidArgumentError(f"workers={self.workers}", problem, "--workers 2")
        if self.least_workers is not None and not 1 <= self.least_workers <= self.workers:
            raise InvalidArgumentError(
                f"workers={self.least_workers}:{self.workers}",
                "the minimum must be at least 1 and at most the maximum.",
                f"--workers {min(max(1, self.least_workers), self.workers)}:{max(self.least_workers, self.workers)}",
            )
        if self.devices_per_worker is not None and self.devices_per_worker < 1:
            raise InvalidArgumentError(
                f"devices_per_worker={self.devices_per_worker}",
                "a worker must have at least one device.",
                "--devices-per-worker 1",
            )

    @property
    def processes(self) -> int:
        """The number of processes that share the cores."""
        return self.workers + self.evaluator

    def command(self, python: str) -> tuple[str, ...]:
        """Returns the command line that runs the script."""
        # A module of Phalanx imports nothing from the current folder, which may be another user's.
        options = [*(["-P"] if self.target.startswith("phalanx.") else []), "-m"] if self.is_module else []
        # Python would take the name of a script for an option.
        target = f"./{self.target}" if self.target.startswith("-") and not self.is_module else self.target
        return (python, *options, target, *self.arguments)

    def on(self, machines: Machines) -> Self:
        """Returns the part of the request for one of several machines. The evaluator is on the first.

        Raises:
          InvalidArgumentError: the machines cannot have the same number of workers.
        """
        evaluator = self.evaluator and machines.index == 0
        return replace(self, workers=machines.share(self.workers), least_workers=None, evaluator=evaluator)

    def check_script(self) -> None:
        """Checks that the script exists and can be read, so that the launcher reports it once instead of every worker.

        Raises:
          InvalidArgumentError: the current folder is gone, or the file or the module does not exist, or cannot be read.
        """
        try:
            os.getcwd()
        except OSError as e:
            raise InvalidArgumentError("the current folder", f"it cannot be used: {e.strerror}.", "cd $HOME") from e
        if self.is_module:
            self._check_module()
            return
        if not os.path.exists(self.target):
            raise InvalidArgumentError(
                f"script={self.target!r}", f"there is no such file in {Path.cwd()}.", "phalanx run -m package.module"
            )
        # /dev/stdin may be a file, but workers have another input.
        is_shared = not self.target.startswith(("/dev/", "/proc/"))
        if not (is_shared and (os.path.isfile(self.target) or os.path.isdir(self.target))):
            raise InvalidArgumentError(
                f"script={self.target!r}",
                "it is not a file, from which each worker can read the script.",
                "cat > train.py, and phalanx run train.py",
            )
        if not os.access(self.target, os.R_OK):
            raise InvalidArgumentError(
                f"script={self.target!r}", "this user may not read it.", f"chmod u+r {shlex.quote(self.target)}"
            )
        if os.path.isdir(self.target) and not os.path.exists(os.path.join(self.target, "__main__.py")):
            raise InvalidArgumentError(
                f"script={self.target!r}",
                "it is a folder without __main__.py.",
                f"phalanx run {shlex.quote(os.path.join(self.target, 'train.py'))}",
            )

    def _check_module(self) -> None:
        # Only the first part: to find the others, Python would have to import it.
        name = self.target.partition(".")[0]
        if not name or (importlib.util.find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])) is None:
            raise InvalidArgumentError(
                f"-m {self.target}",
                f"Python finds no module {name!r} here or in {Path.cwd()}.",
                "phalanx run train.py, or the name of an installed module",
            )


@dataclass(frozen=True)
class Machine:
    """The cores and GPUs that the workers share.

    Args:
      cores: number of cores that this process may use.
      gpus: names of the GPUs, as in CUDA_VISIBLE_DEVICES.
    """

    cores: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def this(cls, environment: Mapping[str, str]) -> Self:
        """Returns this machine, with the GPUs that the environment makes visible to JAX."""
        # Slurm binds a task to some of the cores of its node.
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return cls(cores, _visible_gpus(environment))


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    Args:
      task: its task in the cluster.
      argv: its command line.
      environment: its complete environment.
    """

    task: Task
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of the process in output and reports."""
        return f"{self.task.type} {self.task.index}"


def plan(
    request: Request,
    machine: Machine,
    environment: Mapping[str, str],
    ports: Sequence[int],
    *,
    hosts: Sequence[str] | None = None,
    restart: int = 0,
) -> list[ProcessSpec]:
    """Returns the processes to start: the workers and, if the request has one, the evaluator.

    Variables in `environment` win, except for TF_CONFIG and the share of the GPUs. PHALANX_RESTART is added: a scheduler that starts
    the launcher again has counted its own starts there. The evaluator has one
    device, whatever the environment says. It is no member of the cluster, but TF_CONFIG tells it the addresses of the workers.

    Args:
      request: the script to run and the number of processes.
      machine: the cores and GPUs that the workers share.
      environment: environment of the launcher.
      ports: one port per worker.
      hosts: one host per worker. None for this machine.
      restart: how often the group was started before.

    Raises:
      InvalidArgumentError: the machine has too few GPUs, the environment sets another number of devices, or PHALANX_RESTART is not a number.

    Example:
      >>> first, second = plan(Request("train.py", workers=2), Machine(cores=8), {}, [4001, 4002])
      >>> second.environment["NPROC"]
      '4'
      >>> print(second.environment["TF_CONFIG"])
      {"cluster": {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}, "task": {"type": "worker", "index": 1}}
    """
    restart += _earlier_restarts(environment)
    # A member of an elastic group may start a group.
    environment = {name: value for name, value in environment.items() if name not in membership.VARIABLES}
    hosts = hosts or [LOOPBACK] * len(ports)
    spec = ClusterSpec({JOB: [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]})
    devices = _device_settings(request, machine, environment)
    # The user's CUDA_VISIBLE_DEVICES names the GPUs of all workers, so here the share of each wins.
    settings = [({**device, **environment, **_gpus_of(device)}, Task(JOB, rank)) for rank, device in enumerate(devices)]
    if request.evaluator:
        settings.append((_evaluator_settings(request, machine, environment), EVALUATOR))
    processes = []
    for setting, task in settings:
        cluster = {"TF_CONFIG": tf_config(spec, task), "PHALANX_RESTART": str(restart)}
        variables = {**_readable_output(), **setting, **cluster}
        processes.append(ProcessSpec(task, request.command(sys.executable), variables))
    return processes


def thread_pool(devices: int, cores: int, workers: int) -> int:
    """Returns NPROC, the size of XLA's thread pool on CPUs, for each of `workers` processes.

    Several devices deadlock with less than two threads per device. One device is fastest with its share of the cores.

    Example:
      >>> thread_pool(2, cores=16, workers=2), thread_pool(1, cores=16, workers=2), thread_pool(1, cores=2, workers=4)
      (4, 8, 1)
    """
    return 2 * devices if devices > 1 else max(1, cores // workers)


def free_ports(count: int) -> list[int]:
    """Returns `count` distinct ports of this machine that are free at the moment. Prefer `held_ports`: nobody can take those."""
    with ExitStack() as stack:
        return [stack.enter_context(held).port for held in held_ports(count)]


def _earlier_restarts(environment: Mapping[str, str]) -> int:
    """Returns how often a scheduler has started the launcher before."""
    text = environment.get("PHALANX_RESTART") or "0"
    if not arguments.is_number(text):
        raise InvalidArgumentError(
            f"PHALANX_RESTART={text!r:.80}", "must be the number of earlier starts.", "unset PHALANX_RESTART"
        )
    return int(text)


def _readable_output() -> dict[str, str]:
    """Returns variables that make Python print lines immediately, and print a stack when it crashes."""
    return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _device_settings(request: Request, machine: Machine, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables that set devices and threads, per worker."""
    if machine.gpus:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in _shares_of_gpus(request, machine.gpus)]
    devices = _cpu_devices(request, environment)
    threads = thread_pool(devices, machine.cores, request.processes)
    return [{"PHALANX_CPU_DEVICES": str(devices), "NPROC": str(threads)}] * request.workers


def _evaluator_settings(request: Request, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the evaluator: one GPU that no worker has, or else one CPU device."""
    shares = _shares_of_gpus(request, machine.gpus) if machine.gpus else []
    if left := machine.gpus[sum(map(len, shares)) :]:
        return {**environment, "CUDA_VISIBLE_DEVICES": left[0]}
    threads = thread_pool(1, machine.cores, request.processes)
    # Otherwise the evaluator would use a GPU that a worker has.
    no_gpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if machine.gpus else {}
    return {"NPROC": str(threads), **environment, **no_gpu, "PHALANX_CPU_DEVICES": "1"}


def _gpus_of(settings: dict[str, str]) -> dict[str, str]:
    """Returns only the variable that holds a worker's share of the GPUs."""
    return {name: value for name, value in settings.items() if name == "CUDA_VISIBLE_DEVICES"}


def _cpu_devices(request: Request, environment: Mapping[str, str]) -> int:
    num_requested, configured = request.devices_per_worker, environment.get("PHALANX_CPU_DEVICES")
    if not configured:
        return num_requested or 1
    if not arguments.is_number(configured) or int(configured) < 1 or num_requested not in (None, int(configured)):
        raise InvalidArgumentError(
            f"devices_per_worker={num_requested}",
            f"the environment sets PHALANX_CPU_DEVICES={configured!r:.80}.",
            "unset PHALANX_CPU_DEVICES",
        )
    return int(configured)


def _shares_of_gpus(request: Request, gpus: Sequence[str]) -> list[Sequence[str]]:
    each = request.devices_per_worker or max(1, len(gpus) // request.workers)
    if each * request.workers > len(gpus):
        raise InvalidArgumentError(
            f"workers={request.workers}, {each} GPU(s) each",
            f"this machine has {len(gpus)}: {', '.join(gpus)}.",
            "JAX_PLATFORMS=cpu phalanx run ... to try it without GPUs",
        )
    return [gpus[rank * each : (rank + 1) * each] for rank in range(request.workers)]


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPUs that JAX would see, from the files of NVIDIA's driver. Asking JAX takes seconds and GPU memory."""
    platforms = environment.get("JAX_PLATFORMS") or "cuda"
    if not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    # Set and empty, it hides all GPUs.
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles"))
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted(numbers, key=int))
