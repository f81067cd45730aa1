# SPDX-License-Identifier: Apache-2.0
"""What the strategies share whose replicas run on devices that are known when they are made."""

from typing_extensions import override

from phalanx.collectives.cross_device import CrossDeviceOps, NcclAllReduce
from phalanx.mesh import bootstrap
from phalanx.mesh.layout import AbstractLayout
from phalanx.mesh.topology import Topology
from phalanx.strategies.base import Strategy


class SynchronousStrategy(Strategy):
    """One replica on each device of a topology, and gradients that cross devices where there are several.

    Args:
      topology: the devices.
      cross_device_ops: how gradients cross them.
    """

    def __init__(self, topology: Topology, cross_device_ops: CrossDeviceOps | None = None) -> None:
        super().__init__()
        if topology.num_workers == 1:
            bootstrap.warn_if_alone(type(self).__name__)
        self._topology, self._cross_device_ops = topology, cross_device_ops

    @property
    @override
    def topology(self) -> Topology:
        return self._topology

    @property
    def layout(self) -> AbstractLayout | None:
        """How variables are divided over the axes of the mesh; None where every device holds them whole. In any context."""
        return self._topology.layout

    @property
    @override
    def cross_device_ops(self) -> CrossDeviceOps | None:
        return self._cross_device_ops if self.num_replicas_in_sync > 1 else None


def ops_within(topology: Topology) -> CrossDeviceOps:
    """Returns how gradients cross the devices of one process best."""
    # Packing costs more than it saves there, but for small arrays. What is divided over the devices of a replica would have
    # to be gathered for it.
    return NcclAllReduce(num_packs=0 if topology.axes else None)
