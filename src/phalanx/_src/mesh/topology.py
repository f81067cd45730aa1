# SPDX-License-Identifier: Apache-2.0
"""The mesh that maps replicas to devices, and the placement of values on it."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.typing import ArrayLike

from phalanx._src.cluster.watch import membership, watch
from phalanx._src.cluster.watch.agreement import CALL, READ
from phalanx._src.mesh.arrays import flattened, is_on_cpu, put_shards
from phalanx._src.mesh.devices import device_name, parse_devices, require_one_platform, require_threads, summary_of
from phalanx._src.mesh.layout import REPLICA_AXIS, AbstractLayout
from phalanx._src.mesh.memory import Pool
from phalanx._src.mesh.placing import Placer
from phalanx._src.mesh.requirements import (
    MODEL_AXIS,
    digests_of,
    require_axes,
    require_equal_digests,
    require_layout,
    require_one_mesh,
    require_own_rows,
)
from phalanx._src.mesh.shares import Shares
from phalanx._src.runtime.dispatch import Turn, process_dispatching, raise_again
from phalanx._src.runtime.memory import keep_freed_memory
from phalanx._src.typed_jax import partition_spec, ppermute
from phalanx.errors import ContextError, DeviceError, InvalidArgumentError, shown
from phalanx.errors.frames import user_call
from phalanx.typing import PyTree

_LARGE_BYTES = 3 << 19
"""The size from which the update of a variable is sharded over the replicas. Two more operations for a smaller one cost what they save."""


def axes_of(model_axis: tuple[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Converts the argument `model_axis` of a strategy to mesh axes.

    Raises:
      InvalidArgumentError: `model_axis` is not a pair.
    """
    if model_axis is None:
        return ()
    is_pair = isinstance(model_axis, (tuple, list)) and len(model_axis) == 2
    if not is_pair or isinstance(model_axis[0], (list, tuple)) or isinstance(model_axis[1], (list, tuple)):
        raise InvalidArgumentError(
            f"model_axis={shown(model_axis)}", "must be a pair of a name and a size.", MODEL_AXIS
        )
    return ((model_axis[0], model_axis[1]),)


