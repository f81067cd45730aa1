# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy`: variables on parameter servers, steps on workers, asynchronously."""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import override

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.compat import Variable
from phalanx.errors import ClusterError, ContextError, InvalidArgumentError, arguments, shown
from phalanx.input.sources.functions import InputContext
from phalanx.mesh.devices import Held
from phalanx.mesh.topology import Topology
from phalanx.options import RunOptions
from phalanx.servers.homes import Homes
from phalanx.servers.partitioners import Partitioner
from phalanx.servers.ray import RayCluster
from phalanx.strategies.base import Strategy
from phalanx.strategies.single import OneDeviceStrategy

_START_S = 600.0


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: variables live on parameter servers, and any worker does the next step.

    Must be made outside all scopes, in the process that coordinates. Variables of its scope move to the servers when a scheduled step first
    uses them; read or assigned here, they are read or assigned there. Steps are scheduled by a
    `phalanx.coordinator.ClusterCoordinator`; `run` outside of one does a step on some worker and waits for it.

    Args:
      cluster_resolver: of a cluster with a chief, which is this process, workers and parameter servers, where `phalanx.Server` runs. None
        reads TF_CONFIG, and where there is none starts the processes on this machine.
      variable_partitioner: into how many shards a variable is divided, from its shape and dtype: one of
        `phalanx.experimental.partitioners`, or a function like them; of one variable a server gets one shard at most.
      workers: how many workers to start on this machine.
      ps: how many parameter servers.
      max_staleness: how many updates of others may be applied between the moment a step takes the variables and the moment its own
        update is. None for any number; 0 for synchronous training, where the steps of all workers are one update by the mean of their gradients.
      snapshot_every_s: how often what the servers hold is copied to this process, so that a server that dies is
        restarted with it; None for never.
      worker_timeout_s: for how many seconds a worker or a parameter server may give no sign of life, and a worker may take for one step,
        one batch or its dataset function. A worker that is silent is replaced; the other cases are errors.
      dashboard: whether to start Ray's.

    Raises:
      ClusterError: a cluster without a chief, a worker or a parameter server.
      StartupError: tasks of the cluster did not join.
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
    ) -> None:
        super().__init__()
        for name, count in (("workers", workers), ("ps", ps)):
            arguments.integer(name, count, kind="a whole number, at least 1", hint=f"{name}=2")
        if max_staleness is not None:
            kind = "a whole number, 0 or more, or None"
            arguments.integer("max_staleness", max_staleness, least=0, kind=kind, hint="max_staleness=4")
        for name, seconds in (("snapshot_every_s", snapshot_every_s), ("worker_timeout_s", worker_timeout_s)):
            arguments.seconds(name, seconds, hint=f"{name}=30.0")
        arguments.flag("dashboard", dashboard)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                f"variable_partitioner={shown(variable_partitioner)}",
                "must be callable.",
                "phalanx.experimental.partitioners.MinSizePartitioner(max_shards=2)",
            )
        spec = _cluster_of(cluster_resolver)
        if spec is not None:
            workers, ps = spec.num_tasks("worker"), spec.num_tasks("ps")
        self._resolver = cluster_resolver
        self._device = OneDeviceStrategy("cpu:0")
        self.max_staleness, self.worker_timeout_s = max_staleness, worker_timeout_s
        self.cluster = RayCluster(spec, workers, ps, _START_S, dashboard=dashboard)
        try:
            self.homes = Homes(
                self.cluster,
                self._device,
                variable_partitioner,
                max_staleness=max_staleness,
                snapshot_every_s=snapshot_every_s,
                timeout_s=worker_timeout_s,
            )
        except BaseException:
            self.cluster.close()
            raise
        self._before_close: list[Callable[[], None]] = []
        self._close = weakref.finalize(self, _closed, self.cluster, self.homes, self._before_close)

    def close(self) -> None:
        """Ends workers and parameter servers; what the variables hold is lost. May be called in any context."""
        self._close()

    def before_close(self, end: Callable[[], None]) -> None:
        """Lets `end()` be called before workers and parameter servers are ended. May be called in any context."""
        self._before_close.append(end)

    @property
    @override
    def topology(self) -> Topology:
        return self._device.topology

    @property
    @override
    def storage(self) -> Topology:
        """Where variables are made, before they move to the servers.

        Raises:
          ContextError: the strategy was closed.
        """
        self.homes.servers.require_open()
        return self._device.topology

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None for processes on this machine. May be called in any context."""
        return self._resolver

    @property
    @override
    def tasks(self) -> tuple[str, ...]:
        jobs = (("worker", self.cluster.workers), ("ps", self.cluster.ps))
        return tuple(f"{job}:{i}" for job, count in jobs for i in range(count))

    @override
    def held(self, variable: Variable) -> list[Held]:
        held = self.homes.held(variable)
        return super().held(variable) if held is None else held

    @override
    def execute(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: RunOptions) -> Any:
        if options.eager:
            raise ContextError(
                "RunOptions(eager=True) under ParameterServerStrategy",
                "steps run as programs on workers.",
                "strategy.run(fn, args=(...)) without it",
            )
        return _runners[-1](self, fn, args, kwargs)

    @override
    def __reduce__(self) -> Any:
        return WorkerSide, ()

    @override
    def __repr__(self) -> str:
        return f"ParameterServerStrategy(workers={self.cluster.workers}, ps={self.cluster.ps})"


_runners: list[Callable[..., Any]] = []


def on_run(run: Callable[..., Any]) -> None:
    """Lets `run(strategy, fn, args, kwargs)` do what is run outside of scheduled steps."""
    _runners.append(run)


class WorkerSide:
    """What a dataset function that uses the strategy finds in its place on a worker, where nothing is to be distributed."""

    num_replicas_in_sync = 1

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns the dataset as it is."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """Returns the dataset of this worker, which is its own input pipeline."""
        return dataset_fn(InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1))

    experimental_distribute_datasets_from_function = distribute_datasets_from_function


def _cluster_of(resolver: ClusterResolver | None) -> ClusterSpec | None:
    """Returns the cluster, if there is one."""
    if resolver is None:
        if not os.environ.get("TF_CONFIG"):
            return None
        resolver = TFConfigClusterResolver()
    if not isinstance(resolver, ClusterResolver):
        raise InvalidArgumentError(
            f"cluster_resolver={shown(resolver)}",
            "must be a ClusterResolver.",
            "cluster_resolver=phalanx.cluster_resolver.TFConfigClusterResolver()",
        )
    spec = resolver.cluster_spec()
    hint = '{"chief": ["host0:12345"], "worker": ["host1:12345"], "ps": ["host2:12345"]}'
    for job, name in (("chief", "chief"), ("worker", "worker"), ("ps", "parameter server")):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise ClusterError(f"ParameterServerStrategy over {spec!r}", f"there must be at least one {name}.", hint)
    if unknown := set(spec.jobs) - {"chief", "worker", "ps", "evaluator"}:
        raise ClusterError(
            f"ParameterServerStrategy over {spec!r}",
            f"jobs are chief, worker, ps and evaluator, not {sorted(unknown)}.",
            hint,
        )
    if resolver.task_type not in (None, "chief"):
        raise ClusterError(
            f"ParameterServerStrategy in task {resolver.task_type}:{resolver.task_id}",
            "the chief makes the strategy; workers and parameter servers wait for its work.",
            f'phalanx.Server(cluster_spec, "{resolver.task_type}", {resolver.task_id}).join()',
        )
    return spec


def _closed(cluster: RayCluster, homes: Homes, before: Sequence[Callable[[], None]]) -> None:
    for end in before:
        end()
    homes.servers.close()
    cluster.close()
