# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.tpu.experimental`."""

from phalanx._src.cluster.resolvers.tpu import TPUSystemMetadata
from phalanx._src.mesh.device_assignment import DeviceAssignment, DeviceOrderMode
from phalanx._src.mesh.device_assignment import TPUTopology as Topology
from phalanx._src.mesh.tpu_system import initialize_tpu_system, shutdown_tpu_system
from phalanx.errors.names import suggest_names

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

suggest_names(__name__)