@dataclass(frozen=True)
class Topology:
    """Maps replicas to devices and places values on them.

    Args:
      devices: the devices of the first replica, then those of the second replica, and so on.
      axes: names and sizes of the mesh axes over which XLA partitions a replica. Empty if a replica has one device.
      layout: the layout that shards variables over mesh axes. None if every device holds all variables whole.
      source: index of the worker from which the others take the values of variables that are not on these devices yet.
      update_sharding: whether each replica updates its shard of a large variable, and holds only that shard of the optimizer's slots.
        None leaves it to the platform and to the size of the variable.
      shares: the replicas' shares of a global batch.

    Raises:
      DeviceError: there is no device, a device is listed twice, the devices belong to several platforms, two processes
        share one of their replicas and not all, or processes have different numbers of devices.
      InvalidArgumentError: an axis is invalid, the axes do not divide the number of devices, or the mesh lacks an axis of
        the layout.
      StartupError: XLA has fewer threads than several CPU devices need.

    Example:
      >>> Topology.of(["cpu:0", "cpu:1"], axes=(("model", 2),)).num_replicas
      1
    """

    devices: tuple[jax.Device, ...]
    axes: tuple[tuple[str, int], ...] = ()
    layout: AbstractLayout | None = None
    source: int = 0
    update_sharding: bool | None = False
    shares: Shares = field(default_factory=Shares, compare=False, repr=False)
    has_devices: ClassVar[bool] = True
    """Whether the topology places values on its own devices."""
    mesh: Mesh = field(init=False, repr=False, compare=False)
    _is_agreed: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [device_name(d) for d in self.devices]
        if not names:
            raise DeviceError("devices=[]", "a strategy needs at least one device.", 'devices=["cpu:0"]')
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise DeviceError(
                f"devices={names}",
                f"{twice} is listed twice, but each replica needs its own device.",
                f"devices={sorted(set(names))}",
            )
        require_one_platform(self.devices)
        require_axes(self.axes, len(names))
        # After `require_axes`, because the axes decide which devices form a replica.
        require_own_rows(self.devices, list(map(self._replicas_of, self.workers)))
        require_threads(self.devices)
        if self.devices[0].platform == "cpu":
            # Otherwise each step gets new pages from the kernel: 81 ms instead of 64 ms for a small residual network.
            keep_freed_memory()
        axis_names, sizes = (REPLICA_AXIS, *(n for n, _ in self.axes)), (self.num_replicas, *(n for _, n in self.axes))
        # `shard_map` in `run` handles the replica axis manually. XLA partitions the program over the other axes.
        mesh = Mesh(np.array(self.devices).reshape(sizes), axis_names, axis_types=(AxisType.Auto,) * len(sizes))
        object.__setattr__(self, "mesh", mesh)
        if self.layout is not None:
            self.layout.require_axes(dict(mesh.shape))

    @classmethod
    def of(
        cls,
        devices: Sequence[str | jax.Device] | int | None,
        *,
        axes: tuple[tuple[str, int], ...] = (),
        layout: AbstractLayout | None = None,
        update_sharding: bool | None = False,
    ) -> "Topology":
        """Returns a topology over the given devices.

        Args:
          devices: a list of devices or names, or a number of local devices. None takes all local devices.
          axes: see `Topology`.
          layout: see `Topology`.
          update_sharding: see `Topology`.

        Raises:
          DeviceError: `devices` is neither a list nor a number, or a device does not exist.
        """
        return cls(parse_devices(devices), axes, layout, update_sharding=update_sharding)

    @cached_property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.devices) // self.devices_per_replica

    @cached_property
    def devices_per_replica(self) -> int:
        """The number of logical devices per replica."""
        return math.prod(n for _, n in self.axes)

    @cached_property
    def is_single(self) -> bool:
        """Whether there is only one device."""
        return len(self.devices) == 1

    @property
    def summary(self) -> str:
        """One line for the user: the replicas and their devices."""
        return summary_of(self.devices, self.devices_per_replica)

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
        """The indices of the processes that run replicas, ascending."""
        return tuple(sorted({d.process_index for d in self.devices}))

    @cached_property
    def num_workers(self) -> int:
        """The number of processes that run replicas."""
        return len(self.workers)

    @cached_property
    def worker_index(self) -> int:
        """The index of this process among the processes that run replicas."""
        return self.workers.index(jax.process_index())

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of all workers. One that waits to join running workers does not."""
        return self.worker_index == 0 and not membership.is_late()

    @cached_property
    def devices_here(self) -> tuple[jax.Device, ...]:
        """The devices of this process, replica by replica."""
        return tuple(d for d in self.devices if d.process_index == self.workers[self.worker_index])

    def local_devices_of(self, replica: int) -> list[jax.Device]:
        """Returns the devices of a replica that belong to this process."""
        return [d for d in self.devices_of(replica) if d in self.devices_here]

    @cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The first device of this process in each of its replicas, in replica order."""
        return tuple(self.local_devices_of(i)[0] for i in self.local_replicas)

    @cached_property
    def local_names(self) -> tuple[str, ...]:
        """The names of `local_devices`, as `parse_device` of this process reads them."""
        process_devices = jax.local_devices(backend=self.devices[0].platform)
        # With several processes, the id of a device is global, but `parse_device` needs its index in this process.
        return tuple(f"{device_name(d).partition(':')[0]}:{process_devices.index(d)}" for d in self.local_devices)

    @cached_property
    def local_replicas(self) -> range:
        """The indices of the replicas of this process. Several processes may have parts of one replica."""
        return self._replicas_of(self.workers[self.worker_index])

    def _replicas_of(self, process: int) -> range:
        places = [i // self.devices_per_replica for i, d in enumerate(self.devices) if d.process_index == process]
        return range(places[0], places[-1] + 1)

    @cached_property
    def input_workers(self) -> tuple[int, ...]:
        """For the processes that run the same replicas, and therefore read the same rows, the index of the first of them."""
        replicas = list(map(self._replicas_of, self.workers))
        return tuple(sorted({replicas.index(each) for each in replicas}))

    @cached_property
    def input_index(self) -> int:
        """The index of this process, or of the first one that runs the same replicas, among `input_workers`."""
        return [self._replicas_of(self.workers[i]) for i in self.input_workers].index(self.local_replicas)

    def dispatching(self, *, is_step: bool) -> AbstractContextManager[Any]:
        """Returns the context manager to hold while a program on these devices is dispatched.

        Args:
          is_step: whether the program is a training step, whose number the watchdog reports.

        Raises:
          PeerLostError: another process died, before or during the dispatch.
        """
        return process_dispatching() if self.num_workers == 1 else _dispatching(is_step=is_step)

    def require_agreement(self) -> None:
        """Checks that all workers have made the same mesh, the first time that they communicate. All of them must call it.

        Raises:
          TraceError: they have not.
        """
        watchdog = watch.own()
        if self._is_agreed or watchdog is None:
            return
        require_one_mesh(self.mesh, watchdog.agree)
        object.__setattr__(self, "_is_agreed", True)

    def require_peers(self) -> None:
        """Raises if another process died and user code has caught that error. Called where a loop takes the next batch.

        Raises:
          PeerLostError: see `raise_again`.
        """
        watchdog = None if self.num_workers == 1 else watch.own()
        if watchdog is not None:
            raise_again(watchdog)

    def default_device(self) -> AbstractContextManager[Any]:
        """Returns a context manager that runs JAX operations on the first device."""
        device: AbstractContextManager[Any] = jax.default_device(self.devices[0])
        return device

    def put_per_replica(self, local: list[Any]) -> list[jax.Array]:
        """Shards arrays `(local_replicas, ...)` over the replicas. May be called in a background thread.

        Returns:
          The global arrays `(num_replicas, ...)`.
        """
        return list(map(self._spread_from_here, local))

    def _spread_from_here(self, local: jax.Array | np.ndarray) -> jax.Array:
        # With several processes, each has only its rows of the array, and places them from the host.
        if self.num_workers == 1 and isinstance(local, jax.Array):
            placed: jax.Array = jax.device_put(local, self.per_replica)
            return placed
        return self._rows.put(np.asarray(local), (self.num_replicas, *local.shape[1:]))

    @cached_property
    def _rows(self) -> Placer:
        rows = [i for i, replica in enumerate(self.local_replicas) for _ in self.local_devices_of(replica)]
        return Placer(self.per_replica, self.devices_here, [slice(i, i + 1) for i in rows])

    def put_replicated(self, tree: PyTree) -> PyTree:
        """Replicates a pytree of arrays on all devices. All processes must pass the same values."""
        leaves, structure = flattened(tree)
        return structure.unflatten(map(self._whole.put_whole, leaves))

    @cached_property
    def _whole(self) -> Placer:
        return Placer(self.replicated, self.devices_here, [...] * len(self.devices_here))

    def take_back(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Replicates arrays, which other devices hold whole, on these devices. Reuses copies that are already here."""
        at_home = set(self.devices)
        # False is less than True, so a shard that is already on these devices comes first.
        nearest = [min(x.addressable_shards, key=lambda s: s.device not in at_home).data for x in values]
        taken: list[jax.Array] = jax.device_put(nearest, self.replicated)
        return taken

    def from_chief(self, values: list[Any]) -> list[Any]:
        """Broadcasts arrays from the first worker to all workers. All workers must call it, in their main threads."""
        return self.broadcast(values, 0)

    def from_source(self, values: list[Any]) -> list[Any]:
        """Broadcasts the values of variables from the worker `source`. All workers must call it, in their main threads."""
        return self.broadcast(values, self.source)

    def broadcast(self, values: list[Any], worker: int) -> list[Any]:
        """Broadcasts arrays from a worker to all workers. All workers must call it, in their main threads, with equal shapes."""
        # Not `multihost_utils.broadcast_one_to_all`: JAX 0.10.2 keeps the mesh that it sets, and with it the devices of a
        # group that this process has left.
        if self.num_workers == 1:
            return list(map(np.asarray, values))
        self.require_agreement()
        device = self.first_of_workers[worker]
        # The value on one device, and zeros on all others.
        rows = [self._rows_of_devices(value, lambda d: d == device) for value in map(np.asarray, values)]
        with self.dispatching(is_step=False):
            # A function of the module, because JAX would compile a local one at each call.
            sums = jax.jit(_sums_of_rows, out_shardings=self.replicated)(rows)
            return list(map(np.asarray, sums))

    def _rows_of_devices(self, value: np.ndarray, has_it: Callable[[jax.Device], bool]) -> jax.Array:
        """Returns an array with a row per device: the value on some devices of this process, and zeros on its others."""
        zeros = np.zeros((1, *value.shape), value.dtype)
        parts = [jax.device_put(value[None] if has_it(d) else zeros, d) for d in self.devices_here]
        per_device = NamedSharding(self.mesh, partition_spec((REPLICA_AXIS, *(name for name, _ in self.axes))))
        return jax.make_array_from_single_device_arrays((len(self.devices), *value.shape), per_device, parts)

    @cached_property
    def first_of_workers(self) -> tuple[jax.Device, ...]:
        """The first device of each process."""
        return tuple(next(d for d in self.devices if d.process_index == worker) for worker in self.workers)

    def join_per_replica(self, parts: Sequence[jax.Array | np.ndarray]) -> jax.Array:
        """Joins one array per local replica into an array `(num_replicas, ...)`.

        Arrays of CPUs are not copied. Arrays of other devices are copied there, because JAX has no views of them.
        """
        pairs = zip(parts, self.local_replicas, strict=True)
        placed = [_as_row(x, d) for x, i in pairs for d in self.local_devices_of(i)]
        return jax.make_array_from_single_device_arrays((self.num_replicas, *parts[0].shape), self.per_replica, placed)

    def exchange(self, values: np.ndarray) -> np.ndarray:
        """All-gathers an array over the workers. All workers must call it, in their main threads, with equal shapes.

        Returns:
          The arrays of all workers, `(num_workers, ...)`.
        """
        if self.num_workers == 1:
            return values[None]
        self.require_agreement()
        rows = self._rows_of_devices(values, lambda _: True)
        with self.dispatching(is_step=False):
            # The result is awaited here, because programs of several processes run one at a time (see `Turn`).
            # Not `multihost_utils.process_allgather`, which traces a new function at each call: 10 ms instead of 2 ms.
            gathered = np.asarray(jax.jit(_same, out_shardings=self.replicated)(rows))
            return gathered[[self.devices.index(d) for d in self.first_of_workers]]

    def from_neighbours(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns for each array one whose shards are those of the worker before. All workers must call it, in their main threads."""
        specs = tuple(x.sharding.spec for x in arrays if isinstance(x.sharding, NamedSharding))
        pairs = tuple((self.devices.index(source), self.devices.index(d)) for d, source in self.neighbours.items())
        with self.dispatching(is_step=False):
            return [x.block_until_ready() for x in _moved(list(arrays), self.mesh, specs, pairs)]

    @cached_property
    def neighbours(self) -> dict[jax.Device, jax.Device]:
        """For each device, the one in the worker before whose shards `from_neighbours` brings there."""
        places = [[d for d in self.devices if d.process_index == worker] for worker in self.workers]
        return {d: source for i, to in enumerate(places) for d, source in zip(to, places[i - 1], strict=True)}

    def exchange_input(self, values: np.ndarray) -> np.ndarray:
        """Does what `exchange` does, and returns the arrays of one process for each of `input_workers`."""
        rows: np.ndarray = self.exchange(values)[list(self.input_workers)]
        return rows

    def require_equal(self, arrays: Sequence[tuple[str, jax.Array]]) -> None:
        """Checks that devices which hold the same shard of an array hold the same values. All workers must call it.

        Args:
          arrays: paths of variables, and their arrays, which are divided over the workers.

        Raises:
          DivergenceError: they do not.
        """
        if arrays:
            digests = self.exchange(digests_of(self.devices, arrays)).max(0)
            require_equal_digests(self.devices, arrays, digests)

    @cached_property
    def pool(self) -> Pool:
        """The memory of the host from which batches are placed. All datasets share it, so that none needs fresh memory."""
        return Pool()

    @cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of a value that every replica holds whole."""
        return NamedSharding(self.mesh, partition_spec())

    @property
    def of_new_variables(self) -> "Topology | None":
        """The topology on which new variables are placed when they are created. None if it places none of them."""
        return self if self.num_workers == 1 or self.layout is not None else None

    def require_layout(self, variables: Sequence[tuple[str, jax.ShapeDtypeStruct]], workers: Sequence[int]) -> None:
        """Checks that the layout fits variables, which are given by paths, with each of some numbers of workers.

        Raises:
          InvalidArgumentError: it does not.
        """
        if self.layout is not None:
            per_worker = len(self.devices_here) / self.devices_per_replica
            sizes = {count: {**self.mesh.shape, REPLICA_AXIS: int(count * per_worker)} for count in workers}
            require_layout(self.layout, variables, sizes)

    def sharding_of_new(self, path: str, shape: Sequence[int]) -> NamedSharding | None:
        """Returns the sharding with which a variable is created.

        With several processes, None for a variable that each device holds whole: it is placed when a program first needs it, with the
        value of the chief. A variable that the layout shards never exists as a whole.
        """
        sharding = self.sharding_of(path, shape)
        return None if self.num_workers > 1 and sharding is self.replicated else sharding

    def sharding_of(self, path: str, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a variable.

        Args:
          path: path of the variable.
          shape: shape of the variable.
        """
        if self.layout is None:
            return self.replicated
        spec = self.layout.spec(path, tuple(shape), dict(self.mesh.shape))
        return self.replicated if spec == partition_spec() else NamedSharding(self.mesh, spec)

    @cached_property
    def shards_updates(self) -> bool:
        """Whether the replicas share the updates of large variables."""
        # It is faster on CPUs. For v5e:8, libtpu 0.0.42 makes all-reduces of half of the reduce-scatters, and predicts slower steps.
        is_wanted = self.devices[0].platform == "cpu" if self.update_sharding is None else self.update_sharding
        # Slots over several processes could not be read by one of them.
        return is_wanted and self.num_workers == 1 and self.num_replicas > 1 and not self.axes and self.layout is None

    def update_dim(self, shape: Sequence[int], itemsize: int) -> int | None:
        """Returns the dim along which the update of a variable is sharded over the replicas. None if each of them updates it as a whole."""
        num_bytes = math.prod(shape) * itemsize
        if not self.shards_updates or num_bytes < (1 if self.update_sharding else _LARGE_BYTES):
            return None
        return next((dim for dim, size in enumerate(shape) if size % self.num_replicas == 0), None)

    @property
    def divides_over_workers(self) -> bool:
        """Whether there may be variables of which no worker has the whole."""
        return self.layout is not None and self.num_workers > 1

    @property
    def divides_over_replicas(self) -> bool:
        """Whether variables are sharded over the replicas."""
        return self.layout is not None and REPLICA_AXIS in self.layout.axes and self.num_replicas > 1

    def divided_dim(self, path: str, shape: Sequence[int]) -> int | None:
        """Returns the dim along which a variable is sharded over the replicas, or None."""
        if not self.divides_over_replicas:
            return None
        spec = self.sharding_of(path, shape).spec
        dims = (names if isinstance(names, tuple) else (names,) for names in spec)
        return next((dim for dim, names in enumerate(dims) if REPLICA_AXIS in names), None)

    def put_variable(self, value: ArrayLike, sharding: NamedSharding) -> jax.Array:
        """Places the value of a variable on the devices, with the sharding of the variable."""
        placed: jax.Array = self.put_replicated(value) if sharding is self.replicated else put_shards(value, sharding)
        return placed

    @cached_property
    def per_replica(self) -> NamedSharding:
        """The sharding of an array whose leading dim is the replica."""
        return NamedSharding(self.mesh, partition_spec(REPLICA_AXIS))


def whole(array: jax.Array, name: str) -> np.ndarray:
    """Returns an array that is divided over several processes. All of them must call it, in their main threads.

    Args:
      array: the array.
      name: what it is, for the message.

    Raises:
      ContextError: another process does something else.
      PeerLostError: another process has died.
    """
    watchdog = watch.own()
    # Before the gather, which would wait for a process that does not read until the watchdog reports a stall.
    difference = None if watchdog is None else watchdog.agree({READ: [name], CALL: _call_of_user()})
    if difference is not None:
        raise ContextError(
            f"{name} was read on rank {jax.process_index()}",
            f"no process holds all of it, so all must read it at the same time, but {difference}.",
            "make this call on every process, not on the chief alone; phalanx.train.CheckpointManager(...).save() writes one checkpoint from all of them",
        )
    with _dispatching(is_step=False):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _call_of_user() -> list[str]:
    """Returns the call in the user's program that runs, for the messages of all processes. A long one is cut."""
    place = user_call()
    return [f"{place.expression[:80]} ({place})"] if place else []


def _dispatching(*, is_step: bool) -> AbstractContextManager[Any]:
    """See `Topology.dispatching`, with several processes."""
    watchdog = watch.own()
    return process_dispatching() if watchdog is None else Turn(watchdog, is_step)


def _as_row(array: jax.Array | np.ndarray, device: jax.Device) -> jax.Array:
    """Returns an array on a device with a new dim 0."""
    row: jax.Array
    if isinstance(array, np.ndarray) or is_on_cpu(array):
        row = jax.device_put(np.asarray(array)[None], device)
        return row
    with process_dispatching():
        # On an accelerator, a new dim takes a program, so it needs the lock.
        row = jax.device_put(array, device)[None]
    return row


def _same(rows: jax.Array) -> jax.Array:
    return rows


@partial(jax.jit, static_argnums=(1, 2, 3))
def _moved(
    arrays: list[jax.Array], mesh: Mesh, specs: tuple[Any, ...], pairs: tuple[tuple[int, int], ...]
) -> list[jax.Array]:
    def moved(*shards: jax.Array) -> list[jax.Array]:
        return [ppermute(x, mesh.axis_names, pairs) for x in shards]

    outputs: list[jax.Array] = jax.shard_map(moved, mesh=mesh, in_specs=specs, out_specs=list(specs), check_vma=False)(
        *arrays
    )
    return outputs


def _sums_of_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    # By default, `sum` widens bools and small integers.
    return [x.sum(0, dtype=x.dtype) for x in arrays]
