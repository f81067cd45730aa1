# SPDX-License-Identifier: Apache-2.0
"""Resolver for the tasks of a Slurm job step, which `srun` started."""

import itertools
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver, check_port, number, variable
from phalanx._src.cluster.spec import ClusterSpec, Task
from phalanx.errors import ClusterSourceError, ClusterTypeError, arguments, shown

_MEANING = "srun sets it for each task of a job step"
_HINT = "srun --ntasks=2 python train.py"
# A short text may stand for more hosts than fit into memory, and each bracket is one level of recursion.
_MOST, _MOST_BRACKETS = 1 << 16, 16
_PORT_BASE = 8888
_FIRST_PORT, _PORTS = 61440, 3840
"""Ports above those that Linux gives to connections (32768 to 60999), and room for the tasks of a node."""
# Jobs with near ids run at the same time, so the steps of a job are this far apart: 251 jobs of 15 steps have different ports.
_PER_STEP = 251
# The lengths are limited because `int` raises another error for thousands of digits.
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a Slurm host list, in order.

    Args:
      text: names separated by commas. In a name, `[8-10,12]` stands for numbers. A range with leading zeros keeps its width.

    Raises:
      ClusterSourceError: the text is not a valid host list.

    Example:
      >>> expand_hosts("login,gpu[08-10,12]")
      ['login', 'gpu08', 'gpu09', 'gpu10', 'gpu12']
    """
    hosts = (host for item in _items(text) for host in _hosts_of(item, text))
    # The generator makes one host more than are allowed, however many the text stands for.
    first = list(itertools.islice(hosts, _MOST + 1))
    if len(first) > _MOST:
        raise _bad_list(text, f"it stands for more than {_MOST} hosts")
    return first


def expand_counts(text: str) -> list[int]:
    """Returns the counts per node of a Slurm list of counts.

    Args:
      text: numbers separated by commas. `4(x2)` stands for `4,4`.

    Raises:
      ClusterSourceError: the text is not a valid list of counts.

    Example:
      >>> expand_counts("4(x2),3")
      [4, 4, 3]
    """
    counts = []
    for item in text.split(","):
        if not (match := _COUNT.fullmatch(item.strip())):
            raise ClusterSourceError(
                f"tasks per node {shown(text, 80)}", f"{shown(item, 80)} is not a number of tasks.", "4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
        if max(len(counts), sum(counts)) > _MOST:
            raise ClusterSourceError(f"tasks per node {shown(text, 80)}", f"they are more than {_MOST}.", "4(x2),3")
    return counts


def _items(text: str) -> list[str]:
    """Splits at the commas outside brackets."""
    # A comma is inside brackets if a closing one follows before the next opening one.
    items = re.split(r",(?![^\[\]]*\])", text)
    for item in items:
        plain = re.sub(r"\[[^\[\]]*\]", "", item)
        if not item or set(plain) & set("[] \t") or item.count("[") > _MOST_BRACKETS:
            raise _bad_list(
                text, f"{shown(item, 80)} is not a host name, or has unbalanced brackets or more than {_MOST_BRACKETS}"
            )
    return items


def _hosts_of(item: str, text: str) -> Iterator[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        yield before
        return
    numbers, _, after = rest.partition("]")
    for part in numbers.split(","):
        for value in _values(part, text):
            for end in _hosts_of(after, text):
                yield before + value + end


def _values(part: str, text: str) -> Iterator[str]:
    match = _RANGE.fullmatch(part)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise _bad_list(text, f"{shown(part, 80)} is neither a number nor a range of ascending numbers")
    first, last = match[1], match[2] or match[1]
    return (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))


def _bad_list(text: str, found: str) -> ClusterSourceError:
    return ClusterSourceError(f"host list {shown(text, 80)}", f"{found}.", "host[01-04,07]")


def port_of_step(environ: Mapping[str, str]) -> int:
    """Returns a port for the first task of each node, so that jobs and job steps on one node have their own ports.

    Example:
      >>> port_of_step({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}), port_of_step({"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0"})
      (61447, 61448)
    """
    job, step = step_of(environ)
    # Not every step tells the id of its job. 8888 is the port of tf.distribute.
    if not arguments.is_number(job):
        return _PORT_BASE
    return _FIRST_PORT + (int(job) + _PER_STEP * int(step if arguments.is_number(step) else "0")) % _PORTS


def step_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the ids of the job and of its step, which all tasks have in common.

    The parts of a heterogeneous job have their own ids, and one that they share.
    """
    if job := environ.get("SLURM_HET_JOB_ID"):
        return job, ""
    return environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")


