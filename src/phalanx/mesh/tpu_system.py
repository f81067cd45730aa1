# SPDX-License-Identifier: Apache-2.0
"""The TPU system of this job: its hosts are connected, and its cores found."""

from collections.abc import Sequence
from itertools import groupby

import jax
import numpy as np

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.tpu import TPUClusterResolver
from phalanx.errors import ClusterSourceError, DeviceError, InvalidArgumentError, shown
from phalanx.mesh import bootstrap
from phalanx.mesh.device_assignment import Topology

# What stands for the TPUs of a machine that has none; one for a process, as are its devices.
_virtual: list[Topology] = []


def declare_virtual(mesh_shape: Sequence[int]) -> Topology:
    """Lets the CPU devices stand for a TPU system of that shape, in this process."""
    devices = jax.devices("cpu")
    count = int(np.prod(mesh_shape))
    if count > len(devices):
        raise DeviceError(
            f"virtual_topology({tuple(mesh_shape)})",
            f"it needs {count} CPU devices, and there are {len(devices)}.",
            f"phalanx.set_virtual_cpu_devices({count}) before JAX starts",
        )
    places = np.stack(np.unravel_index(np.arange(count), tuple(mesh_shape)), axis=-1)
    _virtual[:] = [_topology(mesh_shape, devices[:count], places)]
    return _virtual[0]


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Connects the hosts of a TPU system, and finds its cores. Outside all scopes, before JAX uses a device.

    `TPUStrategy` does it too. What the TPUs hold stays there: JAX starts with empty ones.

    Args:
      cluster_resolver: what knows the hosts; None is `TPUClusterResolver()`.

    Returns:
      Where each core is: in the TPUs' own coordinates x, y, z and the core of a chip; or the virtual topology that
      `phalanx.testing.virtual_topology` has declared.

    Raises:
      DeviceError: this machine has no TPU.
      ClusterError, StartupError: the hosts cannot be connected.
      InvalidArgumentError: `cluster_resolver` is something else.

    Source: tf.tpu.experimental.initialize_tpu_system.

    Example:
      >>> import phalanx, phalanx.testing
      >>> _ = phalanx.testing.virtual_topology((2, 2, 2))
      >>> resolver = phalanx.cluster_resolver.TPUClusterResolver(tpu="")
      >>> phalanx.tpu.experimental.initialize_tpu_system(resolver)
      Topology(mesh_shape=(2, 2, 2), 1 x 8 cores)
    """
    resolver = TPUClusterResolver() if cluster_resolver is None else cluster_resolver
    if not isinstance(resolver, ClusterResolver):
        raise InvalidArgumentError(
            f"cluster_resolver={shown(resolver)}", "must be a ClusterResolver.", 'TPUClusterResolver("local")'
        )
    if _virtual:
        return _virtual[0]
    try:
        bootstrap.start(resolver)
    except ClusterSourceError as e:
        # Nothing tells of other hosts; this one may have TPUs all the same.
        return _of_devices(_tpus(e))
    return _of_devices(_tpus(None))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Forgets a virtual topology. Outside all scopes. TPUs need no such call: JAX frees them when the process ends.

    Args:
      cluster_resolver: ignored.

    Source: tf.tpu.experimental.shutdown_tpu_system.

    Example:
      >>> import phalanx
      >>> phalanx.tpu.experimental.shutdown_tpu_system()
    """
    _virtual.clear()


def devices_of(topology: Topology) -> list[list[jax.Device]]:
    """Returns the devices that stand at the coordinates of a topology: for each task its own.

    Raises:
      DeviceError: there are fewer.
    """
    platform = "tpu" if _has_tpus() else "cpu"
    tasks = _by_task(jax.devices(platform))
    wanted, cores = topology.num_tasks, topology.num_tpus_per_task
    if len(tasks) < wanted or any(len(devices) < cores for devices in tasks[:wanted]):
        raise DeviceError(
            f"{topology}",
            f"this job has {' + '.join(str(len(t)) for t in tasks)} devices of the platform {platform!r}.",
            "the topology that initialize_tpu_system(resolver) returns"
            if platform == "tpu"
            else f"phalanx.set_virtual_cpu_devices({cores}) before JAX starts",
        )
    return tasks


def _tpus(unresolved: Exception | None) -> list[jax.Device]:
    if not _has_tpus():
        raise DeviceError(
            "initialize_tpu_system",
            f"this machine has no TPU, only {jax.default_backend()} devices.",
            "phalanx.set_virtual_cpu_devices(8) and phalanx.testing.virtual_topology((2, 2, 2)), to try it without",
        ) from unresolved
    return list(jax.devices("tpu"))


def _has_tpus() -> bool:
    try:
        return bool(jax.devices("tpu"))
    except RuntimeError:  # JAX knows no such platform here.
        return False


def _of_devices(devices: Sequence[jax.Device]) -> Topology:
    places = np.array([[*d.coords, d.core_on_chip] for d in devices])
    places -= places.min(axis=0)
    return _topology(tuple(int(n) for n in places.max(axis=0) + 1), devices, places)


def _topology(mesh_shape: Sequence[int], devices: Sequence[jax.Device], places: np.ndarray) -> Topology:
    place = dict(zip(devices, places.tolist(), strict=True))
    return Topology(mesh_shape=mesh_shape, device_coordinates=[[place[d] for d in task] for task in _by_task(devices)])


def _by_task(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    ordered = sorted(devices, key=lambda d: d.process_index)
    return [list(own) for _, own in groupby(ordered, key=lambda d: d.process_index)]
