# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.tpu.experimental`."""

from phalanx.device_assignment import DeviceAssignment, Topology
from phalanx.tpu.system import initialize_tpu_system, shutdown_tpu_system

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]
