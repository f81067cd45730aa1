# SPDX-License-Identifier: Apache-2.0
"""The tasks of a cluster, their roles, and reading and writing TF_CONFIG, with pure functions."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from phalanx.errors import ClusterError, ClusterTypeError, arguments, shown

ROLES = ("chief", "worker", "ps", "evaluator")

_SINGLE = ("chief", "evaluator")
_CLUSTER_HINT = '"cluster": {"worker": ["host0:12345", "host1:12345"]}'
_TASK_HINT = '"task": {"type": "worker", "index": 0}'
MAX_PORT = 65535
MOST_TASKS = 1 << 20
"""The most tasks of a job, and the largest of other numbers. Lists of more would fill the memory."""


@final
class ClusterSpec:
    """The addresses of all tasks, by job and index. May be used in any context.

    Args:
      cluster: a dict from job to a list of addresses, or to a dict from index to address; or another ClusterSpec.

    Raises:
      ClusterTypeError: `cluster` has another type.
      ClusterError: an index is not an integer of at least 0, or is there twice.

    Source: tf.train.ClusterSpec.

    Example:
      >>> spec = ClusterSpec({"worker": ["host0:12345", "host1:12345"], "ps": {2: "host2:12345"}})
      >>> spec
      ClusterSpec({'ps': {2: 'host2:12345'}, 'worker': ['host0:12345', 'host1:12345']})
      >>> spec.task_address("worker", 1)
      'host1:12345'
    """

    def __init__(self, cluster: "ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]]") -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise ClusterTypeError(
                f"cluster={shown(cluster, 80)}", "must be a dict of jobs or a ClusterSpec.", _CLUSTER_HINT
            )
        # Sorted as texts: a name of another type must reach `_job_name`, whose message explains it.
        self._tasks = {_job_name(job): _addresses_of(job, cluster[job]) for job in sorted(cluster, key=str)}

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the addresses of each job: a list, or a dict by index if an index is missing."""
        return {job: list(t.values()) if _is_dense(t) else dict(t) for job, t in self._tasks.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of all jobs, sorted."""
        return list(self._tasks)

    @arguments.typed(ClusterTypeError)
    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job.

        Raises:
          ClusterError: there is no such job.
        """
        return len(self._job(job_name))

    @arguments.typed(ClusterTypeError)
    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the tasks of a job, ascending.

        Raises:
          ClusterError: there is no such job.
        """
        return list(self._job(job_name))

    @arguments.typed(ClusterTypeError)
    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Raises:
          ClusterError: there is no such job, or it has no such task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ClusterError(
                f"task {task_index!r} of job {job_name!r}", f"{job_name!r} has the tasks {_list(tasks)}.", _TASK_HINT
            )
        return tasks[task_index]

    @arguments.typed(ClusterTypeError)
    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job by index, with None for missing indices.

        Raises:
          ClusterError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._tasks:
            raise ClusterError(f"job {name!r}", f"the cluster has the jobs {_list(self._tasks)}.", _CLUSTER_HINT)
        return self._tasks[name]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return self._tasks == other._tasks if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        # The tasks are in dicts, which have no hash.
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


@dataclass(frozen=True)
class Task:
    """One process of a cluster.

    Args:
      type: name of its job.
      index: index of the task in that job, from 0.

    Example:
      >>> print(Task("worker", 1))
      worker:1
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class TFConfig(NamedTuple):
    """The contents of TF_CONFIG: the cluster, this task, the RPC layer and the session master."""

    spec: ClusterSpec
    task: Task | None
    rpc_layer: str | None
    session_master: str | None


def check(spec: ClusterSpec, task: Task | None = None) -> None:
    """Checks that `spec` has only known jobs and at most one chief and evaluator, and contains `task`.

    Raises:
      ClusterError: a role is unknown, there is a second chief or evaluator, or the task is not in the cluster.
    """
    for job in [*spec.jobs, *([task.type] if task else [])]:
        if job not in ROLES:
            # TF_CONFIG of TensorFlow 1 called the chief so.
            hint = '"chief": ["host0:12345"]' if job == "master" else _CLUSTER_HINT
            raise ClusterError(f"job {job!r}", f"the roles are {_list(ROLES)}.", hint)
    for job in {*_SINGLE} & {*spec.jobs}:
        if spec.num_tasks(job) > 1:
            hint = f'"{job}": ["{spec.job_tasks(job)[0]}"]'
            raise ClusterError(f"{spec.num_tasks(job)} tasks of job {job!r}", "a cluster has at most one.", hint)
    if task and is_unlisted(spec, task):
        _check_only(task)
    elif task:
        _check_member(spec, task)


def is_unlisted(spec: ClusterSpec, task: Task) -> bool:
    """Returns whether `task` is an evaluator without an address. The other tasks need none, so the cluster may omit it.

    Example:
      >>> is_unlisted(ClusterSpec({"worker": ["host0:12345"]}), Task("evaluator", 0))
      True
    """
    return task.type == "evaluator" and task.type not in spec.jobs


def _check_only(evaluator: Task) -> None:
    if evaluator.index:
        hint = '"task": {"type": "evaluator", "index": 0}'
        raise ClusterError(f"task {evaluator}", "a cluster has at most one evaluator.", hint)


def _check_member(spec: ClusterSpec, task: Task) -> None:
    if task.type not in spec.jobs:
        problem = f"the cluster has the jobs {_list(spec.jobs)}." if spec else "the cluster is empty."
        raise ClusterError(f"task {task}", problem, f'"cluster": {{"{task.type}": ["host0:12345"]}}')
    indices = spec.task_indices(task.type)
    if not indices:
        raise ClusterError(f"task {task}", f"the job {task.type!r} has no tasks.", f'"{task.type}": ["host0:12345"]')
    if task.index not in indices:
        first = f'"task": {{"type": "{task.type}", "index": {indices[0]}}}'
        raise ClusterError(f"task {task}", f"the indices of {task.type!r} are {_list(indices)}.", first)


def leader(spec: ClusterSpec) -> Task:
    """Returns the chief, or the first worker if there is no chief.

    Raises:
      ClusterError: there is neither a chief nor a worker, or a role is unknown.

    Example:
      >>> leader(ClusterSpec({"worker": ["host0:12345", "host1:12345"]}))
      Task(type='worker', index=0)
    """
    check(spec)
    if not (trainers := _trainers(spec)):
        raise ClusterError(f"{spec!r}", "there is neither a chief nor a worker.", _CLUSTER_HINT)
    return trainers[0]


def is_chief(spec: ClusterSpec, task: Task) -> bool:
    """Returns whether `task` writes checkpoints and logs: the chief (or the first worker if there is none) and the evaluator.

    Raises:
      ClusterError: `task` is not in the cluster.
    """
    check(spec, task)
    return task.type == "evaluator" or task in _trainers(spec)[:1]


def id_in_cluster(spec: ClusterSpec, task: Task) -> int:
    """Returns the rank of `task` among the tasks that train together, from 0: the chief, then the workers.

    Raises:
      ClusterError: `task` is not in the cluster, or is a parameter server.

    Example:
      >>> id_in_cluster(ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"]}), Task("worker", 1))
      2
    """
    check(spec, task)
    if task.type == "ps":
        raise ClusterError(f"id of task {task}", "a parameter server does not train.", _TASK_HINT)
    return task.index if task.type == "evaluator" else _trainers(spec).index(task)


def addresses_of_workers(spec: ClusterSpec) -> list[str]:
    """Returns the addresses of the chief and the workers, in the order of `id_in_cluster`."""
    return [spec.task_address(t.type, t.index) for t in _trainers(spec)]


def _trainers(spec: ClusterSpec) -> list[Task]:
    # This order makes the ranks. All processes compute it, each for itself, so it follows from the spec alone.
    return [Task(job, i) for job in ("chief", "worker") if job in spec.jobs for i in spec.task_indices(job)]


def tf_config(spec: ClusterSpec, task: Task, *, rpc_layer: str | None = None) -> str:
    """Returns the value of TF_CONFIG for one process.

    Args:
      spec: the whole cluster, which is the same for all processes.
      task: the process that gets the text.
      rpc_layer: prefix of the addresses in `master()`.

    Raises:
      ClusterError: `parse_tf_config` would reject the text.

    Example:
      >>> print(tf_config(ClusterSpec({"worker": ["host0:12345"]}), Task("worker", 0)))
      {"cluster": {"worker": ["host0:12345"]}, "task": {"type": "worker", "index": 0}}
    """
    _check_addresses(spec)
    check(spec, task)
    layer = {"rpc_layer": rpc_layer} if rpc_layer else {}
    return json.dumps({"cluster": spec.as_dict(), "task": {"type": task.type, "index": task.index}, **layer})


def parse_tf_config(text: str, *, task_type: str | None = None, task_id: int | None = None) -> TFConfig:
    """Parses a value of TF_CONFIG.

    Args:
      text: JSON. `{}` describes no cluster.
      task_type: overrides the type of the task.
      task_id: overrides the index of the task.

    Returns:
      The contents of TF_CONFIG.

    Raises:
      ClusterError: the text is not JSON or has the wrong form, an address is invalid or used twice, a role is unknown,
        there are two chiefs, or the task is missing or not in the cluster.

    Example:
      >>> text = '{"cluster": {"worker": ["host0:12345"]}, "task": {"type": "worker", "index": 0}}'
      >>> spec, task, rpc_layer, session_master = parse_tf_config(text)
      >>> spec, task
      (ClusterSpec({'worker': ['host0:12345']}), Task(type='worker', index=0))
    """
    config = _json_object(text)
    cluster = _part(config, "cluster", _CLUSTER_HINT)
    spec = ClusterSpec(cluster)
    _check_addresses(spec)
    chosen = {"type": task_type, "index": None if task_id is None else operator.index(task_id)}
    task_fields = {**_part(config, "task", _TASK_HINT), **{k: v for k, v in chosen.items() if v is not None}}
    task = _task_of(task_fields) if task_fields or spec else None
    check(spec, task)
    return TFConfig(spec, task, _text(config, "rpc_layer"), _text(config, "session_master"))


def _json_object(text: str) -> dict[str, Any]:
    hint = f"TF_CONFIG='{{{_CLUSTER_HINT}, {_TASK_HINT}}}'"
    if not text.strip():
        raise ClusterError("TF_CONFIG", "is set but empty. It must be JSON.", hint)
    try:
        config = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, 0) : error.pos + 20]
        problem = f"is not JSON: {error.msg} at character {error.pos}, near {near!r}."
        raise ClusterError("TF_CONFIG", problem, hint) from None
    except (RecursionError, ValueError) as error:  # Thousands of brackets or digits.
        raise ClusterError(f"TF_CONFIG={text:.80}", f"cannot be read: {error}.", hint) from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG={text:.80}", f"must be a JSON object, not {_kind(config)}.", hint)
    return config


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ClusterError(f"TF_CONFIG with {key!r} twice", "the second value would hide the first.", _CLUSTER_HINT)
        fields[key] = value
    return fields


