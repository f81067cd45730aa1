# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy`: variables on parameter servers, steps on workers, asynchronously."""

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, final

from typing_extensions import override

from phalanx._src import compat
from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.cluster.spec import ClusterSpec
from phalanx._src.collectives.local_updates import refuse
from phalanx._src.compat import Variable
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.mesh.devices import Held
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import RunOptions
from phalanx._src.parameter_server.processes.ray import RayCluster
from phalanx._src.parameter_server.scheduling.scheduler import Scheduler
from phalanx._src.parameter_server.variables.homes import Homes
from phalanx._src.parameter_server.variables.partitioners import Partitioner
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.single import OneDeviceStrategy
from phalanx._src.tracing import context
from phalanx.errors import ClusterError, ContextError, InvalidArgumentError, arguments, shown
from phalanx.typing import PyTree

T = TypeVar("T")

_PARTITIONER = "variable_partitioner=phalanx.experimental.partitioners.MinSizePartitioner(max_shards=2)"
_START_S = 600.0  # How long the coordinator waits until all tasks of a cluster have joined.


@final
class ParameterServerStrategy(Strategy):
    """Trains asynchronously: variables live on parameter servers, and each step runs on any free worker.

    Must be created outside all scopes, in the coordinator process. A `phalanx.coordinator.ClusterCoordinator` schedules
    steps. `run` outside of scheduled steps runs one step on a worker and waits for it. Variables created in the scope
    move to the servers when a scheduled step first uses them. From then on, reads and assignments in this process go to
    the servers. Under `phalanx run --max-restarts`, servers on this machine keep their variables for the next start of
    the script.

    Args:
      cluster_resolver: describes a cluster with a chief (this process), workers and parameter servers, on which
        `phalanx.Server` runs. None reads TF_CONFIG. Without TF_CONFIG, the processes start in the Ray cluster that the
        script has joined with `ray.init` or that RAY_ADDRESS names, or else on this machine. So they do in the evaluator
        of a cluster, which does not join the others.
      variable_partitioner: a function from shape and dtype of a variable to the number of shards along each dim, such
        as those in `phalanx.experimental.partitioners`. A server gets at most one shard of a variable.
      workers: number of workers to start on this machine or in the Ray cluster.
      ps: number of parameter servers to start there.
      max_staleness: number of updates of other steps that may be applied after a step has pulled the variables and
        before its own update is applied. None means no limit. 0 means synchronous training: the steps of all workers
        form one update, with the mean of their gradients.
      snapshot_every_s: interval in seconds at which the state of the servers is copied to this process. A server that
        dies is restarted from this copy. None means never.
      worker_timeout_s: time in seconds that a worker or parameter server may stay silent, and that a worker may take
        for one step, one batch or its dataset function. A silent worker is replaced. In the other cases an error is
        raised.
      dashboard: whether to start the Ray dashboard.
      resources: what one process of each job needs in a Ray cluster, as in `{"worker": {"CPU": 4, "GPU": 1}, "ps": {"CPU":
        2}}`. A job without an entry needs one CPU. None gives each worker a GPU if the cluster has some, and otherwise all
        processes the same number of cores. Has no effect on this machine and with TF_CONFIG.
      local_updates: must be None. Other strategies take it.

    Raises:
      InvalidArgumentError: a number is too small, or `local_updates` is not None.
      ClusterError: the cluster does not have a chief, a worker or a parameter server.
      StartupError: a task of the cluster did not join, or the Ray cluster has no room for the processes.
      MissingDependencyError: Ray is not installed.

    Source: tf.distribute.ParameterServerStrategy; Li et al. 2014 (OSDI).

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.ParameterServerStrategy(workers=1)
      >>> with strategy.scope():
      ...     steps = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
      >>> coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
      >>> step = lambda: steps.assign_add(1)
      >>> for _ in range(10):
      ...     _ = coordinator.schedule(step)
      >>> coordinator.join()
      >>> int(steps.value)
      10
      >>> strategy.close()
    """

    _explanation = (
        "parameter servers hold the variables, divided by variable_partitioner, and workers update them asynchronously."
    )
    _instead = MappingProxyType(dict.fromkeys(("layout", "model_axis"), _PARTITIONER))

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | Callable[..., Sequence[int]] | None = None,
        *,
        workers: int = 2,
        ps: int = 1,
        max_staleness: int | None = None,
        snapshot_every_s: float | None = None,
        worker_timeout_s: float = 30.0,
        dashboard: bool = False,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        local_updates: None = None,
    ) -> None:
        refuse(local_updates, type(self).__name__, "workers send each update to the servers, which hold all variables.")
        for name, count in (("workers", workers), ("ps", ps)):
            arguments.integer(name, count, kind="an integer of at least 1", hint=f"{name}=2")
        if max_staleness is not None:
            kind = "an integer of at least 0, or None"
            arguments.integer("max_staleness", max_staleness, least=0, kind=kind, hint="max_staleness=4")
        for name, seconds in (("snapshot_every_s", snapshot_every_s), ("worker_timeout_s", worker_timeout_s)):
            arguments.seconds(name, seconds, hint=f"{name}=30.0")
        arguments.flag("dashboard", dashboard)
        if resources is not None:
            _check_resources(resources)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                f"variable_partitioner={shown(variable_partitioner)}",
                "must be callable.",
                _PARTITIONER,
            )
        spec = _cluster_of(cluster_resolver)
        if spec is not None:
            workers, ps = spec.num_tasks("worker"), spec.num_tasks("ps")
        self._resolver = cluster_resolver
        # Variables are created on this device, and steps and updates are traced for it. Workers and servers run them.
        self._device = OneDeviceStrategy("cpu:0")
        self.max_staleness, self.worker_timeout_s = max_staleness, worker_timeout_s
        self.cluster = RayCluster(spec, workers, ps, _START_S, dashboard=dashboard, resources=resources)
        try:
            self.homes = Homes(
                self.cluster,
                self._device,
                variable_partitioner,
                max_staleness=max_staleness,
                snapshot_every_s=snapshot_every_s,
                timeout_s=worker_timeout_s,
            )
        # Also after Ctrl-C: Ray runs already, and its processes would stay as long as this one.
        except BaseException:
            self.cluster.close()
            raise
        # At the end, because the base class counts a strategy among the living ones.
        super().__init__()
        self._scheduler: Scheduler | None = None
        # Several threads may schedule the first step, but the workers start once.
        self._starting = threading.Lock()
        # If the script ends without `close`, its next start may need the servers. At last, the launcher ends them.
        if not self.cluster.outlives:
            weakref.finalize(self, _closed, self.cluster, self.homes)

    def close(self) -> None:
        """Stops all workers and parameter servers. The values of variables are lost, even for the next start of the script.

        May be called in any context.
        """
        if self._scheduler is not None:
            self._scheduler.stop()
        _closed(self.cluster, self.homes)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the workers. The first access starts the workers. May be called in any context.

        Raises:
          ContextError: the strategy was closed.
          StartupError: a worker exited during its start.
        """
        self.homes.servers.require_open()
        with self._starting:
            if self._scheduler is None:
                timeout_s, waits = self.worker_timeout_s, self.max_staleness is not None
                self._scheduler = Scheduler(self, self.homes, self.cluster, timeout_s=timeout_s, waits=waits)
            return self._scheduler

    @property
    @override
    def topology(self) -> Topology:
        return self._device.topology

    @property
    @override
    def storage(self) -> Topology:
        """The device on which variables are created, before they move to the servers.

        Raises:
          ContextError: the strategy was closed.
        """
        self.homes.servers.require_open()
        # The same as `topology`, but an overridden `storage` makes `updates` AFTER_PROGRAM, so that servers apply them.
        return self._device.topology

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that describes the cluster. None for processes on this machine. May be called in any context."""
        return self._resolver

    @property
    @override
    def tasks(self) -> tuple[str, ...]:
        jobs = (("worker", self.cluster.workers), ("ps", self.cluster.ps))
        return tuple(f"{job}:{i}" for job, count in jobs for i in range(count))

    @override
    def _notes(self) -> Sequence[str]:
        counts = [(self.cluster.workers, "worker"), (self.cluster.ps, "parameter server")]
        return [" and ".join(f"{count} {job}{'s' * (count > 1)}" for count, job in counts)]

    @override
    def held(self, variable: Variable) -> list[Held]:
        held = self.homes.held(variable)
        return super().held(variable) if held is None else held

    @override
    def execute(self, fn: Callable[..., Any], args: PyTree, kwargs: dict[str, Any], options: RunOptions) -> PyTree:
        if options.eager:
            raise ContextError(
                "RunOptions(eager=True) under ParameterServerStrategy",
                "workers run compiled programs, not Python code.",
                "strategy.run(fn, args=(...)) without RunOptions",
            )
        return self.scheduler.run(fn, args, kwargs)

    @override
    def __reduce__(self) -> Any:
        return WorkerSide, ()

    @override
    def __repr__(self) -> str:
        return f"ParameterServerStrategy(workers={self.cluster.workers}, ps={self.cluster.ps})"


