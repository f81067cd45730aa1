# SPDX-License-Identifier: Apache-2.0
"""Names of devices, virtual CPU devices, and the threads that several CPU devices need."""

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from phalanx._src.typed_jax import set_config
from phalanx.errors import DeviceError, StartupError, arguments, shown

# The first groups are those of TensorFlow's full names. `int` takes long for more digits than the last group allows.
_DEVICE_NAME = re.compile(
    r"^(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?([a-z]+):(\d{1,18})$", re.IGNORECASE
)
_MOST_DEVICES = 1 << 16


def set_virtual_cpu_devices(count: int) -> None:
    """Gives this process `count` CPU devices, to try strategies without accelerators.

    Call it outside all scopes, before any code uses JAX devices. The environment variable `PHALANX_CPU_DEVICES` has the
    same effect when Phalanx is imported.

    Args:
      count: number of CPU devices, at least 1.

    Raises:
      InvalidArgumentError: `count` is not an integer from 1 to 65536.
      StartupError: JAX has already initialized its devices.

    Example:
      >>> import phalanx
      >>> phalanx.set_virtual_cpu_devices(2)  # doctest: +SKIP
    """
    count = arguments.integer(
        "count",
        count,
        most=_MOST_DEVICES,
        kind=f"a number of devices, at most {_MOST_DEVICES}; a process has at least one CPU device",
        hint="set_virtual_cpu_devices(2)",
    )
    try:
        set_config("jax_num_cpu_devices", count)
    except RuntimeError:
        raise StartupError(
            f"set_virtual_cpu_devices({count})",
            "JAX has already initialized its devices, so their number cannot change.",
            "call it before the first array is created, or set PHALANX_CPU_DEVICES in the environment",
        ) from None
    if count > 1:
        # XLA reads NPROC as the size of its CPU thread pool. With fewer than two threads per device, the all-reduce
        # deadlocks (observed with 2, 3, 4 and 8 devices). More than two threads per device only cost speed.
        os.environ["NPROC"] = str(2 * count)


@dataclass(frozen=True)
class Held:
    """The part of an array that one device or task holds.

    Args:
      place: name of a device, or of a task of the cluster.
      index: the part of the array: one slice per dim.
      num_bytes: size of the part, in bytes.
    """

    place: str
    index: tuple[slice, ...]
    num_bytes: int


def device_name(device: jax.Device) -> str:
    """Returns the canonical name of a device, for example `"cpu:1"`."""
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return f"{platform}:{device.id}"


def parse_device(name: str | jax.Device) -> jax.Device:
    """Returns the local device of that name.

    Args:
      name: `"/gpu:0"`, `"gpu:0"`, `"/device:GPU:0"`, `"cpu:1"`, or a `jax.Device`.

    Raises:
      DeviceError: `name` is not a device name, or this process has no such device.
    """
    if isinstance(name, jax.Device):
        return name
    match = _DEVICE_NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(f"device={shown(name)}", "is not a device name.", 'a name such as "/gpu:0" or "cpu:1"')
    platform, index = match.group(1).lower(), int(match.group(2))
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:  # JAX has no platform of this name, or finds no device of it.
        devices = []
    if index >= len(devices):
        have = ", ".join(map(device_name, jax.local_devices()))
        raise DeviceError(
            f"device={shown(name)}",
            f"this process has only {have}.",
            _how_to_get(platform, index, has_some=bool(devices)),
        )
    # The index counts devices of this process. With several processes, `device.id` counts those of all.
    return devices[index]


def _how_to_get(platform: str, index: int, *, has_some: bool) -> str:
    """Returns a hint that makes JAX find a missing device.

    Args:
      platform: the first part of its name.
      index: the second part of its name.
      has_some: whether JAX has found other devices of the platform.
    """
    if platform == "cpu":
        return f"phalanx.set_virtual_cpu_devices({index + 1}) before JAX starts"
    if platform not in _PLUGINS or has_some:
        return "use one of these names"
    plugins, install, test = _PLUGINS[platform]
    if not any(map(importlib.util.find_spec, plugins)):
        return install.format(version=jax.__version__)
    if (chosen := os.environ.get("JAX_PLATFORMS")) and platform not in chosen.split(","):
        return f"unset JAX_PLATFORMS, which is {chosen!r} and hides other devices"
    return test


