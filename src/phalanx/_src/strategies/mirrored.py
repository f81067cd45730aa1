# SPDX-License-Identifier: Apache-2.0
"""`MirroredStrategy`: one machine, one replica per device, every variable on all devices."""

from collections.abc import Sequence
from types import NoneType
from typing import final

import jax
from typing_extensions import override

from phalanx._src.collectives.cross_device import CrossDeviceOps
from phalanx._src.collectives.local_updates import LocalUpdates
from phalanx._src.mesh.layout import LayoutLike, layout_of
from phalanx._src.mesh.topology import Topology, axes_of
from phalanx._src.options import CommunicationOptions
from phalanx._src.strategies.synchronous import SynchronousStrategy, update_sharding_of
from phalanx.errors import InvalidArgumentError, shown


@final
class MirroredStrategy(SynchronousStrategy):
    """Trains synchronously on the devices of one machine. May be created outside all scopes.

    Args:
      devices: a list of devices, for example `["/gpu:0", "/gpu:1"]`, or their number. None takes all GPUs, or all CPU
        devices if there are no GPUs.
      cross_device_ops: the algorithm that reduces gradients over the replicas. None selects an all-reduce.
      communication_options: `bytes_per_pack`, `wire_dtype` and `compression` for gradients. The other options do nothing.
      model_axis: name and size of a mesh axis over which XLA partitions each replica. With `("model", 2)`, four devices
        form two replicas of two devices.
      layout: which variables are sharded over which mesh axes: a `keras.distribution.LayoutMap`, a dict from variable
        path to axes, `fully_sharded()`, or "auto": large variables over all axes, by their shapes. Every device holds a copy of all
        other variables. Optimizer slots are sharded like their variables.
      local_updates: `LocalSGD` or `DiLoCo` of `phalanx.experimental`: replicas train separately for some steps. None aggregates
        gradients at every step.
      replica_weights: one number per replica, for devices of different speed: its share of each global batch is proportional to it.
        With "auto", the speeds are measured, and each iteration over a dataset begins with shares that follow them. None divides
        batches evenly.
      weight_update_sharding: whether each replica updates its shard of a variable, and holds only that shard of the optimizer's slots.
        Variables stay whole; results and checkpoints stay the same. None shards variables from 1.5 MiB on, on CPUs, unless
        another of these arguments needs full gradients. It never concerns optimizers that need a variable as a whole: LAMB,
        Adafactor, Muon, subclasses of users, and any with `clipnorm`, `global_clipnorm`, `use_ema` or accumulated gradients.

    Raises:
      DeviceError: this process does not have a device, or a device is listed twice.
      InvalidArgumentError: an argument has the wrong type, or conflicts with a compression or local updates, the mesh does not
        have an axis of the layout, or the size of `model_axis` does not divide the number of devices.
      StartupError: XLA has fewer threads than several CPU devices need.

    Source: tf.distribute.MirroredStrategy.

    Example:
      >>> import phalanx
      >>> phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
      2
    """

    _explanation = "it trains on devices of this process alone."

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        model_axis: tuple[str, int] | None = None,
        layout: LayoutLike = None,
        local_updates: LocalUpdates | None = None,
        replica_weights: Sequence[float] | str | None = None,
        weight_update_sharding: bool | None = None,
    ) -> None:
        topology = Topology.of(
            devices,
            axes=axes_of(model_axis),
            layout=layout_of(layout),
            update_sharding=update_sharding_of(
                weight_update_sharding,
                cross_device_ops,
                communication_options,
                local_updates,
                layout if model_axis is None else model_axis,
            ),
        )
        if not isinstance(cross_device_ops, (CrossDeviceOps, NoneType)):
            raise InvalidArgumentError(
                f"cross_device_ops={shown(cross_device_ops)}",
                "must be CrossDeviceOps.",
                "cross_device_ops=phalanx.NcclAllReduce()",
            )
        # Operations may name a device (`reduce_to_device`), which must be among these.
        ops = cross_device_ops and cross_device_ops.for_devices(topology.first_devices)
        self._takes_all = devices is None
        super().__init__(topology, ops, communication_options, local_updates, replica_weights)

    @override
    def _notes(self) -> Sequence[str]:
        devices = self.topology.devices
        # A user who has passed `devices` wants this number, so no line says how to get more.
        if not self._takes_all or len(devices) > 1 or devices[0].platform != "cpu":
            return super()._notes()
        return [*super()._notes(), _ONE_CPU]


_ONE_CPU = (
    "JAX found one CPU device and nothing else. phalanx.set_virtual_cpu_devices(2) at the top of the script makes two; GPUs and TPUs need "
    'another package, such as "jax[cuda12]".'
)