def _part(config: dict[str, Any], name: str, hint: str) -> dict[str, Any]:
    part = config.get(name)
    if part is not None and not isinstance(part, dict):
        raise ClusterError(f'"{name}": {json.dumps(part):.80}', f"must be a JSON object, not {_kind(part)}.", hint)
    return part or {}


def _text(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise ClusterError(f'"{name}": {json.dumps(value):.80}', f"must be a string, not {_kind(value)}.")
    return value or None


def _task_of(fields: dict[str, Any]) -> Task:
    for key in ("type", "index"):
        if key not in fields:
            problem = (
                f"the task has no {key!r}." if fields else "it describes the cluster, but not the task of this process."
            )
            raise ClusterError("TF_CONFIG", problem, _TASK_HINT)
    kind, index = fields["type"], fields["index"]
    if not isinstance(kind, str):
        raise ClusterError(f'"type": {json.dumps(kind):.80}', f"must be a string, not {_kind(kind)}.", _TASK_HINT)
    return Task(kind, _index(f'"index": {json.dumps(index):.80}', index))


def _index(subject: str, value: object) -> int:
    if isinstance(value, str) and arguments.is_number(value):  # Keys of JSON objects are strings.
        value = int(value)
    if not arguments.is_integer(value, least=0, most=MOST_TASKS):
        raise ClusterError(subject, "an index must be an integer, 0 or more.", _TASK_HINT)
    return value


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise ClusterTypeError(f"job {shown(job)}", "the name of a job must be a string.", _CLUSTER_HINT)
    return job


def _addresses_of(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, str) or not isinstance(tasks, Mapping | Sequence):
        hint = f'"{job}": ["host0:12345"]'
        raise ClusterTypeError(
            f'"{job}": {shown(tasks, 80)}', "must be a list of addresses, or a dict from index to address.", hint
        )
    items = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    addresses: dict[int, str] = {}
    for key, address in items:
        i = _index(f"index {shown(key)} of job {job!r}", key)
        if i in addresses:
            raise ClusterError(
                f"index {i} of job {job!r} twice", "the second address would hide the first.", _TASK_HINT
            )
        addresses[i] = address
        if not isinstance(address, str):
            hint = f'"{job}": ["host0:12345"]'
            raise ClusterTypeError(f"address {shown(address, 80)} of {job}:{i}", "must be a string.", hint)
    return dict(sorted(addresses.items()))


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the host and the port of a valid address. The brackets of an IPv6 address are removed.

    Example:
      >>> host_and_port("host0:12345"), host_and_port("[::1]:12345")
      (('host0', 12345), ('::1', 12345))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _check_addresses(spec: ClusterSpec) -> None:
    seen: dict[str, Task] = {}
    for task in [Task(job, i) for job in spec.jobs for i in spec.task_indices(job)]:
        address = spec.task_address(task.type, task.index)
        host, _, port = address.rpartition(":")
        # An IPv6 address has several colons, so brackets must separate it from the port.
        if not host or set(host) & set("/ ,") or (":" in host and not (host[0] == "[" and host[-1] == "]")):
            problem = "must be host:port, or [host]:port for an IPv6 address."
            raise ClusterError(f"address {address!r} of {task}", problem, f'"{task.type}": ["host0:12345"]')
        try:
            host.encode("idna")  # As the resolver does, which reports no error of its own then.
        except UnicodeError as e:
            problem = f"its host is not a name: {e}."
            raise ClusterError(f"address {address!r:.80} of {task}", problem, f'"{task.type}": ["host0:{port}"]') from e
        if not (arguments.is_number(port) and 0 < int(port) <= MAX_PORT):
            problem = f"its port {port!r:.80} is not a number from 1 to {MAX_PORT}."
            raise ClusterError(f"address {address!r:.80} of {task}", problem, f'"{task.type}": ["{host}:12345"]')
        if address in seen:
            problem = f"{seen[address]} has it too, but each process needs its own address."
            raise ClusterError(f"address {address!r} of {task}", problem, _CLUSTER_HINT)
        seen[address] = task


def _is_dense(tasks: Mapping[int, str]) -> bool:
    return list(tasks) == list(range(len(tasks)))


def _list(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "(none)"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
