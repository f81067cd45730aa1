# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of workers and parameter servers, as actors of Ray."""

import functools
import importlib
import itertools
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from phalanx._src.cluster.connections.door import Door, Entrance, MeetingPlace
from phalanx._src.cluster.connections.hosts import LOOPBACK, is_loopback, numeric
from phalanx._src.cluster.connections.listener import split
from phalanx._src.cluster.connections.secret import TOKEN, new_token, secret_of
from phalanx._src.cluster.processes.owned import SERVERS_FOLDER, MarkedProcesses, OwnedProcesses
from phalanx._src.cluster.processes.places import Needs, Places, cores_per_process, needs_gpus
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.cluster.spec import ClusterSpec, Task, leader
from phalanx._src.parameter_server.processes.handles import Ray
from phalanx._src.parameter_server.processes.session import (
    ADDRESS,
    RAY_START,
    AbstractSession,
    KeptSession,
    Session,
    join,
    token_variables,
)
from phalanx.errors import (
    ClusterError,
    ClusterTypeError,
    ContextError,
    MissingDependencyError,
    PeerLostError,
    StartupError,
    arguments,
    shown,
)
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")

_AUTHENTICATION = "RAY_AUTH_MODE"
_QUIET = {
    # Ray sends usage statistics to its makers by default.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Only clients with the token may connect. Without this, anyone who reaches a port can run code.
    _AUTHENTICATION: "token",
    # A monitor tells everyone how busy the machines are, without a token, unless its port is none.
    "AUTOSCALER_METRIC_PORT": "-1",
    # By default, any call after `ray.shutdown()` starts a new Ray session.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Ray would hide the accelerators from actors with `num_gpus=0`, which is the default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray lowers the priority of its workers (nice 15) in favour of its own processes.
    "RAY_worker_niceness": "0",
    # If several calls to a lost process fail, Phalanx raises at most one error. Ray would print all others.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # The coordinator reports a lost worker in one line. Ray would add a paragraph, and a C++ stack if a machine is lost.
    "RAY_DEDUP_LOGS_SKIP_REGEX": r"A worker died or was killed while executing a task|Raylet is terminated|\(raylet\) "
    r"|StackTrace Information|/raylet/raylet\(|/libc\.so",
    # Ray would start processes ahead, for 1.2 s of CPU time. Workers and servers have other variables, so these would stay idle.
    "RAY_prestart_worker_first_driver": "0",
    # On a busy machine, Ray's processes take longer to start than its default timeouts.
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_gcs_server_port_wait_time_s": "120",
}
_POLL_S = 0.2
_GRACE_S = 5.0
_STAY_S = 1.0
_TRIES = 3
_OF_COORDINATOR = re.compile(r"(JAX|KERAS|NCCL|XLA)_")
"""The variables of this process that its workers and servers on other nodes need too."""
_WORKING_DIR = 'ray.init(runtime_env={"working_dir": "."}), or ray job submit --working-dir . , which copy the folder of the script'
_RAY_TOKEN = "the token of Ray"
"""What the secret of a cluster proves when it makes the token. See `Secret.proof`."""


def load_ray(*, is_joining: bool = False) -> Ray:
    """Imports Ray with token authentication and without its usual output.

    Args:
      is_joining: whether this process joins a Ray cluster of the user, which says itself whom it lets in.

    Returns:
      The module `ray`.

    Raises:
      MissingDependencyError: Ray is not installed.
      StartupError: Ray was imported earlier, without token authentication.
    """
    if "ray" not in sys.modules:
        for name, value in _QUIET.items():
            if name != _AUTHENTICATION or not is_joining:
                os.environ.setdefault(name, value)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as e:
        raise _missing("is not installed.") from e
    if not hasattr(ray, "__version__"):
        # Python imports any folder named `ray` on its path as a namespace package.
        path = next(iter(getattr(ray, "__path__", ())), ray.__name__)
        del sys.modules["ray"]
        raise _missing(f"is not installed: `import ray` finds {path}.")
    if _AUTHENTICATION not in os.environ and not is_joining and not ray.is_initialized():
        raise StartupError(
            "parameter servers after `import ray`",
            "Ray reads its settings when it is imported, and without RAY_AUTH_MODE it accepts any client.",
            'os.environ["RAY_AUTH_MODE"] = "token" before `import ray`',
        )
    module: Ray = ray
    return module


