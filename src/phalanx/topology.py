# SPDX-License-Identifier: Apache-2.0
"""Device names, virtual CPU devices, and the mesh that maps replicas to devices."""

import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phalanx import watch
from phalanx.errors import DeviceError, InvalidArgumentError, PeerLostError, StartupError, StateLostError

REPLICA_AXIS = "replica"
"""The mesh axis over which `Strategy.run` maps its replica function."""

dispatch_lock = threading.RLock()
"""Two threads that dispatch programs over several devices can deadlock inside XLA, whatever its thread pool."""

_NEWS_S = 3.0
_STATUS = re.compile(r"[A-Z_]+: ")
_DEVICE_NAME = re.compile(
    r"^(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?([a-z]+):(\d+)$", re.IGNORECASE
)


def set_virtual_cpu_devices(count: int) -> None:
    """Gives this process `count` CPU devices, to try strategies without accelerators.

    Call it before anything touches JAX devices; the environment variable `PHALANX_CPU_DEVICES` does the same at import.

    Args:
      count: how many CPU devices, at least 1.

    Raises:
      InvalidArgumentError: `count` is less than 1.
      StartupError: JAX has started its devices already.

    Example:
      >>> import phalanx
      >>> phalanx.set_virtual_cpu_devices(2)  # doctest: +SKIP
    """
    if count < 1:
        raise InvalidArgumentError(
            f"count={count}", "a process has at least one CPU device.", "set_virtual_cpu_devices(2)"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as e:
        raise StartupError(
            f"set_virtual_cpu_devices({count})",
            "JAX has started its devices already, and their number cannot change afterwards.",
            "call it before the first array is made, or set PHALANX_CPU_DEVICES in the environment",
        ) from e
    if count > 1:
        # XLA reads NPROC as the size of its CPU thread pool. With fewer than two threads a device the all-reduce
        # deadlocks (seen for 2, 3, 4 and 8 devices); more than two only cost speed.
        os.environ["NPROC"] = str(2 * count)


def device_name(device: jax.Device) -> str:
    """Returns the canonical name of a device, for example `"cpu:1"`."""
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return f"{platform}:{device.id}"


def parse_device(name: str | jax.Device) -> jax.Device:
    """Returns the local device of that name.

    Args:
      name: `"/gpu:0"`, `"gpu:0"`, `"/device:GPU:0"`, `"cpu:1"`, or a `jax.Device`.

    Raises:
      DeviceError: the name cannot be read, or this process has no such device.
    """
    if isinstance(name, jax.Device):
        return name
    match = _DEVICE_NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(f"device={name!r}", "not a device name.", 'a name such as "/gpu:0" or "cpu:1"')
    platform, index = match.group(1).lower(), int(match.group(2))
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        devices = []
    if index >= len(devices):
        have = ", ".join(map(device_name, jax.local_devices()))
        hint = f"set_virtual_cpu_devices({index + 1}) before JAX starts" if platform == "cpu" else "one of these names"
        raise DeviceError(f"device={name!r}", f"this process has {have}.", hint)
    return devices[index]


def default_devices() -> list[jax.Device]:
    """Returns all local accelerators, else all local CPU devices."""
    return list(jax.local_devices())


@dataclass(frozen=True)
class Topology:
    """Which replica runs on which device.

    Args:
      devices: one device a replica, in replica order.

    Raises:
      DeviceError: no device, or one device twice.
      StartupError: several CPU devices without the threads they need.

    Example:
      >>> Topology.of(["cpu:0"]).num_replicas
      1
    """

    devices: tuple[jax.Device, ...]
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
        _require_threads(self.devices)
        mesh = Mesh(np.array(self.devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        object.__setattr__(self, "mesh", mesh)

    @classmethod
    def of(cls, devices: Sequence[str | jax.Device] | None) -> "Topology":
        """Returns the topology over `devices`, or over all local ones."""
        if isinstance(devices, str):
            raise DeviceError(f"devices={devices!r}", "must be a list of devices.", f"devices=[{devices!r}]")
        return cls(tuple(map(parse_device, devices)) if devices else tuple(default_devices()))

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The processes that have a replica, in order."""
        return tuple(sorted({d.process_index for d in self.devices}))

    @property
    def num_workers(self) -> int:
        """The number of processes that have a replica."""
        return len(self.workers)

    @cached_property
    def worker_index(self) -> int:
        """This process's number among them."""
        return self.workers.index(jax.process_index())

    @cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process's replicas, in replica order."""
        return tuple(d for d in self.devices if d.process_index == self.workers[self.worker_index])

    @cached_property
    def local_replicas(self) -> range:
        """The numbers of this process's replicas."""
        first = self.devices.index(self.local_devices[0])
        return range(first, first + len(self.local_devices))

    def dispatching(self, *, is_step: bool) -> AbstractContextManager[Any]:
        """Returns what must be held while a program over these devices is dispatched.

        Raises:
          PeerLostError: another process has died, before or meanwhile.
        """
        own = None if self.num_workers == 1 else watch.own()
        return dispatch_lock if own is None else _Turn(own, is_step)

    def put_per_replica(self, local: list[Any]) -> list[jax.Array]:
        """Puts arrays `(local replicas, ...)` on the devices. May be called in a background thread.

        Returns:
          The global arrays `(num_replicas, ...)`.
        """
        if self.num_workers == 1:
            return jax.device_put(local, self.per_replica)
        return list(map(self._spread_from_here, local))

    def _spread_from_here(self, local: Any) -> jax.Array:
        first = self.local_replicas.start

        def own(index: Any) -> Any:
            return local[index[0].start - first : index[0].stop - first]

        # Half the time of make_array_from_process_local_data, which finds out what is known here.
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
        parts = [jax.device_put(value, device) for device in self.local_devices]
        return jax.make_array_from_single_device_arrays(np.shape(value), self.replicated, parts)

    def from_chief(self, values: list[Any]) -> list[Any]:
        """Returns what the first worker has of some arrays; all workers must call it, on their main threads."""
        with self.dispatching(is_step=False):
            return multihost_utils.broadcast_one_to_all(values, is_source=self.worker_index == 0)

    def join_per_replica(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Makes one array `(num_replicas, ...)` of one for each local replica, which is on its device already or put there."""
        placed = [jax.device_put(x, d)[None] for x, d in zip(parts, self.local_devices, strict=True)]
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
    def of_new_variables(self) -> NamedSharding | None:
        """The sharding with which variables are made.

        None between processes: there they are placed when a program first needs them, with the chief's values.
        """
        return self.replicated if self.num_workers == 1 else None

    @cached_property
    def per_replica(self) -> NamedSharding:
        """The sharding of an array whose leading dim is the replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))


class _Turn:
    """Something that all processes do together, one after the other."""

    def __init__(self, own: watch.Watch, is_step: bool) -> None:
        self._watch, self._is_step = own, is_step

    def __enter__(self) -> None:
        if lost := self._watch.loss():
            raise _peer_lost(lost)
        dispatch_lock.acquire()
        self._watch.begin(is_step=self._is_step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watch.end(is_step=self._is_step, has_failed=error is not None)
        dispatch_lock.release()
        # Where a process dies, what the others see first is a program that fails: all that it can say is less than this.
        if error is not None and _is_of_program(error) and (lost := self._watch.loss(_NEWS_S)):
            raise _peer_lost(lost) from None


def _is_of_program(error: BaseException) -> bool:
    """Whether a program has failed while it ran; what its collectives raise is a ValueError, which begins with a status."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, (jax.errors.JaxRuntimeError, StateLostError))


def _peer_lost(how: str) -> PeerLostError:
    return PeerLostError(
        how,
        "no step can be done without it.",
        "phalanx run --max-restarts 3 ..., and let the script go on from its last checkpoint",
    )


def _schedulable_cpus() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _require_threads(devices: Sequence[jax.Device]) -> None:
    own = [d for d in devices if d.process_index == jax.process_index()]
    if len(own) <= 1 or own[0].platform != "cpu":
        return
    needed = 2 * len(jax.local_devices(backend="cpu"))
    text = os.environ.get("NPROC", "")
    threads = int(text) if text.isdigit() else _schedulable_cpus()
    if threads < needed:
        raise StartupError(
            f"a strategy over {len(devices)} CPU devices",
            f"XLA's CPU thread pool has {threads} threads; {needed - 1} or fewer deadlock in the first all-reduce.",
            f"phalanx.set_virtual_cpu_devices({needed // 2}) before JAX starts, or NPROC={needed} in the environment",
        )
