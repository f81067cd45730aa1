# SPDX-License-Identifier: Apache-2.0
"""Topologies that need not be here, by name: `v5e:16x16`, `2*v5e:16x16`, `h100:512x8`, `cpu:2`."""

import importlib.util
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from phalanx._src.runtime.streams import filtered
from phalanx._src.tools.estimate.chips import CHIPS, Chip
from phalanx.errors import DeviceError, InvalidArgumentError, MissingDependencyError, PhalanxError, shown

# At most nine digits: Python refuses to convert thousands of them, with an error that names no topology.
_NAME = re.compile(r"(?:(\d{1,9})\*)?([a-z0-9]+):(\d{1,9}(?:x\d{1,9})*)")
_EXAMPLE = 'topologies=["v5e:4x4", "h100:8", "cpu:2"]'
_MOST = 1 << 16
_HOST = (2, 2, 1)
"""The chips of a host of TPUs, along each dim."""


@dataclass(frozen=True)
class Target:
    """Devices that a program is compiled for.

    Args:
      name: the name that the user passed.
      chip: the kind of the devices. None for the CPU devices of this machine.
      sizes: chips along each dim of a torus, or hosts and GPUs per host, or the number of CPU devices.
      slices: number of slices, which only the network of the data centre connects.
    """

    name: str
    chip: Chip | None
    sizes: tuple[int, ...]
    slices: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes) * self.slices

    def devices(self) -> list[jax.Device]:
        """Returns the devices, host by host. They cannot run programs unless they are CPUs.

        Raises:
          MissingDependencyError: the compiler for them is not installed.
          DeviceError: the compiler does not know the topology, or this process has fewer CPU devices.
        """
        if self.chip is None:
            return _cpus(self)
        try:
            with _quiet():
                devices = _tpus(self) if self.chip.platform == "tpu" else _gpus(self)
        except Exception as e:
            raise (
                _missing(self)
                if _is_missing(e)
                else DeviceError(
                    f"topology {self.name!r}", f"the compiler refuses it: {str(e).splitlines()[0]}", _EXAMPLE
                )
            ) from e
        devices.sort(key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id))
        # `v5e:2` is a part of a host, and libtpu describes whole hosts.
        return devices[: self.num_devices]


def parse(names: Sequence[str]) -> list[Target]:
    """Returns the targets of these names. `v5p:1,16,256` stands for three.

    Raises:
      InvalidArgumentError: a name is not the name of a topology.
    """
    if isinstance(names, str) or not isinstance(names, (list, tuple)) or not names:
        raise InvalidArgumentError(f"topologies={shown(names)}", "must be a list of names.", _EXAMPLE)
    return [_parse(one) for name in names for one in _each(name)]


def _each(name: object) -> list[str]:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"topology {shown(name)}", "must be a str.", _EXAMPLE)
    kind, _, sizes = name.partition(":")
    return [f"{kind.strip().lower()}:{size.strip()}" for size in sizes.split(",")]


def _parse(name: str) -> Target:
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidArgumentError(f"topology {shown(name)}", "must be a kind of device, a colon and a size.", _EXAMPLE)
    slices, kind, sizes = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    if not 0 < math.prod(sizes) * slices <= _MOST:
        raise InvalidArgumentError(f"topology {shown(name)}", f"must have 1 to {_MOST} devices.", _EXAMPLE)
    if kind == "cpu":
        if len(sizes) > 1 or slices > 1:
            raise InvalidArgumentError(f"topology {shown(name)}", "CPU devices have one size.", "cpu:2")
        return Target(name, None, sizes)
    if kind not in CHIPS:
        raise InvalidArgumentError(
            f"topology {shown(name)}", f"the known kinds of devices are {', '.join([*CHIPS, 'cpu'])}.", _EXAMPLE
        )
    chip = CHIPS[kind]
    if chip.platform != "tpu" and slices > 1:
        raise InvalidArgumentError(f"topology {shown(name)}", "only TPUs have slices.", f"{kind}:{slices}x{match[3]}")
    return _torus(name, chip, sizes, slices) if chip.dims else _hosts(name, chip, sizes)