@dataclass(frozen=True)
class _TaskPosition:
    """The place of a rank: the index of its node, and its index among the tasks of that node."""

    node: int
    local: int


def _placed(counts: list[int], distribution: str) -> list[_TaskPosition]:
    """Returns the place of each rank."""
    places = [_TaskPosition(node, local) for node, count in enumerate(counts) for local in range(count)]
    kind = distribution.partition(":")[0].lower()
    if kind.startswith("cyclic"):
        return sorted(places, key=lambda p: (p.local, p.node))
    # By default, and with these, consecutive ranks fill one node after the other.
    if kind in ("", "*") or kind.startswith(("block", "pack", "nopack")):
        return places
    raise ClusterSourceError(
        f"SLURM_DISTRIBUTION={distribution!r:.80}",
        "it does not determine the node of a rank. Only block and cyclic do.",
        "srun --distribution=block ...",
    )


@final
class SlurmClusterResolver(ClusterResolver):
    """Resolves the tasks of a Slurm job step, which `srun` started. May be used in any context.

    Ranks are assigned to jobs in alphabetical order of the job names. The tasks of a node listen on consecutive ports, from
    `port_base`.

    Args:
      jobs: dict from job to number of tasks; by default all tasks are workers.
      port_base: port of the first task of each node.
      gpus_per_node: number of GPUs per node; by default the number that Slurm reports.
      gpus_per_task: number of GPUs per task; by default the GPUs of a node are shared evenly.
      tasks_per_node: number of tasks per node, for all nodes or as a dict by host; by default the numbers that Slurm reports.
      auto_set_gpu: whether `cluster_spec()` sets CUDA_VISIBLE_DEVICES to this task's share of the GPUs of its node. It does so
        only if the number of GPUs is known.
      rpc_layer: prefix of the addresses in `master()`.
      environ: environment variables to read; by default those of this process.

    Source: tf.distribute.cluster_resolver.SlurmClusterResolver.

    Example:
      >>> environ = {
      ...     "SLURM_PROCID": "2",
      ...     "SLURM_STEP_NUM_TASKS": "3",
      ...     "SLURM_STEP_NODELIST": "gpu[08-09]",
      ...     "SLURM_STEP_TASKS_PER_NODE": "2,1",
      ... }
      >>> resolver = SlurmClusterResolver(environ=environ)
      >>> resolver.cluster_spec()
      ClusterSpec({'worker': ['gpu08:8888', 'gpu08:8889', 'gpu09:8888']})
      >>> resolver.get_task_info()
      ('worker', 2)
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = _PORT_BASE,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._jobs, self._port_base, self._tasks_per_node = jobs, check_port(port_base, "port_base"), tasks_per_node
        for name, count, least in (
            ("gpus_per_node", gpus_per_node, 0),
            ("gpus_per_task", gpus_per_task, 0),
            ("tasks_per_node", tasks_per_node, 1),
        ):
            if count is not None and not isinstance(count, Mapping):
                arguments.integer(name, count, least=least, most=_MOST, kind=f"a number from {least} to {_MOST}")
        self._gpus_per_node, self._gpus_per_task, self._sets_gpus = gpus_per_node, gpus_per_task, auto_set_gpu
        self._rpc_layer, self._given_environ = rpc_layer, environ

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks.

        Raises:
          ClusterSourceError: this process is not part of a job step, the variables contradict each other or the arguments, or
            a node has too few GPUs for its tasks.
        """
        hosts, places = self._layout()
        addresses = [f"{hosts[p.node]}:{self._port_base + p.local}" for p in places]
        cluster: dict[str, list[str]] = {}
        for job, count in self._counts_of_jobs(len(places)):
            cluster[job], addresses = addresses[:count], addresses[count:]
        environ = self._environ
        # A question with a side effect, as in tf.distribute. The strategy asks it before JAX looks for devices.
        if self._sets_gpus and isinstance(environ, MutableMapping) and (gpus := self._own_gpus(places)):
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this process, and its index in that job."""
        return self.task_type, self.task_id

    @override
    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        count = self._gpus_of_task(self._layout()[1])
        return {"GPU": count} if count else {}

    @override
    def _find_task(self) -> Task:
        places = self._layout()[1]
        tasks = [Task(job, i) for job, count in self._counts_of_jobs(len(places)) for i in range(count)]
        return tasks[self._rank(places)]

    def _layout(self) -> tuple[list[str], list[_TaskPosition]]:
        """Returns the hosts, and the place of each rank."""
        hosts = expand_hosts(self._variable("SLURM_STEP_NODELIST"))
        counts = self._counts_of_nodes(hosts)
        if len(counts) != len(hosts):
            problem = f"this is {len(counts)} nodes, but SLURM_STEP_NODELIST={self._variable('SLURM_STEP_NODELIST'):.80} has {len(hosts)}."
            raise ClusterSourceError(f"tasks per node {counts}", problem, _HINT)
        places = _placed(counts, self._environ.get("SLURM_DISTRIBUTION", ""))
        self._check_own_place(places)
        return hosts, places

    def _counts_of_nodes(self, hosts: list[str]) -> list[int]:
        tasks_per_node = self._tasks_per_node
        if tasks_per_node is None:
            return expand_counts(self._variable("SLURM_STEP_TASKS_PER_NODE"))
        if not isinstance(tasks_per_node, Mapping):
            return [tasks_per_node] * len(hosts)
        if missing := [host for host in hosts if host not in tasks_per_node]:
            raise ClusterSourceError(
                f"tasks_per_node={dict(tasks_per_node)}", f"host {missing[0]!r} of the job step is missing.", _HINT
            )
        return [tasks_per_node[host] for host in hosts]

    def _counts_of_jobs(self, num_tasks: int) -> list[tuple[str, int]]:
        jobs = sorted((self._jobs or {"worker": self._number("SLURM_STEP_NUM_TASKS")}).items())
        if (num_requested := sum(count for _, count in jobs)) != num_tasks:
            problem = f"{num_requested} tasks were requested, but {num_tasks} were assigned."
            raise ClusterSourceError(f"jobs={dict(jobs)}", problem, f"srun --ntasks={num_requested} python train.py")
        return jobs

    def _rank(self, places: list[_TaskPosition]) -> int:
        rank = self._number("SLURM_PROCID")
        if rank >= len(places):
            raise ClusterSourceError(f"SLURM_PROCID={rank}", f"the job step has {len(places)} tasks.", _HINT)
        return rank

    def _check_own_place(self, places: list[_TaskPosition]) -> None:
        rank = self._rank(places)
        place = places[rank]
        for name, computed in (("SLURM_NODEID", place.node), ("SLURM_LOCALID", place.local)):
            # Slurm reports only the task's own place. It may contradict the places that the counts imply.
            if self._environ.get(name) and self._number(name) != computed:
                problem = (
                    f"rank {rank} would have {computed} if the tasks were placed as SLURM_STEP_TASKS_PER_NODE says."
                )
                raise ClusterSourceError(f"{name}={self._number(name)}", problem, "srun --distribution=block ...")

    def _visible_gpus(self) -> list[str]:
        return [d.strip() for d in self._environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]

    def _gpus_on_node(self) -> int | None:
        """Returns the number of GPUs of this node, or None if it is unknown."""
        if self._gpus_per_node is not None:
            return self._gpus_per_node
        return self._number("SLURM_GPUS_ON_NODE", default=len(self._visible_gpus())) or None

    def _gpus_of_task(self, places: list[_TaskPosition]) -> int:
        # The node with the most tasks decides, so that tasks have the same number of GPUs on all nodes.
        most = max(p.local for p in places) + 1
        available = self._gpus_on_node()
        count = (available or 0) // most if self._gpus_per_task is None else self._gpus_per_task
        if available is not None and count * most > available:
            problem = f"{most} tasks on one node need {count * most} GPUs, but it has {available}."
            raise ClusterSourceError(f"gpus_per_task={count}", problem, f"gpus_per_task={available // most}")
        return count

    def _own_gpus(self, places: list[_TaskPosition]) -> list[str]:
        count, local = self._gpus_of_task(places), places[self._rank(places)].local
        visible = self._visible_gpus()
        # If Slurm binds GPUs to tasks, the task already sees only its own.
        if len(visible) == count:
            return visible
        # If the environment has too few names, numbers stand for the GPUs: CUDA counts those of a node from 0.
        names = visible if len(visible) >= (local + 1) * count else [str(i) for i in range((local + 1) * count)]
        return names[local * count : (local + 1) * count]

    def _variable(self, name: str) -> str:
        return variable(self._environ, name, _MEANING, _HINT)

    def _number(self, name: str, default: int | None = None) -> int:
        return number(self._environ, name, _MEANING, _HINT, default)
