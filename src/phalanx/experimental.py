# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.distribute.experimental`."""

from typing import final

import phalanx.keras  # noqa: F401  (It takes over `fit`, and a script may name no strategy but these.)
from phalanx import coordinator
from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.input.placement import ValueContext
from phalanx.mesh.device_assignment import DeviceAssignment
from phalanx.options import AutoShardPolicy, CommunicationImplementation, CommunicationOptions
from phalanx.servers import partitioners
from phalanx.servers.sharded import ShardedVariable
from phalanx.strategies import multi_worker, tpu
from phalanx.strategies.central_storage import CentralStorageStrategy
from phalanx.strategies.parameter_server import ParameterServerStrategy

CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions


@final
class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """`phalanx.MultiWorkerMirroredStrategy` with the arguments that it had in TensorFlow 2.3.

    Args:
      communication: which collectives to use between processes.
      cluster_resolver: as there.

    Raises:
      ClusterError, InvalidArgumentError, StartupError: as there.

    Source: tf.distribute.experimental.MultiWorkerMirroredStrategy.

    Example:
      >>> import phalanx
      >>> phalanx.experimental.MultiWorkerMirroredStrategy("auto").num_replicas_in_sync > 0
      True
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        options = CommunicationOptions(implementation=CommunicationImplementation.parse(communication))
        super().__init__(cluster_resolver, options)


@final
class TPUStrategy(tpu.TPUStrategy):
    """`phalanx.TPUStrategy` with the arguments that it had before TensorFlow 2.3.

    Args:
      tpu_cluster_resolver: as there.
      device_assignment: as `experimental_device_assignment` there.

    Raises:
      ClusterError, DeviceError, InvalidArgumentError, StartupError: as there.

    Source: tf.distribute.experimental.TPUStrategy.

    Example:
      >>> import phalanx, phalanx.testing
      >>> _ = phalanx.testing.virtual_topology((2, 2))
      >>> phalanx.experimental.TPUStrategy().num_replicas_in_sync
      4
    """

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
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "ShardedVariable",
    "TPUStrategy",
    "ValueContext",
    "coordinator",
    "partitioners",
]
