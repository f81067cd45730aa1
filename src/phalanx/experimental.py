# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.distribute.experimental`."""

from phalanx.input.placement import ValueContext
from phalanx.options import AutoShardPolicy, CommunicationImplementation, CommunicationOptions
from phalanx.strategies.central_storage import CentralStorageStrategy
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]