def _hosts(name: str, chip: Chip, sizes: tuple[int, ...]) -> Target:
    """Returns hosts of GPUs. A single number is the total number of GPUs."""
    if len(sizes) == 1:
        n = sizes[0]
        sizes = (1, n) if n <= chip.per_host else (n // chip.per_host, chip.per_host)
        if math.prod(sizes) != n:
            raise InvalidArgumentError(
                f"topology {shown(name)}",
                f"{n} GPUs do not fill hosts of {chip.per_host}.",
                f"{chip.name}:{n - n % chip.per_host}",
            )
    if len(sizes) > 2 or sizes[1] > chip.per_host:
        raise InvalidArgumentError(
            f"topology {shown(name)}", f"a host has at most {chip.per_host} GPUs.", f"{chip.name}:4x{chip.per_host}"
        )
    return Target(name, chip, sizes)


def _torus(name: str, chip: Chip, sizes: tuple[int, ...], slices: int) -> Target:
    """Returns slices of TPUs. A single number is the total number of chips, which form the most compact torus."""
    example = f"{chip.name}:{'x'.join(map(str, _HOST[:1] * chip.dims))}"
    if len(sizes) == 1:
        n, most = sizes[0], math.prod(chip.largest)
        if slices == 1 and n > most and n % most == 0:
            slices, n = n // most, most
        torus = _compact(n, chip)
        if torus is None:
            raise InvalidArgumentError(f"topology {shown(name)}", f"no torus of {chip.name} has {n} chips.", example)
        sizes = torus
    if len(sizes) != chip.dims:
        raise InvalidArgumentError(f"topology {shown(name)}", f"a slice of {chip.name} has {chip.dims} dims.", example)
    # Sorted, because a torus may be turned.
    if any(size > most for size, most in zip(sorted(sizes), sorted(chip.largest), strict=True)):
        longest = "x".join(map(str, chip.largest))
        raise InvalidArgumentError(
            f"topology {shown(name)}",
            f"a slice of {chip.name} has at most {longest} chips.",
            f"{max(2, -(-math.prod(sizes) // math.prod(chip.largest)))}*{chip.name}:{longest}",
        )
    return Target(name, chip, sizes, slices)


def _compact(count: int, chip: Chip) -> tuple[int, ...] | None:
    """Returns the torus with the smallest sum of sizes, or None if there is none."""
    if count < math.prod(_HOST):
        # Some chips of one host.
        return (count, *(1,) * (chip.dims - 1))
    # Larger ones consist of whole hosts.
    ranges = [range(_HOST[i], most + 1, _HOST[i]) for i, most in enumerate(chip.largest)]
    fitting = [sizes for sizes in itertools.product(*ranges) if math.prod(sizes) == count]
    return min(fitting, key=lambda sizes: (sum(sizes), sizes), default=None)


def _cpus(target: Target) -> list[jax.Device]:
    devices: list[jax.Device] = jax.local_devices(backend="cpu")
    if len(devices) < target.num_devices:
        raise DeviceError(
            f"topology {target.name!r}",
            f"this process has {len(devices)} CPU devices.",
            f"phalanx estimate --devices {target.num_devices}, or "
            f"phalanx.set_virtual_cpu_devices({target.num_devices}) before JAX starts",
        )
    return devices[: target.num_devices]


def _tpus(target: Target) -> list[jax.Device]:
    assert target.chip is not None
    sizes = target.sizes
    host: tuple[int, ...] = _HOST
    if math.prod(sizes) < math.prod(_HOST):
        sizes = _HOST[: target.chip.dims]
    elif target.chip.dims == 2 and sorted(sizes) == [2, 4]:
        host = (*sizes, 1)  # One host has eight chips.
    name = f"{target.chip.name}:{'x'.join(map(str, sizes))}"
    with _libtpu_settings():
        topology = topologies.get_topology_desc(
            name, platform="tpu", num_slices=target.slices, chips_per_host_bounds=host
        )
    return list(topology.devices)


def _gpus(target: Target) -> list[jax.Device]:
    assert target.chip is not None
    hosts, each = target.sizes
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.chip.target,
        topology=f"1x{hosts}x{each}",  # Slices, hosts and GPUs per host. GPUs have one slice.
    )
    return list(topology.devices)


def _is_missing(error: Exception) -> bool:
    """Returns whether JAX has no compiler for a platform, rather than refusing a topology."""
    return isinstance(error, NotImplementedError) or "not installed" in str(error)


def _missing(target: Target) -> PhalanxError:
    assert target.chip is not None
    called = f"topology {target.name!r}"
    if target.chip.platform == "tpu":
        return MissingDependencyError(
            called,
            "the compiler for it is not installed (libtpu).",
            f'pip install "jax[tpu]=={jax.__version__}", whose libtpu has a Google Cloud licence',
        )
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return DeviceError(
            called,
            "JAX's CUDA plugin found no GPU, so JAX did not register its compiler.",
            "JAX_PLATFORMS=cpu in the environment of this process, or the command phalanx estimate",
        )
    return MissingDependencyError(
        called,
        "the compiler for it is not installed (JAX's CUDA plugin).",
        f"pip install jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} --no-deps",
    )


@contextmanager
def _libtpu_settings() -> Iterator[None]:
    """Sets environment variables for libtpu, which reads them when it is loaded. Variables that are already set stay."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",  # Otherwise it waits for the metadata server of Google Cloud.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Otherwise a second process that compiles would be refused. No TPU is used.
        "TPU_LOG_DIR": "disabled",  # Otherwise it fills /tmp/tpu_logs, which Ray copies into the output of later programs.
    }
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _quiet() -> AbstractContextManager[None]:
    """Hides what libtpu and the CUDA plugin write while they look for hardware."""
    return filtered(sys.stderr, 2, lambda line: False)