def _missing(problem: str) -> MissingDependencyError:
    return MissingDependencyError(
        "parameter servers",
        f"their processes are Ray actors, and Ray {problem}",
        'pip install ".[ps]" in a clone of Phalanx',
    )


class RayCluster:
    """The processes of the workers and parameter servers of one strategy.

    Without a `spec` they run in the Ray cluster that this process has joined or RAY_ADDRESS names, or else on this machine.

    Args:
      spec: the cluster, whose tasks join with `Server`.
      workers: number of workers.
      ps: number of parameter servers.
      timeout_s: seconds to wait for the tasks of `spec`.
      dashboard: whether to start Ray's dashboard.
      resources: what a process of each job needs in a Ray cluster. None for an equal share of the cluster.

    Attributes:
      actors: the actors that were started and not ended.
      outlives: whether actors with a name outlive this process.
      import_hint: how a module of the user gets to the workers.

    Raises:
      StartupError: Ray did not start, tasks are missing, or the Ray cluster has no room.
      ClusterError: two processes have joined as the same task.
      ContextError: another strategy of this process is open, and one of the two uses a cluster.
    """

    def __init__(
        self,
        spec: ClusterSpec | None,
        workers: int,
        ps: int,
        timeout_s: float,
        *,
        dashboard: bool,
        resources: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        is_joining = spec is None and bool(os.environ.get(ADDRESS))
        self._ray, self._spec = load_ray(is_joining=is_joining), spec
        self.workers, self.ps = workers, ps
        self.actors: list[Any] = []
        _require_alone(spec)
        self._door: Door | None = None
        # The Ray session that this process has started. The open clusters share it, and one of them has it.
        self._session: AbstractSession | None = None
        _open.append(self)
        if spec is not None:
            self._start_cluster(spec, timeout_s, dashboard=dashboard)
        elif not self._ray.is_initialized() and not is_joining:
            self._session = self._started(dashboard=dashboard)
        sessions = [cluster._session for cluster in _open if cluster._session is not None]
        self.outlives = spec is None and any(session.outlives for session in sessions)
        self._places: Places | None = None
        self.import_hint = "install its module on the machines of the workers"
        if spec is None and not sessions:
            self._place(resources)
        self._prefix = f"strategy {next(_numbers)}: "

    def actor(self, kind: type, job: str, index: int, *args: PyTree, threads: int, name: str | None = None) -> Any:
        """Starts the actor of a task without waiting for it.

        Args:
          kind: class of the actor.
          job: "worker" or "ps".
          index: index of the task.
          *args: arguments of the class.
          threads: number of calls that the actor runs at the same time.
          name: name under which `kept_actors` returns the actor in the next start of this script. None if it ends with this process.
        """
        if self._places is not None:
            options = self._places.options(index + (job == "ps") * self.workers)
            cores = max(1, int(options["num_cpus"]))
        elif self._spec is not None:
            # A custom resource places the actor on the machine of its task, which is assumed to be for that task alone.
            options, cores = {"num_cpus": 0, "resources": {_resource(Task(job, index)): 1.0}}, None
        else:
            # Processes on this machine share its cores.
            options, cores = {"num_cpus": 0}, max(1, (os.cpu_count() or 1) // (self.workers + self.ps))
        options["max_concurrency"] = threads
        if self.outlives and name is not None:
            options |= {"name": self._prefix + name, "lifetime": "detached"}
        self.actors.append(self._ray.remote(_started(kind)).options(**options).remote(cores, *args))
        return self.actors[-1]

    def kept_actors(self, names: Sequence[str]) -> list[Any]:
        """Returns the actors that an earlier start of this script has left to this strategy, if they have exactly these names.

        Otherwise it ends them, and returns none.
        """
        if not self.outlives:
            return []
        actors = {}
        for name in self._ray.util.list_named_actors():
            if name.startswith(self._prefix):
                with suppress(ValueError):  # The actor has ended since.
                    actors[name.removeprefix(self._prefix)] = self._ray.get_actor(name)
        self.actors += actors.values()
        if actors.keys() == set(names):
            return [actors[name] for name in names]
        if actors:
            _log.warning(
                "Found these parameter servers of the last start: %s. This start needs: %s. New servers replace them, "
                "without their values.",
                "; ".join(sorted(actors)),
                "; ".join(names),
            )
        for actor in actors.values():
            self.end(actor)
        return []

    def end(self, actor: object) -> None:
        """Kills an actor, whatever it is doing."""
        if actor in self.actors:
            self.actors.remove(actor)
            self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Ends all actors. Also ends Ray if this process started it and no other strategy uses it."""
        if self not in _open:
            return
        _open.remove(self)
        if self._door is not None:
            self._door.close()
        if self._ray.is_initialized():
            for actor in list(self.actors):
                self.end(actor)
            if self._places is not None:
                self._places.close()
        session, self._session = self._session, None
        if session is not None and _open:
            _open[0]._session = session
        elif session is not None:
            session.close()

    def _place(self, resources: Mapping[str, Mapping[str, float]] | None) -> None:
        """Waits for places in the Ray cluster, and joins it if the script has not.

        Raises:
          StartupError: the cluster does not answer, has no room, or cannot import Phalanx.
        """
        subject = f"ParameterServerStrategy(workers={self.workers}, ps={self.ps}) in a Ray cluster"
        try:
            if not self._ray.is_initialized():
                join(self._ray)
            self.import_hint = _WORKING_DIR
            in_runtime_env = self._ray.get_runtime_context().runtime_env.get("env_vars", {})
            self._places = Places(
                functools.partial(_needs, self._ray, self.workers, self.ps, resources),
                subject=subject,
                hint="ray status    shows who has them; "
                'ParameterServerStrategy(resources={"worker": {"CPU": 1}, "ps": {"CPU": 1}}), or fewer of them',
                timeout_s=start_timeout_s(os.environ),
                variables={k: v for k, v in os.environ.items() if _OF_COORDINATOR.match(k) and k not in in_runtime_env},
            )
            if wrong := sorted({*self._places.ask(_version)} - {_version()}):
                problem = f"its nodes have Phalanx {', '.join(wrong)}, and this process has {_version()}."
                raise StartupError(subject, problem, f"pip install phalanx=={_version()} on all nodes")
        except BaseException as e:
            self.close()
            if not isinstance(e, self._ray.exceptions.RayError):
                raise
            problem = f"Ray cannot start a process there that imports Phalanx: {str(e).strip().splitlines()[-1]}"
            raise StartupError(subject, problem, "install Phalanx on all nodes, in the versions of this process") from e

    def _started(self, *, dashboard: bool) -> AbstractSession:
        """Starts Ray on the loopback interface."""
        if folder := _folder_of_launcher():
            return KeptSession(self._ray, folder, LOOPBACK, dashboard=dashboard)
        return Session(self._ray, LOOPBACK, new_token(), dashboard=dashboard)

    def _start_cluster(self, spec: ClusterSpec, timeout_s: float, *, dashboard: bool) -> None:
        """Waits until all tasks have proved that they belong to the cluster, starts Ray, and tells them where and with which token."""
        tasks = [Task(job, i) for job in ("worker", "ps") for i in spec.task_indices(job)]
        chief = spec.task_address("chief", 0)
        addresses = [chief, *(spec.task_address(task.type, task.index) for task in tasks)]
        secret, salt = secret_of(addresses), ""
        try:
            self._door = Door(chief, secret, len(tasks))
        except OSError as e:
            raise StartupError(
                f"the chief at {chief}",
                f"it cannot listen there ({e.strerror or e}): another process has the port, or the address does not belong to this machine.",
                "use a free port and this machine's name in the address of the chief",
            ) from e
        try:
            door = self._door
            self._await(tasks, lambda: Counter(door.names), timeout_s)
            # Each start has another token, of which the tasks learn the salt only.
            if not self._ray.is_initialized():
                salt = secrets.token_hex(16)
                host = LOOPBACK if self._door.is_local else numeric(split(chief)[0])
                self._session = Session(self._ray, host, secret.proof(_RAY_TOKEN, salt), dashboard=dashboard)
            self._door.tell(MeetingPlace(self._ray.get_runtime_context().gcs_address, salt))
            self._await(tasks, self._ray.cluster_resources, timeout_s)
        except BaseException:
            self.close()
            raise

    def _await(self, tasks: Sequence[Task], count: Callable[[], Mapping[str, float]], timeout_s: float) -> None:
        """Waits until all tasks are there, of which `count` returns how often each is.

        Raises:
          ClusterError: a task is there twice.
          StartupError: a task does not come.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            counts = count()
            if twice := [str(task) for task in tasks if counts.get(_resource(task), 0) > 1]:
                raise ClusterError(
                    f"ParameterServerStrategy over {len(tasks)} tasks",
                    f"two processes have joined as {', '.join(twice)}.",
                    "phalanx.Server(cluster_spec, job_name, task_index) with another task_index in each process",
                )
            missing = [task for task in tasks if not counts.get(_resource(task))]
            if not missing:
                return
            if time.monotonic() > deadline:
                assert self._spec is not None
                places = ", ".join(f"{t} ({self._spec.task_address(t.type, t.index)})" for t in missing)
                raise StartupError(
                    f"ParameterServerStrategy over {len(tasks)} tasks",
                    f"these tasks have not joined within {timeout_s:.0f} s: {places}.",
                    f"run phalanx.Server(cluster_spec, job_name, task_index).join() in each of them, with the same {TOKEN}",
                )
            time.sleep(_POLL_S)


class Server:
    """A worker or a parameter server of a cluster. Must be created outside all scopes, in its own process.

    It joins the chief, whose strategy then sends it work. Both need the same PHALANX_TOKEN. Without it, they must be processes of one
    user, at addresses that only this machine reaches.

    Args:
      server_or_cluster_def: the cluster: a `ClusterSpec`, or a dict from job to addresses.
      job_name: "worker" or "ps".
      task_index: index of this task in its job. None for 0.
      protocol: ignored. Accepted for code written for TensorFlow.

    Raises:
      ClusterTypeError: an argument has the wrong type.
      ClusterError: the cluster does not have this task, or has no chief.

    Source: tf.distribute.Server.

    Example:
      >>> spec = {"chief": ["localhost:12345"], "worker": ["localhost:12346"], "ps": ["localhost:12347"]}
      >>> Server(spec, "worker", 0).target
      'ray://localhost:12345'
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | Mapping[str, Sequence[str]],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
    ) -> None:
        del protocol
        self._spec = ClusterSpec(server_or_cluster_def)
        if job_name not in ("worker", "ps") or job_name not in self._spec.jobs:
            raise ClusterError(
                f"job_name={shown(job_name)}",
                f'a server is a "worker" or a "ps", and the cluster has the jobs {self._spec.jobs}.',
                'job_name="worker" or job_name="ps"',
            )
        if leader(self._spec).type != "chief":
            raise ClusterError(
                f"a server of {self._spec!r}",
                "the cluster has no chief for workers and parameter servers to join.",
                'add a job "chief" with the address of the script that creates ParameterServerStrategy',
            )
        self._task = Task(job_name, 0 if task_index is None else task_index)
        self._spec.task_address(self._task.type, self._task.index)

    @property
    def target(self) -> str:
        """The address of the chief, as a URL."""
        return f"ray://{self._chief}"

    def join(self, timeout_s: float = 600.0) -> None:
        """Works for the chief until the chief ends. Must be called outside all scopes.

        Args:
          timeout_s: seconds to wait until the chief accepts connections.

        Raises:
          StartupError: the chief did not appear, or it rejected this task.
          PeerLostError: the chief was killed, or its machine was lost.
        """
        load_ray()
        tasks = [Task(job, index) for job in self._spec.jobs for index in self._spec.task_indices(job)]
        secret = secret_of([self._spec.task_address(task.type, task.index) for task in tasks])
        processes = OwnedProcesses()
        try:
            with Entrance(self._chief, secret, _resource(self._task), timeout_s) as chief:
                if not isinstance(place := chief.message, MeetingPlace):
                    raise StartupError(
                        f"Server({self._task}).join()",
                        f"the chief, {self._chief}, exited before all tasks had joined, or is waiting for one of them.",
                        "look at the output of the chief",
                    )
                token = secret.proof(_RAY_TOKEN, place.salt) if place.salt else ""
                # Each task needs its own temporary folder: nodes that start together on one machine would choose the same
                # names in a common one.
                for tries_left in reversed(range(_TRIES)):
                    node = self._start(place.ray, token, processes.marked)
                    try:
                        if self._stay(chief, node, is_last=not tries_left):
                            break
                    finally:
                        _end(node)
                        processes.marked.end()
                if not chief.has_said_so:
                    raise PeerLostError(
                        f"Server({self._task}).join()",
                        f"the chief, {self._chief}, ended without closing its strategy: it was killed, or its machine was lost.",
                        "start this task again, as phalanx run --max-restarts does, if the chief starts again",
                    )
        finally:
            processes.close(_GRACE_S)

    @property
    def _chief(self) -> str:
        return self._spec.task_address("chief", 0)

    def _start(self, ray: str, token: str, processes: MarkedProcesses) -> subprocess.Popen[str]:
        host, _ = split(self._spec.task_address(self._task.type, self._task.index))
        variables = dict(os.environ)
        # A Ray that the user has started on the chief has the token of the user.
        if token:
            variables.pop("RAY_AUTH_TOKEN", None)
            variables |= token_variables(processes.folder, token)
        return subprocess.Popen(
            [
                *RAY_START,
                f"--address={ray}",
                f"--node-ip-address={LOOPBACK if is_loopback(ray) else numeric(host)}",
                f"--resources={json.dumps({_resource(self._task): 1})}",
                f"--temp-dir={processes.folder}/ray",
                "--block",
                "--disable-usage-stats",
            ],
            # The chief accepts connections already, so a failure that lasts this long is permanent.
            env={**variables, **processes.variables, "RAY_gcs_server_port_wait_time_s": "20"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _stay(self, chief: Entrance, node: subprocess.Popen[str], *, is_last: bool) -> bool:
        """Waits until the chief ends.

        Returns:
          True if the chief has ended. False if Ray has ended first, and another try may help.

        Raises:
          StartupError: Ray has ended first, and another try would not help.
        """
        began = time.monotonic()
        while chief.is_open(_STAY_S):
            if node.poll() is not None:
                # Ray may have ended because the chief did, whose connection ends a moment later.
                if not chief.is_open(_STAY_S):
                    return True
                text = node.stdout.read() if node.stdout else ""
                # On a busy machine, Ray's own processes may miss its time limits, which cannot be set.
                if not is_last and re.search("exited unexpectedly|timed out during startup", text):
                    return False
                raise StartupError(
                    f"Server({self._task}).join()",
                    f"Ray ended after {time.monotonic() - began:.0f} s:\n{text.strip()[-2000:]}",
                    "the same versions of Python and Ray as the chief",
                )
        return True


def _started(kind: type) -> type:
    """Returns an actor class that sets the number of XLA's threads before `kind` imports JAX.

    XLA's CPU client reads `NPROC` at startup. Without it, every process would start one thread per core of the machine.
    """

    class Started(kind):
        def __init__(self, cores: int | None, *args: PyTree) -> None:
            if cores is not None:
                os.environ["NPROC"] = str(cores)
            super().__init__(*args)

    Started.__name__ = Started.__qualname__ = kind.__name__
    return Started


def _needs(ray: Ray, workers: int, ps: int, resources: Mapping[str, Mapping[str, float]] | None) -> Needs:
    """Returns the resources of each worker and server in a Ray cluster. See `ParameterServerStrategy`."""
    if resources is None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores = cores_per_process([int(node.get("CPU", 0)) for node in nodes], workers + ps)
        has_gpus = needs_gpus(os.environ) and any("GPU" in node for node in nodes)
        resources = {"worker": {"CPU": 1, "GPU": 1}} if has_gpus else dict.fromkeys(("worker", "ps"), {"CPU": cores})
    jobs = [("worker", "worker")] * workers + [("parameter server", "ps")] * ps
    return [(name, resources.get(job, {"CPU": 1})) for name, job in jobs]


def _version() -> str:
    """Returns the version of Phalanx on this node."""
    return str(importlib.import_module("phalanx").__version__)


def _resource(task: Task) -> str:
    return f"phalanx_{task.type}_{task.index}"


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process: with SIGTERM, and with SIGKILL after a grace period."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@functools.cache
def _folder_of_launcher() -> str | None:
    """Returns the folder of processes that outlive this one; None without a launcher that starts this script again.

    Removes the variable, so that programs that this one starts do not take the processes for theirs.
    """
    return os.environ.pop(SERVERS_FOLDER, None)


_numbers = itertools.count()
"""The number of the next cluster: a script that starts again creates its strategies in the same order."""

_open: list[RayCluster] = []
"""The open clusters, which share one Ray session."""


def _require_alone(spec: ClusterSpec | None) -> None:
    """Checks that a strategy can be created in addition to those that are open.

    Raises:
      ContextError: an open strategy or the new one uses a cluster, whose tasks work for one strategy at a time.
    """
    if _open and (spec is not None or any(cluster._spec is not None for cluster in _open)):
        raise ContextError(
            "a second ParameterServerStrategy in this process",
            "one of the two strategies uses the tasks of a cluster, which work for one strategy at a time.",
            "call strategy.close() of the first strategy before",
        )
