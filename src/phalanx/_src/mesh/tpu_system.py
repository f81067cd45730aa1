# SPDX-License-Identifier: Apache-2.0
"""The TPU system of this job: connects its hosts and discovers its cores."""

from collections.abc import Sequence
from itertools import groupby

import jax
import numpy as np

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.tpu import TPUClusterResolver
from phalanx._src.mesh.device_assignment import TPUTopology
from phalanx._src.runtime import bootstrap
from phalanx._src.runtime.settings import settings
from phalanx.errors import ClusterSourceError, DeviceError, InvalidArgumentError, shown

# The topology that emulates TPUs on CPU devices, or empty. Process-wide, like the JAX devices.
_virtual: list[TPUTopology] = []


def declare_virtual(mesh_shape: Sequence[int]) -> TPUTopology:
    """Makes the CPU devices of this process emulate a TPU system.

    Args:
      mesh_shape: number of cores along each dim.

    Raises:
      DeviceError: there are fewer CPU devices than cores.
    """
    devices = jax.devices("cpu")
    count = int(np.prod(mesh_shape))
    if count > len(devices):
        raise DeviceError(
            f"virtual_topology({tuple(mesh_shape)})",
            f"it needs {count} CPU devices, but this process has {len(devices)}.",
            f"phalanx.set_virtual_cpu_devices({count}) before JAX starts",
        )
    places = np.stack(np.unravel_index(np.arange(count), tuple(mesh_shape)), axis=-1)
    _virtual[:] = [_topology(mesh_shape, devices[:count], places)]
    return _virtual[0]


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> TPUTopology:
    """Connects the hosts of a TPU system and returns the coordinates of its cores.

    Call it outside all scopes, before JAX uses a device. `TPUStrategy` calls it too. Unlike in TensorFlow, it does not
    clear the memory of the TPUs.

    Args:
      cluster_resolver: describes the hosts. None is `TPUClusterResolver()`.

    Returns:
      The topology, with the coordinates x, y, z of the TPU chips and the core within a chip as dims; or the topology
      that `phalanx.testing.virtual_topology` declared.

    Raises:
      DeviceError: this machine has no TPU.
      ClusterError, StartupError: the hosts cannot be connected.
      InvalidArgumentError: `cluster_resolver` is not a ClusterResolver.

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
    # A prediction runs a script for TPUs on CPU devices.
    if settings.emulates_tpus and not _virtual:
        declare_virtual((len(jax.devices("cpu")), 1, 1, 1))
    if _virtual:
        return _virtual[0]
    try:
        bootstrap.start(resolver)
    except ClusterSourceError as e:
        # Nothing describes other hosts, but this machine may still have TPUs.
        return _of_devices(_tpus(e))
    return _of_devices(_tpus(None))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Removes a virtual topology. Call it outside all scopes. Real TPUs do not need it: JAX frees them at exit.

    Args:
      cluster_resolver: ignored.

    Source: tf.tpu.experimental.shutdown_tpu_system.

    Example:
      >>> import phalanx
      >>> phalanx.tpu.experimental.shutdown_tpu_system()
    """
    _virtual.clear()


def devices_of(topology: TPUTopology) -> list[list[jax.Device]]:
    """Returns the devices of a topology, as one list per task.

    Raises:
      DeviceError: this job has fewer devices than the topology.
    """
    platform = "tpu" if _has_tpus() else "cpu"
    tasks = _by_task(jax.devices(platform))
    num_tasks, cores = topology.num_tasks, topology.num_tpus_per_task
    if len(tasks) < num_tasks or any(len(devices) < cores for devices in tasks[:num_tasks]):
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
            f'pip install "jax[tpu]=={jax.__version__}" on a machine with TPUs; or, to emulate them, '
            "phalanx.set_virtual_cpu_devices(8) and phalanx.testing.virtual_topology((2, 2, 2))",
        ) from unresolved
    return list(jax.devices("tpu"))


def _has_tpus() -> bool:
    try:
        return bool(jax.devices("tpu"))
    except RuntimeError:  # This installation of JAX has no TPU platform.
        return False


def _of_devices(devices: Sequence[jax.Device]) -> TPUTopology:
    places = np.array([[*d.coords, d.core_on_chip] for d in devices])
    # A slice may begin anywhere in its pod.
    places -= places.min(axis=0)
    return _topology(tuple(int(n) for n in places.max(axis=0) + 1), devices, places)


def _topology(mesh_shape: Sequence[int], devices: Sequence[jax.Device], places: np.ndarray) -> TPUTopology:
    place = dict(zip(devices, places.tolist(), strict=True))
    return TPUTopology(
        mesh_shape=mesh_shape, device_coordinates=[[place[d] for d in task] for task in _by_task(devices)]
    )


def _by_task(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    ordered = sorted(devices, key=lambda d: d.process_index)
    return [list(own) for _, own in groupby(ordered, key=lambda d: d.process_index)]
