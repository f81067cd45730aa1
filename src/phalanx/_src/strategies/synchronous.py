# SPDX-License-Identifier: Apache-2.0
"""The base class of the strategies whose devices are known when they are created."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from phalanx._src.collectives.compression import Compression, compression_of
from phalanx._src.collectives.cross_device import CrossDeviceOps, NcclAllReduce
from phalanx._src.collectives.local_updates import LocalUpdates, require_groups
from phalanx._src.mesh.layout import AbstractLayout
from phalanx._src.mesh.shares import Shares
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import CommunicationOptions
from phalanx._src.runtime import bootstrap
from phalanx._src.strategies.base import Strategy
from phalanx.errors import InvalidArgumentError, arguments, shown


class SynchronousStrategy(Strategy):
    """Runs the replicas of a topology in lockstep and reduces gradients if there are several replicas.

    Args:
      topology: the replicas and their devices.
      cross_device_ops: the algorithm that reduces gradients over the replicas. None selects the fastest one.
      options: options for the reduction of gradients.
      local_updates: how replicas that update their own variables are synchronized. None keeps them equal at every step.
      replica_weights: one number per replica, to which its share of a global batch is proportional, or "auto" to follow the speeds.
        None divides batches evenly.

    Raises:
      InvalidArgumentError: `options`, `local_updates` or `replica_weights` has the wrong type, or does not go with the rest.
    """

    def __init__(
        self,
        topology: Topology,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        local_updates: LocalUpdates | None = None,
        replica_weights: Sequence[float] | str | None = None,
    ) -> None:
        check_choices(options, local_updates, replica_weights)
        if topology.num_workers == 1:
            bootstrap.warn_if_alone(type(self).__name__)
        self._topology, self._chosen_ops, self._options = topology, cross_device_ops, options
        self._compression = compression_of(options) if options else None
        self._local_updates = local_updates
        if options and self._compression:
            call = f"CommunicationOptions(compression={options.compression!r})"
            _require_plain_sums(call, topology, cross_device_ops)
        if local_updates is not None:
            require_groups(local_updates, topology.num_replicas)
            _require_plain_sums(f"local_updates={type(local_updates).__name__}", topology, cross_device_ops)
        if replica_weights is not None:
            _set_shares(topology.shares, replica_weights, topology.num_replicas)
        # Last: a strategy that was refused, which the traceback of the error refers to, is not among the living ones.
        super().__init__()

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
        # At each access, because an elastic group and `placed_on` change the devices.
        return self._chosen_ops or _fastest_ops(self.topology)

    @property
    @override
    def communication_options(self) -> CommunicationOptions | None:
        return self._options

    @property
    @override
    def compression(self) -> Compression | None:
        return self._compression

    @property
    @override
    def local_updates(self) -> LocalUpdates | None:
        return self._local_updates

    @contextmanager
    def placed_on(self, topology: Topology) -> Iterator[None]:
        """Traces programs in the context for other devices. They may be absent, because nothing is placed on them."""
        previous, self._topology = self._topology, topology
        try:
            yield
        finally:
            self._topology = previous


def check_choices(
    options: CommunicationOptions | None,
    local_updates: LocalUpdates | None,
    replica_weights: Sequence[float] | str | None,
) -> None:
    """Checks what can be checked of the arguments of a strategy before its devices are known.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or does not go with another one.
    """
    if options is not None:
        arguments.instance(
            "communication_options",
            options,
            CommunicationOptions,
            'communication_options=phalanx.experimental.CommunicationOptions(compression="int8")',
        )
    if local_updates is not None:
        hint = "local_updates=phalanx.experimental.LocalSGD(every=8), or DiLoCo(every=100)"
        if not isinstance(local_updates, LocalUpdates):
            raise InvalidArgumentError(f"local_updates={shown(local_updates)}", "must be a LocalSGD or a DiLoCo.", hint)
        if options is not None and (options.compression or options.wire_dtype):
            raise InvalidArgumentError(
                f"local_updates={type(local_updates).__name__} with communication_options that round or compress gradients",
                "the replicas send no gradients.",
                'local_updates=phalanx.experimental.DiLoCo(compression="int8")',
            )
    if replica_weights is not None:
        _check_weights(replica_weights)


def update_sharding_of(
    choice: bool | None,
    ops: CrossDeviceOps | None,
    options: CommunicationOptions | None,
    local_updates: LocalUpdates | None,
    layout: object,
) -> bool | None:
    """Returns the `update_sharding` of a topology: whether updates are sharded, or None if that is left to the platform.

    Args:
      choice: the argument `weight_update_sharding` of a strategy.
      ops: its argument `cross_device_ops`.
      options: its argument `communication_options`.
      local_updates: its argument `local_updates`.
      layout: its argument `layout`, or `model_axis`.

    Raises:
      InvalidArgumentError: `choice` is not a bool or None, or another argument needs full gradients.
    """
    if not isinstance(choice, bool | None):
        raise InvalidArgumentError(
            f"weight_update_sharding={shown(choice)}", "must be True, False or None.", "weight_update_sharding=True"
        )
    # Options of a wrong type do not matter here: `check_choices` refuses them later.
    is_plain = not isinstance(options, CommunicationOptions) or not (options.compression or options.wire_dtype)
    defaults = {
        "cross_device_ops": ops is None,
        "compression or wire_dtype": is_plain,
        "local_updates": local_updates is None,
        "layout or model_axis": layout is None,
    }
    needing = next((name for name, is_default in defaults.items() if not is_default), None)
    if choice and needing is not None:
        raise InvalidArgumentError(
            f"weight_update_sharding=True with {needing}",
            "both say what the replicas exchange of a gradient.",
            "leave one of them out; layout=phalanx.fully_sharded() shards the variables too",
        )
    return False if needing is not None else choice


def _check_weights(weights: object) -> None:
    # `==` alone would compare an array element by element, and the result is not a bool.
    is_auto = isinstance(weights, str) and weights == "auto"
    if not is_auto and not (isinstance(weights, (list, tuple)) and all(map(_is_positive, weights))):
        raise InvalidArgumentError(
            f"replica_weights={shown(weights)}",
            'must be "auto", or a list of positive numbers, one per replica.',
            _weights_hint(2),
        )


def _weights_hint(num_replicas: int) -> str:
    return f'replica_weights={[2, *[1] * (num_replicas - 1)]}, or replica_weights="auto"'


def _set_shares(shares: Shares, weights: Sequence[float] | str, num_replicas: int) -> None:
    """Sets the shares that replicas have of a batch.

    Raises:
      InvalidArgumentError: `weights` has not one number per replica.
    """
    if isinstance(weights, str) and weights == "auto":
        shares.is_measured = True
        return
    if len(weights) != num_replicas:
        raise InvalidArgumentError(
            f"replica_weights={shown(weights)} with {num_replicas} replicas",
            "must have one number per replica.",
            _weights_hint(num_replicas),
        )
    shares.weights = [float(weight) for weight in weights]


def _is_positive(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number < math.inf


def _require_plain_sums(call: str, topology: Topology, ops: CrossDeviceOps | None) -> None:
    """Checks that an option of the communication replaces nothing that the user has chosen."""
    if ops is not None:
        raise InvalidArgumentError(
            f"{call} with cross_device_ops={type(ops).__name__}()",
            "both say how gradients are sent.",
            "pass only one of them",
        )
    if topology.axes or topology.layout is not None:
        raise InvalidArgumentError(
            f"{call} with a layout or a model axis",
            "every replica must hold whole variables and gradients.",
            "omit layout and model_axis, or this option",
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
