# SPDX-License-Identifier: Apache-2.0
"""`MirroredStrategy`: one machine, one replica a device, every variable on all of them."""

from collections.abc import Sequence
from typing import Any, final

import jax

from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.errors import InvalidArgumentError, shown, warn_of_slip
from phalanx.mesh.devices import device_name
from phalanx.mesh.layout import layout_of
from phalanx.mesh.topology import Topology, axes_of
from phalanx.strategies.synchronous import SynchronousStrategy, ops_within


@final
class MirroredStrategy(SynchronousStrategy):
    """Synchronous training on the devices of one machine. May be made outside all scopes.

    Args:
      devices: for example `["/gpu:0", "/gpu:1"]`, or how many; None takes all GPUs, else all CPU devices.
      cross_device_ops: how gradients cross replicas; None is an all-reduce of each.
      model_axis: name and size of a mesh axis over which each replica spreads: with `("model", 2)` four devices are two
        replicas of two.
      layout: which variables are divided, over which axes: a `keras.distribution.LayoutMap`, or a dict, of paths to axes;
        or `fully_sharded()`. Others every device holds whole. Optimizer slots follow their variables.

    Raises:
      DeviceError: a device that this process does not have, or one given twice.
      InvalidArgumentError: `cross_device_ops` or `layout` is something else, the layout is over other axes, or replicas of that
        size cannot be made of the devices.
      StartupError: several CPU devices without the threads that XLA needs for them.

    Example:
      >>> import phalanx
      >>> phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
      2
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        model_axis: tuple[str, int] | None = None,
        layout: Any = None,
    ) -> None:
        topology = Topology.of(devices, axes=axes_of(model_axis), layout=layout_of(layout))
        ops = ops_within(topology) if cross_device_ops is None else cross_device_ops
        if not isinstance(ops, CrossDeviceOps):
            raise InvalidArgumentError(
                f"cross_device_ops={shown(ops)}", "must be CrossDeviceOps.", "cross_device_ops=phalanx.NcclAllReduce()"
            )
        if devices is None and len(topology.devices) == 1:
            warn_of_slip(
                f"MirroredStrategy() has one replica: JAX has found one device, {device_name(topology.devices[0])}.",
                "phalanx.set_virtual_cpu_devices(2) at the top of the script, to try several replicas on CPUs; or "
                f'phalanx.OneDeviceStrategy("{device_name(topology.devices[0])}") if one is meant',
            )
        super().__init__(topology, ops.for_devices(topology.first_devices))
