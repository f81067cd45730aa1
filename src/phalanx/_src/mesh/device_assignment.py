# SPDX-License-Identifier: Apache-2.0
"""Coordinates of TPU cores, and their assignment to replicas. Pure arithmetic."""

import enum
import json
import math
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from phalanx.errors import InvalidArgumentError, arguments, shown


class DeviceOrderMode(enum.IntEnum):
    """The order in which `DeviceAssignment.build` assigns blocks of cores to replicas. May be used in any context.

    Source: tf.tpu.experimental.DeviceOrderMode.

    Example:
      >>> DeviceOrderMode.MESH
      <DeviceOrderMode.MESH: 2>
    """

    AUTO = 0
    RING = 1
    MESH = 2


@final
class TPUTopology:
    """The coordinates of the cores of a TPU system, or of devices that emulate them. May be used in any context.

    Args:
      serialized: the result of `serialized()` of another topology. If given, the other arguments are ignored.
      mesh_shape: number of cores along each dim. For TPUs the dims are x, y, z and the core within a chip.
      device_coordinates: int array (tasks, cores_per_task, dims). The coordinates of the cores of each host.

    Raises:
      InvalidArgumentError: `mesh_shape` is invalid, a core lies outside the mesh, or two cores have the same
        coordinates.

    Source: tf.tpu.experimental.Topology.

    Example:
      >>> topology = TPUTopology(mesh_shape=(1, 2), device_coordinates=[[[0, 0], [0, 1]]])
      >>> topology.num_tasks, topology.num_tpus_per_task
      (1, 2)
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | None = None,
        device_coordinates: np.ndarray | Sequence[Any] | None = None,
    ) -> None:
        if serialized is not None:
            mesh_shape, device_coordinates = _deserialized(serialized)
        self._shape = positive_integers("mesh_shape", mesh_shape)
        self._coordinates = _coordinates("device_coordinates", device_coordinates, self._shape)
        self._place = {
            tuple(at): (task, i) for task, cores in enumerate(self._coordinates.tolist()) for i, at in enumerate(cores)
        }
        if len(self._place) < self._coordinates.shape[0] * self._coordinates.shape[1]:
            raise InvalidArgumentError(
                f"device_coordinates={shown(self._coordinates.tolist())}",
                "two cores have the same coordinates.",
                "give each core different coordinates",
            )

    def serialized(self) -> bytes:
        """Returns the topology as bytes. `Topology(serialized=...)` restores it.

        Example:
          >>> topology = TPUTopology(mesh_shape=(1, 2), device_coordinates=[[[0, 0], [0, 1]]])
          >>> TPUTopology(serialized=topology.serialized())
          Topology(mesh_shape=(1, 2), 1 x 2 cores)
        """
        return json.dumps({"mesh_shape": self._shape, "device_coordinates": self._coordinates.tolist()}).encode()

    @property
    def mesh_shape(self) -> np.ndarray:
        """The number of cores along each dim, an int array (dims,)."""
        return np.array(self._shape)

    @property
    def mesh_rank(self) -> int:
        """The number of dims of the mesh."""
        return len(self._shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """The coordinates of the cores of each task, an int array (tasks, cores_per_task, dims)."""
        return self._coordinates

    @property
    def num_tasks(self) -> int:
        """The number of hosts."""
        return int(self._coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores per host."""
        return int(self._coordinates.shape[1])

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates in the mesh without a core, an int array (coordinates, dims)."""
        places = [at for at in np.ndindex(*self._shape) if at not in self._place]
        return np.array(places, int).reshape(-1, self.mesh_rank)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the index of the task that has the core at these coordinates.

        Raises:
          InvalidArgumentError: there is no core at these coordinates.
        """
        return self._at(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the index of the core at these coordinates among the cores of its task."""
        return self._at(device_coordinates)[1]

    @arguments.typed()
    def tpu_device_name_at_coordinates(self, device_coordinates: Any, job: str | None = None) -> str:
        """Returns the TensorFlow name of the core at these coordinates, for example `"/task:0/device:TPU:1"`."""
        task, ordinal = self._at(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{ordinal}"

    @arguments.typed()
    def cpu_device_name_at_coordinates(self, device_coordinates: Any, job: str | None = None) -> str:
        """Returns the TensorFlow name of the host of the core, for example `"/task:0/device:CPU:0"`."""
        return f"{_job(job)}/task:{self._at(device_coordinates)[0]}/device:CPU:0"

    def _at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        try:
            at = tuple(operator.index(c) for c in coordinates)
        except Exception:
            raise InvalidArgumentError(
                f"device_coordinates={shown(coordinates)}", "must be integers, one per dim.", "(0, 0, 0, 0)"
            ) from None
        # TensorFlow code gives four coordinates, and a virtual mesh may have fewer dims.
        if not any(at[self.mesh_rank :]):
            at = at[: self.mesh_rank]
        place = self._place.get(at)
        if place is None:
            raise InvalidArgumentError(
                f"device_coordinates={shown(at)}",
                f"the mesh of shape {self._shape} has no core at these coordinates.",
                f"coordinates such as {tuple(map(int, self._coordinates[0, 0]))}",
            )
        return place

    def __repr__(self) -> str:
        return f"Topology(mesh_shape={self._shape}, {self.num_tasks} x {self.num_tpus_per_task} cores)"


@final
class DeviceAssignment:
    """The assignment of cores to replicas, as their logical devices. May be used in any context.

    Args:
      topology: the coordinates of all cores.
      core_assignment: int array (replicas, cores_per_replica, dims). The coordinates of the logical devices of each
        replica. A TPU has four dims; a virtual mesh with fewer dims ignores further coordinates that are zero.

    Attributes:
      SINGLE_CORE: the `core_assignment` of one replica on the first core.

    Raises:
      InvalidArgumentError: `topology` is not a topology, a core does not exist, or a core is assigned twice.

    Source: tf.tpu.experimental.DeviceAssignment.

    Example:
      >>> topology = TPUTopology(mesh_shape=(2, 2), device_coordinates=[[[0, 0], [0, 1], [1, 0], [1, 1]]])
      >>> assignment = DeviceAssignment.build(topology, computation_shape=[1, 2], num_replicas=2)
      >>> assignment.coordinates(replica=1, logical_core=0)
      (1, 0)
    """

    SINGLE_CORE: ClassVar = (((0, 0, 0, 0),),)

    def __init__(self, topology: TPUTopology, core_assignment: np.ndarray | Sequence[Any]) -> None:
        _require_topology(topology)
        self._topology = topology
        self._cores = _coordinates("core_assignment", core_assignment, tuple(map(int, topology.mesh_shape)))
        physical = self.logical_to_physical.reshape(-1, 2)
        if len(np.unique(physical, axis=0)) < len(physical):
            raise InvalidArgumentError(
                f"core_assignment={shown(self._cores.tolist())}",
                "a core is assigned twice.",
                "assign each core to one replica",
            )

    @classmethod
    def build(
        cls,
        topology: TPUTopology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Assigns a block of cores to each replica, along the last dims of the mesh first.

        May be called in any context.

        Args:
          topology: the result of `initialize_tpu_system`.
          computation_shape: the shape of a block, one number per dim of the mesh. None is a single core.
          computation_stride: the distance between the cores of a block, along each dim. None means adjacent cores.
          num_replicas: number of replicas.
          device_order_mode: AUTO or MESH.

        Returns:
          The assignment.

        Raises:
          InvalidArgumentError: a block does not fit into the mesh, the mesh does not have room for `num_replicas`
            blocks, or `device_order_mode` is RING.
        """
        _require_topology(topology)
        if not isinstance(device_order_mode, DeviceOrderMode) or device_order_mode is DeviceOrderMode.RING:
            raise InvalidArgumentError(
                f"device_order_mode={shown(device_order_mode)}",
                "must be AUTO or MESH: blocks are assigned in the order of the mesh, along its last dims first.",
                "DeviceOrderMode.AUTO, or DeviceAssignment(topology, core_assignment) for another order",
            )
        mesh = tuple(map(int, topology.mesh_shape))
        shape = _of_each_dim("computation_shape", computation_shape, mesh)
        stride = _of_each_dim("computation_stride", computation_stride, mesh)
        footprint = [n * s for n, s in zip(shape, stride, strict=True)]
        if any(f > m for f, m in zip(footprint, mesh, strict=True)):
            raise InvalidArgumentError(
                f"computation_shape={list(shape)}, computation_stride={list(stride)}",
                f"a block of shape {footprint} does not fit into a mesh of shape {list(mesh)}.",
                f"computation_shape={[min(f, m) for f, m in zip(footprint, mesh, strict=True)]}",
            )
        # With a stride, other blocks start in the gaps of a block.
        blocks = [m // f * s for m, f, s in zip(mesh, footprint, stride, strict=True)]
        most = math.prod(blocks)
        if not arguments.is_integer(num_replicas, 1, most):
            raise InvalidArgumentError(
                f"num_replicas={shown(num_replicas)}",
                f"must be from 1 to {most}, for a mesh of shape {list(mesh)} and blocks of shape {list(shape)}.",
                f"num_replicas={most}",
            )
        block = np.stack(np.unravel_index(np.arange(num_replicas), blocks), axis=-1)
        # `block // stride` is the number of footprints before a block, and `block % stride` its place in the gaps of a footprint.
        corners = block // stride * footprint + block % stride
        offsets = np.array(list(np.ndindex(*shape))) * stride
        return cls(topology, corners[:, None] + offsets)

    @property
    def topology(self) -> TPUTopology:
        """The coordinates of all cores."""
        return self._topology

    @property
    def core_assignment(self) -> np.ndarray:
        """The coordinates of the logical devices of each replica, an int array (replicas, cores_per_replica, dims)."""
        return self._cores

    @cached_property
    def logical_to_physical(self) -> np.ndarray:
        """Task and ordinal of each logical device of each replica, an int array (replicas, cores_per_replica, 2)."""
        of = self._topology
        return np.array(
            [
                [(of.task_ordinal_at_coordinates(c), of.tpu_device_ordinal_at_coordinates(c)) for c in cores]
                for cores in self._cores
            ]
        )

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return int(self._cores.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices per replica."""
        return int(self._cores.shape[1])

    @arguments.typed()
    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a logical device of a replica.

        Raises:
          InvalidArgumentError: the replica or the logical device does not exist.
        """
        if not (0 <= replica < self.num_replicas and 0 <= logical_core < self.num_cores_per_replica):
            raise InvalidArgumentError(
                f"replica={replica}, logical_core={logical_core}",
                f"there are {self.num_replicas} replicas of {self.num_cores_per_replica} logical devices.",
                "replica=0, logical_core=0",
            )
        return tuple(map(int, self._cores[replica, logical_core]))

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the index of a logical device among the cores of its host."""
        return self._topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the TensorFlow name of the core of a logical device."""
        return self._topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the TensorFlow name of the host of a logical device."""
        return self._topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    @arguments.typed()
    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose logical device `logical_core` is a core of the task `task_id`.

        Raises:
          InvalidArgumentError: there is no such replica.
        """
        on_task = self.logical_to_physical[:, logical_core : logical_core + 1, 0] == task_id
        replicas = [int(i) for i in np.flatnonzero(on_task.any(axis=1))]
        if not replicas:
            raise InvalidArgumentError(
                f"task_id={task_id}, logical_core={logical_core}",
                "no replica has this logical device on this task.",
                "task_id=0, logical_core=0",
            )
        return replicas

    def __repr__(self) -> str:
        return f"DeviceAssignment({self.num_replicas} replicas of {self.num_cores_per_replica} cores)"


def _deserialized(serialized: bytes) -> tuple[Any, Any]:
    try:
        described = json.loads(serialized)
        return described["mesh_shape"], described["device_coordinates"]
    except (TypeError, ValueError, KeyError) as e:
        raise InvalidArgumentError(
            f"serialized={shown(serialized)}",
            "must be the result of Topology.serialized().",
            "initialize_tpu_system(resolver).serialized()",
        ) from e


def _require_topology(topology: object) -> None:
    if not isinstance(topology, TPUTopology):
        raise InvalidArgumentError(
            f"topology={shown(topology)}", "must be a Topology.", "topology=initialize_tpu_system(resolver)"
        )


def positive_integers(name: str, values: object) -> tuple[int, ...]:
    """Returns `values`, a sequence of positive integers, as a tuple.

    Raises:
      InvalidArgumentError: `values` is not a sequence of positive integers.
    """
    numbers = tuple(values) if isinstance(values, (list, tuple, np.ndarray)) and getattr(values, "ndim", 1) == 1 else ()
    if not numbers or not all(arguments.is_integer(n, least=1) for n in numbers):
        raise InvalidArgumentError(f"{name}={shown(values)}", "must be positive integers.", f"{name}=(2, 2, 2)")
    return tuple(map(int, numbers))


def _of_each_dim(name: str, values: object, mesh: tuple[int, ...]) -> tuple[int, ...]:
    if values is None:
        return (1,) * len(mesh)
    sizes = positive_integers(name, values)
    if len(sizes) != len(mesh):
        raise InvalidArgumentError(
            f"{name}={list(sizes)}",
            f"the mesh {list(mesh)} has {len(mesh)} dims.",
            f"{name}={[1] * (len(mesh) - 1) + [2]}",
        )
    return sizes


def _coordinates(name: str, values: object, mesh: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.asarray(values if values is not None else [])
    except Exception:
        # NumPy refuses lists of unequal lengths. The message below says what is expected.
        array = np.array([])
    if array.ndim == 3 and array.dtype.kind in "iu" and not array[:, :, len(mesh) :].any():
        array = array[:, :, : len(mesh)]
    if array.ndim != 3 or not array.size or array.shape[2] != len(mesh) or array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name} of shape {array.shape}",
            f"must be integers of shape (n, m, {len(mesh)}).",
            f"{name}=[[[0, ...], ...]]",
        )
    if (array < 0).any() or (array >= mesh).any():
        raise InvalidArgumentError(
            f"{name}={shown(array.tolist())}",
            f"a core lies outside the mesh of shape {list(mesh)}.",
            f"coordinates from {[0] * len(mesh)} to {[n - 1 for n in mesh]}",
        )
    return array


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"
