# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.distribute.experimental`."""

from typing import final

import phalanx.keras  # noqa: F401  (Patches `fit`. A script may import its strategies only from this module.)
from phalanx import coordinator
from phalanx._src.checkpoint.preemption import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from phalanx._src.cluster.processes.training import has_ended as has_training_ended
from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.watch.pace import StepTimes
from phalanx._src.cluster.watch.watch import step_times
from phalanx._src.collectives.local_updates import DiLoCo, LocalSGD
from phalanx._src.input.placement import ValueContext
from phalanx._src.mesh.device_assignment import DeviceAssignment
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import AutoShardPolicy, CommunicationImplementation, CommunicationOptions, PowerSGD, TopK
from phalanx._src.parameter_server.variables import partitioners
from phalanx._src.parameter_server.variables.sharded import ShardedVariable
from phalanx._src.strategies import multi_worker, tpu
from phalanx._src.strategies.central_storage import CentralStorageStrategy
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx.errors.names import suggest_names

# The older names of both classes, which tf.distribute.experimental has too.
CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions


@final
class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """Trains synchronously on several processes, with the constructor arguments of TensorFlow 2.3.

    See `phalanx.MultiWorkerMirroredStrategy`. Must be created outside all scopes.

    Args:
      communication: the collectives to use between processes, for example "auto".
      cluster_resolver: see `phalanx.MultiWorkerMirroredStrategy`.

    Raises:
      ClusterError, InvalidArgumentError, StartupError: see `phalanx.MultiWorkerMirroredStrategy`.

    Source: tf.distribute.experimental.MultiWorkerMirroredStrategy.

    Example:
      >>> import phalanx
      >>> phalanx.experimental.MultiWorkerMirroredStrategy("auto").num_replicas_in_sync > 0
      True
    """

    _explanation = "its arguments are those of TensorFlow 2.3."

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        options = CommunicationOptions(implementation=CommunicationImplementation.parse(communication))
        super().__init__(cluster_resolver, options)


@final
class TPUStrategy(tpu.TPUStrategy):
    """Trains synchronously on TPUs, with the constructor arguments of TensorFlow before version 2.3.

    See `phalanx.TPUStrategy`. Must be created outside all scopes.

    Args:
      tpu_cluster_resolver: see `phalanx.TPUStrategy`.
      device_assignment: see `experimental_device_assignment` of `phalanx.TPUStrategy`.

    Raises:
      ClusterError, DeviceError, InvalidArgumentError, StartupError: see `phalanx.TPUStrategy`.

    Source: tf.distribute.experimental.TPUStrategy.

    Example:
      >>> import phalanx, phalanx.testing
      >>> _ = phalanx.testing.virtual_topology((2, 2))
      >>> phalanx.experimental.TPUStrategy().num_replicas_in_sync
      4
    """

    _explanation = "its arguments are those of TensorFlow before version 2.3."

    def __init__(
        self, tpu_cluster_resolver: ClusterResolver | None = None, device_assignment: DeviceAssignment | None = None
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DiLoCo",
    "LocalSGD",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PowerSGD",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "ShardedVariable",
    "StepTimes",
    "TPUStrategy",
    "TerminationConfig",
    "TopK",
    "Topology",
    "ValueContext",
    "coordinator",
    "has_training_ended",
    "partitioners",
    "step_times",
]

suggest_names(__name__)