_CUDA = (
    ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    'pip install "jax[cuda12]=={version}", or "jax[cuda13]=={version}" for a driver with CUDA 13; or use one of these names',
    "nvidia-smi, which shows whether the driver finds a GPU; and see that CUDA_VISIBLE_DEVICES does not hide it",
)
_PLUGINS = {
    "cuda": _CUDA,
    "gpu": _CUDA,
    "tpu": (
        ("libtpu",),
        'pip install "jax[tpu]=={version}"; or use one of these names',
        "run it on a machine with TPUs that no other process uses; or use one of these names",
    ),
}
"""Per platform: the modules one of which JAX needs for it, what installs one, and what to look at if it is installed."""


def default_devices() -> list[jax.Device]:
    """Returns all local accelerators, or all local CPU devices if there are no accelerators."""
    return list(jax.local_devices())


def first_devices(count: int) -> tuple[jax.Device, ...]:
    """Returns the first `count` local devices.

    Raises:
      DeviceError: this process has fewer devices, or `count` is less than 1.
    """
    devices = default_devices()
    if not 0 < count <= len(devices):
        platform = devices[0].platform
        raise DeviceError(
            f"devices={shown(count)}",
            f"this process has {', '.join(map(device_name, devices))}.",
            f"phalanx.set_virtual_cpu_devices({count}) before JAX starts"
            if platform == "cpu" and len(devices) < count <= _MOST_DEVICES
            else f"devices={len(devices)}",
        )
    return tuple(devices[:count])


def _schedulable_cpus() -> int:
    # XLA makes one thread per CPU that the process may use (seen with `taskset` in JAX 0.10.2).
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_one_platform(devices: Sequence[jax.Device]) -> None:
    """Checks that all devices belong to one platform.

    Raises:
      DeviceError: the devices belong to several platforms.
    """
    platforms = sorted({d.platform for d in devices})
    if len(platforms) > 1:
        raise DeviceError(
            f"devices={list(map(device_name, devices))}",
            f"the devices belong to the platforms {' and '.join(platforms)}, but a program runs on one platform.",
            f"devices={[device_name(d) for d in devices if d.platform == devices[0].platform]}",
        )


def require_threads(devices: Sequence[jax.Device]) -> None:
    """Checks that XLA has enough threads for an all-reduce over several CPU devices.

    Raises:
      StartupError: XLA has fewer than two threads per device.
    """
    local_devices = [d for d in devices if d.process_index == jax.process_index()]
    if len(local_devices) <= 1 or local_devices[0].platform != "cpu":
        return
    needed = 2 * len(jax.local_devices(backend="cpu"))
    text = os.environ.get("NPROC", "")
    threads = int(text) if arguments.is_number(text) else _schedulable_cpus()
    if threads < needed:
        raise StartupError(
            f"a strategy over {len(devices)} CPU devices",
            f"the XLA thread pool has {threads} threads; with fewer than {needed}, the first all-reduce deadlocks.",
            f"phalanx.set_virtual_cpu_devices({needed // 2}) before JAX starts, or NPROC={needed} in the environment",
        )


def summary_of(devices: Sequence[jax.Device], per_replica: int) -> str:
    """Returns one line for the user.

    Args:
      devices: the devices of all replicas.
      per_replica: number of devices per replica.
    """
    count = len(devices) // per_replica
    replicas = f"{count} replica{'s' * (count > 1)}" + (f" of {per_replica} devices each" * (per_replica > 1))
    names = [device_name(d) for d in devices]
    workers = {d.process_index for d in devices}
    if len(workers) == 1:
        # A line of the terminal has room for so many.
        some = names if len(names) <= 8 else [*names[:2], "...", names[-1]]
        return f"{replicas} on {', '.join(some)}"
    size, kind = len(devices) // len(workers), names[0].partition(":")[0].upper()
    return f"{replicas} on {len(workers)} workers with {size} {kind} device{'s' * (size > 1)} each"


def parse_devices(devices: Sequence[str | jax.Device] | int | None) -> tuple[jax.Device, ...]:
    """Returns the devices that a strategy is given.

    Args:
      devices: a list of devices or names, or a number of local devices. None takes all local devices.

    Raises:
      DeviceError: `devices` is neither a list nor a number, or a device does not exist.
    """
    if devices is None:
        return tuple(default_devices())
    if arguments.is_integer(devices):
        return first_devices(devices)
    if not isinstance(devices, (list, tuple)):
        hint = 'devices=["cpu:0", "cpu:1"]'
        if isinstance(devices, str) and arguments.is_number(devices):
            hint = f"devices={devices}"
        elif isinstance(devices, (str, jax.Device)):
            hint = f"devices=[{shown(devices)}, ...], one list with all devices"
        raise DeviceError(f"devices={shown(devices)}", "must be a list of devices or a number of devices.", hint)
    return tuple(map(parse_device, devices))