class WorkerSide:
    """Replaces the strategy when a dataset function that refers to it runs on a worker. It distributes nothing."""

    num_replicas_in_sync = 1

    def experimental_distribute_dataset(self, dataset: T, options: object = None) -> T:
        """Returns the dataset unchanged."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], T], options: object = None) -> T:
        """Calls `dataset_fn` for one input pipeline, because each worker reads its own dataset."""
        return dataset_fn(InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1))

    experimental_distribute_datasets_from_function = distribute_datasets_from_function


def _check_resources(resources: Mapping[str, Mapping[str, float]]) -> None:
    """Checks what the processes of each job need in a Ray cluster.

    Raises:
      InvalidArgumentError: it does not map jobs to names and amounts.
    """
    hint = 'resources={"worker": {"CPU": 4, "GPU": 1}, "ps": {"CPU": 2}}'
    if not isinstance(resources, Mapping) or not resources.keys() <= {"worker", "ps"}:
        raise InvalidArgumentError(f"resources={shown(resources)}", 'must have the keys "worker" and "ps".', hint)
    for job, needs in resources.items():
        if not isinstance(needs, Mapping) or not needs or not all(isinstance(name, str) for name in needs):
            problem = 'must name resources of Ray, such as "CPU".'
            raise InvalidArgumentError(f'resources["{job}"]={shown(needs)}', problem, hint)
        for name, amount in needs.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
                problem = "must be a number above 0."
                raise InvalidArgumentError(f'resources["{job}"]["{name}"]={shown(amount)}', problem, hint)


def _cluster_of(resolver: ClusterResolver | None) -> ClusterSpec | None:
    """Returns the cluster that the resolver or TF_CONFIG describes, or None without others in it and in an evaluator.

    Raises:
      InvalidArgumentError: `resolver` is not a resolver.
      ClusterError: the cluster does not have the required jobs, or this process is not the chief.
    """
    if resolver is None:
        if not os.environ.get("TF_CONFIG"):
            return None
        resolver = TFConfigClusterResolver()
        if resolver.cluster_spec().jobs == ["worker"] and resolver.cluster_spec().num_tasks("worker") == 1:
            return None  # The only process of `phalanx run`.
    if not isinstance(resolver, ClusterResolver):
        raise InvalidArgumentError(
            f"cluster_resolver={shown(resolver)}",
            "must be a ClusterResolver.",
            "cluster_resolver=phalanx.cluster_resolver.TFConfigClusterResolver()",
        )
    if resolver.task_type == "evaluator":
        return None
    spec = resolver.cluster_spec()
    hint = '{"chief": ["host0:12345"], "worker": ["host1:12345"], "ps": ["host2:12345"]}'
    for job, name in (("chief", "chief"), ("worker", "worker"), ("ps", "parameter server")):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise ClusterError(f"ParameterServerStrategy over {spec!r}", f"there must be at least one {name}.", hint)
    if unknown := set(spec.jobs) - {"chief", "worker", "ps", "evaluator"}:
        raise ClusterError(
            f"ParameterServerStrategy over {spec!r}",
            f"the allowed jobs are chief, worker, ps and evaluator, not {sorted(unknown)}.",
            hint,
        )
    if resolver.task_type not in (None, "chief"):
        raise ClusterError(
            f"ParameterServerStrategy in task {resolver.task_type}:{resolver.task_id}",
            "only the chief creates the strategy, and sends work to workers and parameter servers.",
            f'phalanx.Server(cluster_spec, "{resolver.task_type}", {resolver.task_id}).join()',
        )
    return spec


def _take_over(variable: Variable) -> None:
    """Gives a new variable of a strategy its value from an earlier start, before the script reads it."""
    # A variable that a step creates has no value yet. It takes over its value when the step moves it to the servers.
    if context.has_strategy() and not compat.is_new(variable):
        strategy = context.get_strategy()
        if isinstance(strategy, ParameterServerStrategy):
            strategy.homes.take_over(variable)


# Keras creates variables without calling a strategy, so one function serves all strategies of the process.
compat.on_variable(_take_over)


def _closed(cluster: RayCluster, homes: Homes) -> None:
    # A function, because `weakref.finalize` would keep a strategy alive whose method it calls.
    homes.servers.close()
    cluster.close()
