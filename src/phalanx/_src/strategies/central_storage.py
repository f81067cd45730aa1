# SPDX-License-Identifier: Apache-2.0
"""`CentralStorageStrategy`: variables and optimizer slots on one device, replicas on all devices."""

from collections.abc import Sequence
from typing import Any, final

import jax
from typing_extensions import override

from phalanx._src.collectives.local_updates import refuse
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.replicas import trace_run
from phalanx._src.strategies.single import OneDeviceStrategy
from phalanx._src.strategies.synchronous import SynchronousStrategy
from phalanx._src.tracing import context
from phalanx._src.tracing.context import Mode
from phalanx._src.tracing.strategy import Update


@final
class CentralStorageStrategy(SynchronousStrategy):
    """Trains synchronously, with all variables and optimizer slots on one device. May be created outside all scopes.

    For each step, every replica gets a copy of the variables. The gradients are summed, and the optimizer updates the
    variables on their own device after the step. For this reason `run_steps`, and `steps_per_execution` in Keras,
    dispatch the steps one by one.

    Args:
      compute_devices: one device per replica. None takes all accelerators, or all CPU devices if there are none.
      parameter_device: the device that holds the variables. None is the host, `"cpu:0"`.
      local_updates: must be None. Other strategies take it.

    Raises:
      DeviceError: this process does not have a device, or a device is listed twice.
      InvalidArgumentError: `local_updates` is not None.
      StartupError: XLA has fewer threads than several CPU devices need.

    Source: tf.distribute.experimental.CentralStorageStrategy.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0")
      >>> with strategy.scope():
      ...     v = keras.Variable([1.0, 2.0])
      >>> v.value.devices()
      {CpuDevice(id=0)}
    """

    _explanation = "one device holds the variables of all replicas."

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
        *,
        local_updates: None = None,
    ) -> None:
        refuse(local_updates, type(self).__name__, "one device holds the variables of all replicas.")
        super().__init__(Topology.of(compute_devices))
        self._keeper = OneDeviceStrategy("cpu:0" if parameter_device is None else parameter_device)

    @property
    @override
    def storage(self) -> Topology:
        return self._keeper.topology

    @override
    def apply_update(self, update: Update) -> None:
        arrays = [g for g in update.gradients if g is not None]
        here = iter(self.storage.take_back(arrays))
        gradients = [None if g is None else next(here) for g in update.gradients]

        def program(gradients: list[Any]) -> None:
            trace_run(self._keeper, update.optimizer.apply, (gradients, update.variables), {})

        # The program closes over the variables and keeps them alive, so their ids select it and are not used again.
        key = tuple(map(id, update.variables))
        # Not in the context of this strategy, whose programs run on the devices of the replicas.
        with context.enter(Mode(self._keeper, None)):
            self._programs.call(update.optimizer.apply, program, (gradients,), {}, key=key)
