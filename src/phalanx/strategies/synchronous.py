# SPDX-License-Identifier: Apache-2.0
"""The base class of the strategies whose devices are known when they are created."""

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from phalanx.collectives.compression import Compression, compression_of
from phalanx.collectives.cross_device import CrossDeviceOps, NcclAllReduce
from phalanx.errors import InvalidArgumentError, arguments
from phalanx.mesh import bootstrap
from phalanx.mesh.layout import AbstractLayout
from phalanx.mesh.topology import Topology
from phalanx.options import CommunicationOptions
from phalanx.strategies.base import Strategy


class SynchronousStrategy(Strategy):
    """Runs the replicas of a topology in lockstep and reduces gradients if there are several replicas.

    Args:
      topology: the replicas and their devices.
      cross_device_ops: the algorithm that reduces gradients over the replicas. None selects the fastest one.
      options: options for the reduction of gradients.

    Raises:
      InvalidArgumentError: `options` has the wrong type, or chooses a compression that does not go with the rest.
    """

    def __init__(
        self,
        topology: Topology,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__()
        if options is not None:
            arguments.instance(
                "communication_options",
                options,
                CommunicationOptions,
                'communication_options=phalanx.experimental.CommunicationOptions(compression="int8")',
            )
        if topology.num_workers == 1:
            bootstrap.warn_if_alone(type(self).__name__)
        self._topology, self._chosen_ops, self._options = topology, cross_device_ops, options
        self._compression = compression_of(options) if options else None
        if options and self._compression:
            _require_plain_sums(options, topology, cross_device_ops)

    @property
    @override
    def topology(self) -> Topology:
        return self._topology

    @property
    def layout(self) -> AbstractLayout | None:
        """The layout that shards variables over mesh axes, or None. May be called in any context."""
        return self._topology.layout

    @property
    @override
    def cross_device_ops(self) -> CrossDeviceOps | None:
        if self.num_replicas_in_sync == 1:
            return None
        return self._chosen_ops or _fastest_ops(self.topology)

    @property
    @override
    def communication_options(self) -> CommunicationOptions | None:
        return self._options

    @property
    @override
    def compression(self) -> Compression | None:
        return self._compression

    @contextmanager
    def placed_on(self, topology: Topology) -> Iterator[None]:
        """Traces programs in the context for other devices. They may be absent, because nothing is placed on them."""
        own, self._topology = self._topology, topology
        try:
            yield
        finally:
            self._topology = own


def _require_plain_sums(options: CommunicationOptions, topology: Topology, ops: CrossDeviceOps | None) -> None:
    """Checks that a compression replaces nothing that the user has chosen."""
    call = f"CommunicationOptions(compression={options.compression!r})"
    if ops is not None:
        raise InvalidArgumentError(
            f"{call} with cross_device_ops={type(ops).__name__}()",
            "both say how gradients are sent.",
            "leave one of them out",
        )
    if topology.axes or topology.layout is not None:
        raise InvalidArgumentError(
            f"{call} with a layout or a model axis",
            "only gradients that every replica holds whole can be compressed.",
            "leave out layout and model_axis, or compression",
        )


def _fastest_ops(topology: Topology) -> CrossDeviceOps:
    """Returns the fastest reduction of gradients on these devices."""
    # With a model axis nothing is packed, because arrays that are sharded over the devices of a replica would have to be
    # gathered first.
    if topology.axes:
        return NcclAllReduce(num_packs=0)
    # Between processes of CPUs and between slices of TPUs, one buffer is faster than several: a message costs more than a copy
    # into the buffer. Elsewhere XLA joins messages itself, and packing saves time only for small arrays.
    are_cpus = all(d.platform == "cpu" for d in topology.devices)
    slices = {getattr(d, "slice_index", 0) for d in topology.devices if d.platform == "tpu"}
    is_slow = topology.num_workers > 1 and (are_cpus or len(slices) > 1)
    return NcclAllReduce(num_packs=1 if is_slow else None)
