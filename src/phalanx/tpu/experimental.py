# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.tpu.experimental`."""

from phalanx.cluster.resolvers.tpu import TPUSystemMetadata
from phalanx.mesh.device_assignment import DeviceAssignment, DeviceOrderMode
from phalanx.mesh.device_assignment import TPUTopology as Topology
from phalanx.mesh.tpu_system import initialize_tpu_system, shutdown_tpu_system

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
