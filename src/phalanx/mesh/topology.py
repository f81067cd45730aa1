# SPDX-License-Identifier: Apache-2.0
"""The mesh that maps replicas to devices, and how values are placed on it."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from phalanx.cluster import watch
from phalanx.errors import DeviceError, InvalidArgumentError, shown
from phalanx.mesh.devices import (
    default_devices,
    device_name,
    first_devices,
    parse_device,
    require_one_platform,
    require_threads,
)
from phalanx.mesh.dispatch import Turn, process_dispatching
from phalanx.mesh.layout import REPLICA_AXIS, AbstractLayout

_MODEL_AXIS = 'model_axis=("model", 2)'


def axes_of(model_axis: tuple[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Returns the mesh axes that a strategy's `model_axis` asks for.

    Raises:
      InvalidArgumentError: it is no pair.
    """
    if model_axis is None:
        return ()
    is_pair = isinstance(model_axis, (tuple, list)) and len(model_axis) == 2
    if not is_pair or isinstance(model_axis[0], (list, tuple)) or isinstance(model_axis[1], (list, tuple)):
        raise InvalidArgumentError(f"model_axis={shown(model_axis)}", "must be a name and a size.", _MODEL_AXIS)
    return ((model_axis[0], model_axis[1]),)


@dataclass(frozen=True)
class Topology:
    """Which replica runs on which devices.

    Args:
      devices: those of the first replica, then those of the second, and so on.
      axes: names and sizes of the mesh axes over which a replica spreads; none where it has one device.
      layout: how variables are divided over the axes of the mesh; None where every device holds them whole.

    Raises:
      DeviceError: no device, one device twice, devices of two platforms, or a replica in two processes.
      InvalidArgumentError: axes that are none, or that do not divide the devices; a layout over other axes, or between processes.
      StartupError: several CPU devices without the threads they need.

    Example:
      >>> Topology.of(["cpu:0", "cpu:1"], axes=(("model", 2),)).num_replicas
      1
    """

    devices: tuple[jax.Device, ...]
    axes: tuple[tuple[str, int], ...] = ()
    layout: AbstractLayout | None = None
    has_devices: ClassVar[bool] = True
    """Whether values are placed on devices of its own."""
    mesh: Mesh = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [device_name(d) for d in self.devices]
        if not names:
            raise DeviceError("devices=[]", "a strategy needs at least one device.", 'devices=["cpu:0"]')
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise DeviceError(
                f"devices={names}",
                f"{twice} is given twice; a replica has a device of its own.",
                f"devices={sorted(set(names))}",
            )
        require_one_platform(self.devices)
        _require_axes(self.axes, len(names))
        self._require_one_process()
        require_threads(self.devices)
        axis_names, sizes = (REPLICA_AXIS, *(n for n, _ in self.axes)), (self.num_replicas, *(n for _, n in self.axes))
        # Automatic: `run` maps the first axis by hand, and leaves the others to XLA.
        mesh = Mesh(np.array(self.devices).reshape(sizes), axis_names, axis_types=(AxisType.Auto,) * len(sizes))
        object.__setattr__(self, "mesh", mesh)
        if self.layout is not None:
            self.layout.require_axes(dict(mesh.shape))
            self._require_readable()

    @classmethod
    def of(
        cls,
        devices: Sequence[str | jax.Device] | int | None,
        *,
        axes: tuple[tuple[str, int], ...] = (),
        layout: AbstractLayout | None = None,
    ) -> "Topology":
        """Returns the topology over `devices`, over so many of the local ones, or over all of them."""
        if devices is None:
            return cls(tuple(default_devices()), axes, layout)
        if isinstance(devices, int) and not isinstance(devices, bool):
            return cls(first_devices(devices), axes, layout)
        if not isinstance(devices, (list, tuple)):
            hint = (
                f"devices=[{shown(devices)}]"
                if isinstance(devices, (str, jax.Device))
                else 'devices=["cpu:0", "cpu:1"]'
            )
            raise DeviceError(f"devices={shown(devices)}", "must be a list of devices, or their number.", hint)
        return cls(tuple(map(parse_device, devices)), axes, layout)

    @cached_property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.devices) // self.devices_per_replica

    @cached_property
    def devices_per_replica(self) -> int:
        """The number of logical devices that a replica has."""
        return math.prod(n for _, n in self.axes)

    @cached_property
    def is_single(self) -> bool:
        """Whether there is one device."""
        return len(self.devices) == 1

    @property
    def first_devices(self) -> tuple[jax.Device, ...]:
        """The first device of each replica, in replica order."""
        return self.devices[:: self.devices_per_replica]

    def devices_of(self, replica: int) -> tuple[jax.Device, ...]:
        """Returns the logical devices of a replica."""
        count = self.devices_per_replica
        return self.devices[replica * count : (replica + 1) * count]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The processes that have a replica, in order."""
        return tuple(sorted({d.process_index for d in self.devices}))

    @cached_property
    def num_workers(self) -> int:
        """The number of processes that have a replica."""
        return len(self.workers)

    @cached_property
    def worker_index(self) -> int:
        """This process's number among them."""
        return self.workers.index(jax.process_index())

    @cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The first device of each of this process's replicas, in replica order."""
        return tuple(d for d in self.first_devices if d.process_index == self.workers[self.worker_index])

    @cached_property
    def local_names(self) -> tuple[str, ...]:
        """The names of these devices, as `parse_device` of this process reads them."""
        own = jax.local_devices(backend=self.devices[0].platform)
        # Of a device of several processes the id is not its place among this process's.
        return tuple(f"{device_name(d).partition(':')[0]}:{own.index(d)}" for d in self.local_devices)

    @cached_property
    def local_replicas(self) -> range:
        """The numbers of this process's replicas."""
        first = self.first_devices.index(self.local_devices[0])
        return range(first, first + len(self.local_devices))

    def dispatching(self, *, is_step: bool) -> AbstractContextManager[Any]:
        """Returns what must be held while a program over these devices is dispatched.

        Raises:
          PeerLostError: another process has died, before or meanwhile.
        """
        own = None if self.num_workers == 1 else watch.own()
        return process_dispatching() if own is None else Turn(own, is_step)

    def default_device(self) -> AbstractContextManager[Any]:
        """Returns a context in which operations run on the first device."""
        return jax.default_device(self.devices[0])

    def put_per_replica(self, local: list[Any]) -> list[jax.Array]:
        """Puts arrays `(local replicas, ...)` on the devices. May be called in a background thread.

        Returns:
          The global arrays `(num_replicas, ...)`.
        """
        return list(map(self._spread_from_here, local))

    def _spread_from_here(self, local: Any) -> jax.Array:
        if self.num_workers == 1 and isinstance(local, jax.Array):
            return jax.device_put(local, self.per_replica)
        first = self.local_replicas.start

        def own(index: Any) -> Any:
            start, stop, _ = index[0].indices(self.num_replicas)
            return local[start - first : stop - first]

        # Half the time of device_put and of make_array_from_process_local_data, which find out what is known here.
        return jax.make_array_from_callback((self.num_replicas, *local.shape[1:]), self.per_replica, own)

    def put_replicated(self, tree: Any) -> Any:
        """Puts a pytree of arrays on all devices; of several processes all must have the same values."""
        if self.num_workers == 1:
            return jax.device_put(tree, self.replicated)
        return jax.tree.map(self._put_on_local_devices, tree)

    def take_back(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Puts arrays that other devices hold whole, each, on these; what is there already is not copied."""
        at_home = set(self.devices)
        nearest = [min(x.addressable_shards, key=lambda s: s.device not in at_home).data for x in values]
        return jax.device_put(nearest, self.replicated)

    def _put_on_local_devices(self, value: Any) -> jax.Array:
        # Unlike device_put it asks no other process.
        if isinstance(value, jax.Array) and value.sharding == self.replicated:
            return value
        parts = [jax.device_put(value, device) for i in self.local_replicas for device in self.devices_of(i)]
        return jax.make_array_from_single_device_arrays(np.shape(value), self.replicated, parts)

    def from_chief(self, values: list[Any]) -> list[Any]:
        """Returns what the first worker has of some arrays; all workers must call it, on their main threads."""
        with self.dispatching(is_step=False):
            return multihost_utils.broadcast_one_to_all(values, is_source=self.worker_index == 0)

    def join_per_replica(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Makes one array `(num_replicas, ...)` of one for each local replica, which is on its devices already or put there."""
        own = zip(parts, self.local_replicas, strict=True)
        placed = [jax.device_put(x, d)[None] for x, i in own for d in self.devices_of(i)]
        return jax.make_array_from_single_device_arrays((self.num_replicas, *parts[0].shape), self.per_replica, placed)

    def exchange(self, values: np.ndarray) -> np.ndarray:
        """Tells all workers some numbers; all must call it, on their main threads, with equal shapes.

        Returns:
          What each worker told, `(num_workers, ...)`.
        """
        if self.num_workers == 1:
            return values[None]
        with self.dispatching(is_step=False):
            return np.asarray(multihost_utils.process_allgather(values))

    @cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of a value that every replica holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def of_new_variables(self) -> "Topology | None":
        """The topology over which variables are laid out when they are made.

        None between processes: there they are placed when a program first needs them, with the chief's values.
        """
        return self if self.num_workers == 1 else None

    def sharding_of(self, path: str, shape: Sequence[int]) -> NamedSharding:
        """Returns where a variable lives."""
        if self.layout is None:
            return self.replicated
        spec = self.layout.spec(path, tuple(shape), dict(self.mesh.shape))
        return self.replicated if spec == PartitionSpec() else NamedSharding(self.mesh, spec)

    @property
    def divides_over_replicas(self) -> bool:
        """Whether replicas hold different parts of variables."""
        return self.layout is not None and REPLICA_AXIS in self.layout.axes and self.num_replicas > 1

    def divided_dim(self, path: str, shape: Sequence[int]) -> int | None:
        """Returns along which dim a variable is divided over the replicas; None where each holds it whole."""
        if not self.divides_over_replicas:
            return None
        spec = self.sharding_of(path, shape).spec
        has_axis = lambda names: REPLICA_AXIS in (names if isinstance(names, tuple) else (names,))  # noqa: E731
        return next((dim for dim, names in enumerate(spec) if has_axis(names)), None)

    def put_variable(self, value: Any, path: str) -> jax.Array:
        """Puts the value of a variable where it lives."""
        if self.layout is None:
            return self.put_replicated(value)  # type: ignore[no-any-return]
        return jax.device_put(value, self.sharding_of(path, np.shape(value)))

    @cached_property
    def per_replica(self) -> NamedSharding:
        """The sharding of an array whose leading dim is the replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    def _require_one_process(self) -> None:
        for i in range(self.num_replicas):
            processes = sorted({d.process_index for d in self.devices_of(i)})
            if len(processes) > 1:
                raise DeviceError(
                    f"replica {i} on {list(map(device_name, self.devices_of(i)))}",
                    f"its devices belong to the processes {processes}, and each process feeds replicas of its own.",
                    "fewer logical devices for each replica",
                )

    def _require_readable(self) -> None:
        if self.num_workers > 1:
            raise InvalidArgumentError(
                f"layout={self.layout!r} on {self.num_workers} processes",
                "a process can read those parts of a variable alone that its own devices hold.",
                "a layout in one process, or variables that every device holds whole",
            )


@final
class Nowhere(Topology):
    """The topology of the default strategy: one replica without devices of its own. Values stay where they are."""

    has_devices: ClassVar[bool] = False

    def __init__(self) -> None:
        # A null object: `Topology` demands devices, and derives everything else from them.
        vars(self).update(
            devices=(),
            axes=(),
            layout=None,
            num_replicas=1,
            is_single=True,
            num_workers=1,
            worker_index=0,
            local_devices=(),
            local_replicas=range(1),
        )

    @override
    def default_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def put_replicated(self, tree: Any) -> Any:
        return tree

    @override
    def put_variable(self, value: Any, path: str) -> Any:
        return value


NOWHERE = Nowhere()
"""The only one: where a variable is stored is compared by identity."""


def _require_axes(axes: Sequence[tuple[str, int]], num_devices: int) -> None:
    if not all(isinstance(name, str) and name for name, _ in axes):
        raise InvalidArgumentError(f"axes={shown(axes)}", "their names must be strings.", _MODEL_AXIS)
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    if len({REPLICA_AXIS, *names}) <= len(names):
        raise InvalidArgumentError(
            f"axes={shown(axes)}", f"each needs a name of its own; {REPLICA_AXIS!r} is taken.", _MODEL_AXIS
        )
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise InvalidArgumentError(f"axes={shown(axes)}", "their sizes must be positive integers.", _MODEL_AXIS)
    if num_devices % math.prod(sizes):
        raise InvalidArgumentError(
            f"axes={shown(axes)}",
            f"{num_devices} devices cannot be divided into replicas of {math.prod(sizes)}.",
            f"a size that divides {num_devices}",
        )
