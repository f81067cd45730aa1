# SPDX-License-Identifier: Apache-2.0
"""`TPUStrategy`: one replica per TPU core, or per group of logical devices of a device assignment."""

import math
from collections.abc import Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.tpu import TPUClusterResolver
from phalanx._src.collectives import primitives
from phalanx._src.collectives.dtypes import term
from phalanx._src.collectives.local_updates import LocalUpdates
from phalanx._src.mesh.device_assignment import DeviceAssignment
from phalanx._src.mesh.layout import MODEL_AXIS, AbstractLayout, LayoutLike, layout_of
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.tpu_system import devices_of, initialize_tpu_system
from phalanx._src.options import CommunicationOptions, ReduceOp
from phalanx._src.strategies.synchronous import SynchronousStrategy
from phalanx._src.tracing import context
from phalanx._src.typed_jax import partition_spec, with_sharding_constraint
from phalanx.errors import ContextError, DeviceError, InvalidArgumentError, arguments, shown


class TPUStrategy(SynchronousStrategy):
    """Trains synchronously on TPUs, with one replica per core or per group of logical devices of an assignment.

    Every host of a slice runs the same program and creates the strategy at the top, outside all scopes.

    XLA partitions the program of a replica across its logical devices. With a prime number of logical devices, their
    mesh axis is named "model". With 4, 8, ... logical devices there are several axes of size 2, named "model_0",
    "model_1", ...

    Args:
      tpu_cluster_resolver: describes the hosts. None is `TPUClusterResolver()`.
      experimental_device_assignment: the cores of each replica. None makes one replica per core.
      experimental_spmd_xla_partitioning: whether the program never addresses single logical devices, as in
        tf.distribute. XLA partitions all programs in any case.
      layout: which variables are sharded, as in `MirroredStrategy`.
      communication_options: as in `MirroredStrategy`.
      local_updates: as in `MirroredStrategy`.

    Raises:
      DeviceError: this machine has no TPU, or the assignment belongs to another system.
      ClusterError, StartupError: the hosts cannot be connected.
      InvalidArgumentError: an argument has the wrong type, or a compression or local updates conflict with other options.

    Source: tf.distribute.TPUStrategy.

    Example:
      >>> import phalanx, phalanx.testing
      >>> topology = phalanx.testing.virtual_topology((2, 2, 2))
      >>> assignment = phalanx.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)
      >>> phalanx.TPUStrategy(experimental_device_assignment=assignment).num_replicas_in_sync
      4
    """

    _explanation = "it trains on the cores of a TPU system, which a device assignment arranges into replicas."
    _instead = MappingProxyType(
        {
            "model_axis": "phalanx.TPUStrategy(experimental_device_assignment=phalanx.tpu.experimental.DeviceAssignment.build("
            "topology, [1, 1, 2], num_replicas=4))"
        }
    )

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        layout: LayoutLike = None,
        communication_options: CommunicationOptions | None = None,
        local_updates: LocalUpdates | None = None,
    ) -> None:
        resolver = TPUClusterResolver() if tpu_cluster_resolver is None else tpu_cluster_resolver
        assignment = experimental_device_assignment
        arguments.flag("experimental_spmd_xla_partitioning", experimental_spmd_xla_partitioning)
        if isinstance(resolver, DeviceAssignment):
            raise InvalidArgumentError(
                f"tpu_cluster_resolver={shown(resolver)}",
                "a device assignment is the second argument, not the first.",
                "TPUStrategy(experimental_device_assignment=assignment)",
            )
        if not isinstance(assignment, (DeviceAssignment, type(None))):
            raise InvalidArgumentError(
                f"experimental_device_assignment={shown(assignment)}",
                "must be a DeviceAssignment.",
                "DeviceAssignment.build(topology, computation_shape, num_replicas=...)",
            )
        system = initialize_tpu_system(resolver)
        if assignment is None:
            cores = system.device_coordinates.reshape(-1, 1, system.mesh_rank)
            assignment = DeviceAssignment(system, cores)
        topology = _topology_of(assignment, system.num_tasks, layout_of(layout))
        super().__init__(topology, options=communication_options, local_updates=local_updates)
        self._resolver, self._is_spmd = resolver, bool(experimental_spmd_xla_partitioning)

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that describes the TPU system. May be called in any context."""
        return self._resolver

    @property
    @override
    def requires_static_shapes(self) -> bool:
        return True

    def experimental_assign_to_logical_device(self, tensor: ArrayLike, logical_device_id: int) -> jax.Array:
        """Assigns an array to one logical device of each replica. Call it in replica context.

        All logical devices execute the same program. The value of this logical device is kept and sent to the logical
        devices that use it.

        Args:
          tensor: an array.
          logical_device_id: index of a logical device, from 0.

        Returns:
          The same value.

        Raises:
          InvalidArgumentError: the logical device does not exist, or the strategy was created with SPMD partitioning.
          ContextError: called outside a replica function.

        Example:
          >>> import phalanx, phalanx.testing
          >>> topology = phalanx.testing.virtual_topology((2, 2, 2))
          >>> assignment = phalanx.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)
          >>> strategy = phalanx.TPUStrategy(experimental_device_assignment=assignment)
          >>> result = strategy.run(lambda x: strategy.experimental_assign_to_logical_device(x + x, 1), args=(1.0,))
          >>> [float(x) for x in result.values]
          [2.0, 2.0, 2.0, 2.0]
        """
        self._require_replica("experimental_assign_to_logical_device")
        count = self.topology.devices_per_replica
        if self._is_spmd:
            raise InvalidArgumentError(
                "experimental_assign_to_logical_device with experimental_spmd_xla_partitioning=True",
                "XLA partitions the whole program of a replica across its logical devices.",
                "experimental_split_to_logical_devices(tensor, ...), or "
                "experimental_replicate_to_logical_devices(tensor)",
            )
        if not arguments.is_integer(logical_device_id, 0, count - 1):
            raise InvalidArgumentError(
                f"logical_device_id={shown(logical_device_id)}",
                f"a replica has the logical devices 0 to {count - 1}.",
                "logical_device_id=0",
            )
        value = primitives.as_array(tensor)
        if count == 1:
            return value
        # A sharding constraint cannot name one device. Here each device holds one row, and only the row of this device is not 0.
        mask = (jnp.arange(count) == logical_device_id).reshape(-1, *(1,) * value.ndim)
        masked = with_sharding_constraint(jnp.where(mask, value, jnp.zeros_like(value)), self._spec(0, value.ndim + 1))
        # The sum of bools or small integers has another dtype.
        return term(ReduceOp.SUM, masked).sum(0).astype(value.dtype)

    def experimental_split_to_logical_devices(
        self, tensor: ArrayLike, partition_dimensions: Sequence[int]
    ) -> jax.Array:
        """Shards an array over the logical devices of each replica. Call it in replica context.

        XLA shards the computations that use the array in the same way, as far as possible.

        Args:
          tensor: an array.
          partition_dimensions: the number of shards along each dim. The product must be the number of logical devices,
            which get the shards in C order.

        Returns:
          The same value.

        Raises:
          InvalidArgumentError: `partition_dimensions` does not have one number per dim, a number does not divide its
            dim, or the product is wrong.
          ContextError: called outside a replica function.
        """
        self._require_replica("experimental_split_to_logical_devices")
        value = primitives.as_any_array(tensor)
        if not isinstance(partition_dimensions, (list, tuple)):
            raise InvalidArgumentError(
                f"partition_dimensions={shown(partition_dimensions)}",
                "must be a list of integers.",
                f"{[1] * value.ndim}",
            )
        parts = list(partition_dimensions)
        count = self.topology.devices_per_replica
        argument = f"partition_dimensions={shown(parts)} of an array {value.dtype}{list(value.shape)}"
        if len(parts) != value.ndim or not all(arguments.is_integer(n, least=1) for n in parts):
            raise InvalidArgumentError(argument, "must be one positive integer per dim.", f"{[1] * value.ndim}")
        if wrong := [i for i, n in enumerate(parts) if value.shape[i] % n]:
            dim = wrong[0]
            raise InvalidArgumentError(
                argument,
                f"{parts[dim]} does not divide dim {dim}, which has size {value.shape[dim]}.",
                f"a number for dim {dim} that divides {value.shape[dim]}",
            )
        spec = _divided(parts, self.topology.axes)
        if spec is None:
            factors = " x ".join(str(size) for _, size in self.topology.axes)
            order = f", with the prime factors in the order {factors}" if math.prod(parts) == count else ""
            raise InvalidArgumentError(
                argument,
                f"the product must be {count}, the number of logical devices per replica{order}.",
                f"{[count] + [1] * (value.ndim - 1)}",
            )
        return value if count == 1 else with_sharding_constraint(value, spec)

    def experimental_replicate_to_logical_devices(self, tensor: ArrayLike) -> jax.Array:
        """Replicates an array on all logical devices of each replica. Call it in replica context.

        Args:
          tensor: an array.

        Returns:
          The same value.

        Raises:
          ContextError: called outside a replica function.
        """
        self._require_replica("experimental_replicate_to_logical_devices")
        value = primitives.as_any_array(tensor)
        return value if self.topology.devices_per_replica == 1 else with_sharding_constraint(value, partition_spec())

    def _spec(self, dim: int, ndim: int) -> PartitionSpec:
        """Returns the spec that shards one dim over all logical devices."""
        names = tuple(name for name, _ in self.topology.axes)
        return partition_spec(*(names if i == dim else None for i in range(ndim)))

    def _require_replica(self, method: str) -> None:
        mode = context.current()
        if mode.replica is None or mode.strategy is not self:
            raise ContextError(
                f"{method} outside a replica function of {shown(self)}",
                "it controls the placement of arrays inside a replica function.",
                "call it in the function that strategy.run runs",
            )


def _topology_of(assignment: DeviceAssignment, num_tasks: int, layout: AbstractLayout | None) -> Topology:
    """Returns the topology that an assignment describes."""
    tasks = devices_of(assignment.topology)
    if num_tasks < assignment.topology.num_tasks:
        raise DeviceError(
            f"{assignment} on {assignment.topology.num_tasks} hosts",
            f"this job has {num_tasks} hosts.",
            "build the assignment from the topology that initialize_tpu_system(resolver) returns",
        )
    devices = [tasks[task][core] for task, core in assignment.logical_to_physical.reshape(-1, 2)]
    return Topology(tuple(devices), _axes(assignment.num_cores_per_replica), layout)


def _axes(cores: int) -> tuple[tuple[str, int], ...]:
    """Returns mesh axes of prime sizes for `cores` logical devices, so that several dims can be sharded."""
    sizes = []
    while cores > 1:
        sizes.append(next(n for n in range(2, cores + 1) if cores % n == 0))
        cores //= sizes[-1]
    return tuple((MODEL_AXIS if len(sizes) == 1 else f"{MODEL_AXIS}_{i}", n) for i, n in enumerate(sizes))


def _divided(parts: Sequence[int], axes: Sequence[tuple[str, int]]) -> PartitionSpec | None:
    """Returns the spec that splits each dim into `parts` shards, in C order. None if the axes do not allow it."""
    # In the order of the mesh, because another order of axes would not give the shards to the devices in C order.
    left, spec = list(axes), []
    for shards in parts:
        names: list[str] = []
        got = 1
        while got < shards and left:
            name, size = left.pop(0)
            names.append(name)
            got *= size
        if got != shards:
            return None
        spec.append(tuple(names) or None)
    return None if left else partition_spec(*spec)
