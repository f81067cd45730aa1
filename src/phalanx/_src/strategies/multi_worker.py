# SPDX-License-Identifier: Apache-2.0
"""`MultiWorkerMirroredStrategy`: several processes, one replica per device."""

import math
from collections.abc import Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

import jax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.cluster.watch import membership
from phalanx._src.collectives.local_updates import LocalUpdates
from phalanx._src.mesh.layout import LayoutLike, layout_of
from phalanx._src.mesh.shares import Shares
from phalanx._src.mesh.topology import Topology, axes_of
from phalanx._src.options import CommunicationImplementation, CommunicationOptions, ElasticOptions
from phalanx._src.runtime import bootstrap
from phalanx._src.runtime.settings import settings
from phalanx._src.strategies.synchronous import SynchronousStrategy, check_choices
from phalanx.errors import InvalidArgumentError, arguments, shown

_HOLLOW_BYTES = 1 << 14
"""The size from which a variable gets no value in a process that has not joined the others yet."""


class MultiWorkerMirroredStrategy(SynchronousStrategy):
    """Trains synchronously on the devices of several processes, on one machine or several.

    Every process runs the same program and creates the strategy at the top, outside all scopes and before JAX uses a
    device. The constructor returns when all processes have connected. Variables get the initial values of the first
    worker. Without a cluster, and in the evaluator of a cluster, the strategy uses only the devices of this process.

    If the process has no SIGTERM handler, SIGTERM then raises `SystemExit(143)` in the main thread, so that `finally`
    blocks run.

    Args:
      cluster_resolver: describes the processes of the cluster and the task of this process. None reads TF_CONFIG, or
        the environment variables of Slurm, Kubernetes and other schedulers.
      communication_options: `bytes_per_pack`, `wire_dtype` and `compression` for gradients, `timeout_seconds` for the wait for other
        processes at the start and in a step, and `implementation`.
      stall_timeout_s: time in seconds after which a stall ends the job. If one process waits and no process makes
        progress for this time, all processes write the stacks of their threads, report which process stalled, and exit.
        None means `timeout_seconds`, else PHALANX_STALL_TIMEOUT_S, else 600.
      model_axis: name and size of a mesh axis over which XLA partitions each replica. The devices of a replica may belong to several
        processes, which then read the same rows.
      layout: which variables are sharded over which mesh axes, as in `MirroredStrategy`. With the axis "replica", the shards belong to
        all processes, and no process holds a whole variable.
      elastic: what to do so that a training run survives the loss of a process. None means `ElasticOptions()`, and "scale_batch"
        `ElasticOptions(scale_batch=True)`.
      local_updates: `LocalSGD` or `DiLoCo` of `phalanx.experimental`: replicas train separately for some steps. None aggregates
        gradients at every step.
      replica_weights: one number per replica, for devices of different speed: its share of each global batch is proportional to it.
        With "auto", the speeds are measured, and each iteration over a dataset begins with shares that follow them. None divides
        batches evenly.

    Raises:
      ClusterError: the cluster description is invalid, or has no task for this process.
      DeviceError: the processes have different numbers of devices.
      InvalidArgumentError: an argument has the wrong type, or the devices do not support `implementation`.
      StartupError: a process is missing, an address cannot be used, or JAX has already used its devices.

    Source: tf.distribute.MultiWorkerMirroredStrategy.

    Example:
      >>> import phalanx
      >>> phalanx.MultiWorkerMirroredStrategy().extended.should_checkpoint
      True
    """

    _explanation = "it trains on all devices of several processes."
    _instead = MappingProxyType(
        {
            "cross_device_ops": "communication_options=phalanx.experimental.CommunicationOptions(bytes_per_pack=1 << 20)",
            "devices": "phalanx run --devices-per-worker 2",
            "weight_update_sharding": "layout=phalanx.fully_sharded()",
        }
    )

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        stall_timeout_s: float | None = None,
        model_axis: tuple[str, int] | None = None,
        layout: LayoutLike = None,
        elastic: ElasticOptions | Literal["scale_batch"] | None = None,
        local_updates: LocalUpdates | None = None,
        replica_weights: Sequence[float] | str | None = None,
    ) -> None:
        resolver = cluster_resolver
        if resolver is None:
            # Without TF_CONFIG, this resolver describes an empty cluster, and the process trains alone.
            resolver = resolver_of_environment() or TFConfigClusterResolver()
        options = CommunicationOptions() if communication_options is None else communication_options
        if not isinstance(resolver, ClusterResolver):
            raise InvalidArgumentError(
                f"cluster_resolver={shown(cluster_resolver)}",
                "must be a ClusterResolver.",
                "cluster_resolver=phalanx.cluster_resolver.TFConfigClusterResolver()",
            )
        if not isinstance(options, CommunicationOptions):
            raise InvalidArgumentError(
                f"communication_options={shown(communication_options)}",
                "must be CommunicationOptions.",
                "communication_options=phalanx.experimental.CommunicationOptions(bytes_per_pack=1 << 20)",
            )
        arguments.seconds("stall_timeout_s", stall_timeout_s, hint="stall_timeout_s=600")
        if isinstance(elastic, str) and elastic == "scale_batch":
            elastic = ElasticOptions(scale_batch=True)
        if elastic is not None:
            hint = 'elastic="scale_batch", or elastic=phalanx.elastic.ElasticOptions(donate=False)'
            arguments.instance("elastic", elastic, ElasticOptions, hint)
        # Before the processes meet: an error of one of them would end all of them.
        check_choices(options, local_updates, replica_weights)
        if isinstance(replica_weights, (list, tuple)) and membership.is_elastic():
            raise InvalidArgumentError(
                f"replica_weights={shown(replica_weights)} in an elastic group",
                "the number of replicas changes when processes leave and join.",
                'replica_weights="auto"',
            )
        self._axes, self._layout = axes_of(model_axis), layout_of(layout)
        self._elastic = elastic or ElasticOptions()
        self._stall_timeout_s = stall_timeout_s or options.timeout_seconds
        # Before `jax.devices()`, because JAX cannot join a cluster after it has used its devices.
        bootstrap.start(resolver, options.timeout_seconds, self._stall_timeout_s)
        if membership.is_elastic():
            _require_replicas(self._axes, len(jax.local_devices()))
        topology = self._present_topology()
        _require_implementation(options.implementation, topology)
        if local_updates is not None and membership.is_elastic():
            _require_own_groups(local_updates.replicas_per_group, len(topology.local_replicas))
        super().__init__(topology, options=options, local_updates=local_updates, replica_weights=replica_weights)
        self._resolver = resolver
        # Python, NumPy and Keras must shuffle alike in all processes, even if the program sets no seed.
        if topology.num_workers > 1:
            with bootstrap.without_lines_of_gloo():
                compat.agree_on_seed(lambda seed: topology.from_chief([seed])[0])

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that describes the cluster. May be called in any context."""
        return self._resolver

    @property
    def elastic(self) -> ElasticOptions:
        """The argument `elastic`. May be called in any context."""
        return self._elastic

    @property
    @override
    def donates(self) -> bool:
        return self._elastic.donate

    @property
    def stall_timeout_s(self) -> float | None:
        """The argument `stall_timeout_s`, or the time limit of the communication options. May be called in any context."""
        return self._stall_timeout_s

    def move(self, source: int) -> None:
        """Trains on the present JAX devices from now on, which are those of another group of processes.

        Args:
          source: rank of the process whose values the variables have.
        """
        # Measured weights are dropped, because the group had other replicas when they were measured.
        self._topology = self._present_topology(source, is_measured=self._topology.shares.is_measured)

    def _present_topology(self, source: int = 0, *, is_measured: bool = False) -> Topology:
        """Returns the topology of the present JAX devices, whose replicas have equal shares of a batch at first."""
        if self._layout is not None and membership.is_elastic():
            # A process that joins the others gets its shards from them. Until then it would hold the whole model.
            settings.hollow_bytes = _HOLLOW_BYTES if membership.is_late() else None
        shares = Shares(is_measured=is_measured)
        topology = Topology(tuple(jax.devices()), self._axes, self._layout, source, shares=shares)
        if self._elastic.scale_batch and membership.is_elastic():
            shares.part = Fraction(topology.num_workers, membership.most_workers())
        return topology


def _require_replicas(axes: Sequence[tuple[str, int]], devices: int) -> None:
    per_replica, sizes = math.prod(size for _, size in axes), membership.sizes()
    if wrong := [count for count in sizes if count * devices % per_replica]:
        raise InvalidArgumentError(
            f"model_axis={axes[0]} in an elastic group of {sizes[0]} to {sizes[-1]} workers",
            f"with {wrong[0]} workers, their {wrong[0] * devices} devices cannot be divided into replicas of {per_replica}.",
            f"phalanx run --devices-per-worker {per_replica}",
        )


def _require_own_groups(size: int, devices: int) -> None:
    if devices % size:
        raise InvalidArgumentError(
            f"replicas_per_group={size} in an elastic group whose processes have {devices} devices",
            "the number of processes changes, so no group of replicas may have devices of two.",
            f"replicas_per_group={math.gcd(size, devices)}, or --devices-per-worker {size}",
        )


def _require_implementation(implementation: CommunicationImplementation, topology: Topology) -> None:
    platform = topology.devices[0].platform
    # RING stands for gloo, and NCCL for the collectives of any accelerator, as in `NcclAllReduce`.
    has = CommunicationImplementation.RING if platform == "cpu" else CommunicationImplementation.NCCL
    if implementation not in (CommunicationImplementation.AUTO, has):
        raise InvalidArgumentError(
            f"implementation={implementation}",
            f"devices of platform {platform!r} support only {has.name}.",
            "implementation=CommunicationImplementation.AUTO",
        )
