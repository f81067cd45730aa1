# SPDX-License-Identifier: Apache-2.0
"""Collects the facts that a bug report needs. `phalanx env` runs `python -m phalanx._src.tools.env`."""

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

_NEEDED = ("phalanx", "jax", "jaxlib", "keras", "numpy")
_OPTIONAL = ("click", "flax", "grain", "optax", "orbax-checkpoint", "ray", "tensorboardX", "tensorflow", "torch")
_NAMES = re.compile(
    r"(CUDA|GLOO|JAX|KERAS|NCCL|OMP|PHALANX|RAY|ROCM|SLURM|TF(?!_CLI_)|TPU|XLA)_|(NPROC|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$"
)
_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that affect JAX, Keras and Phalanx, with secrets hidden.

    Example:
      >>> variables({"JAX_PLATFORMS": "cpu", "RAY_AUTH_TOKEN": "1234", "HOME": "/root"})
      {'JAX_PLATFORMS': 'cpu', 'RAY_AUTH_TOKEN': '(hidden)'}
    """
    named = {name: environ[name] for name in sorted(environ) if _NAMES.match(name)}
    return {n: "(hidden)" if _SECRET_NAMES.search(n) else _LOGIN.sub("//(hidden)@", v) for n, v in named.items()}


def versions(names: tuple[str, ...] = _NEEDED) -> dict[str, str]:
    """Returns the versions of Python and of the installed packages among `names`."""
    installed_versions = {"python": platform.python_version()}
    for name in names:
        try:
            installed_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed_versions


def system() -> dict[str, str]:
    """Returns the operating system, and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {"os": platform.platform(), "machine": platform.machine(), "cores": str(cores)}


def describe() -> dict[str, Any]:
    """Returns the whole report: versions, system, devices, settings and environment variables."""
    devices, settings = _devices()
    return {
        "versions": versions(_NEEDED + _OPTIONAL),
        "system": {**system(), "executable": sys.executable},
        "devices": devices,
        "settings": settings,
        "variables": variables(os.environ),
    }


def _devices() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the devices of this process, and settings of JAX and Keras. If that fails, returns the error instead."""
    try:
        import jax
        import keras

        config: Any = jax.config
        devices = {f"{d.platform}:{d.id}": d.device_kind for d in jax.local_devices()}
        settings = {
            "keras backend": keras.backend.backend(),
            "keras dtype policy": keras.config.dtype_policy().name,
            "jax_enable_x64": str(config.jax_enable_x64),
            "jax_default_matmul_precision": str(config.jax_default_matmul_precision),
        }
    except Exception as e:  # The report must also work if JAX does not, so the error becomes a part of it.
        return {"none": f"{type(e).__name__}: {e}"}, {}
    return devices, settings


def as_text(report: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a report as readable text.

    Example:
      >>> print(as_text({"versions": {"jax": "0.10.2"}, "variables": {}}))
      versions
        jax  0.10.2
      variables
        (none)
    """
    lines: list[str] = []
    for title, entries in report.items():
        width = max(map(len, entries), default=0)
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in entries.items())]
        lines += [] if entries else ["  (none)"]
    return "\n".join(lines)


if __name__ == "__main__":
    environment = describe()
    print(json.dumps(environment, indent=2) if "--json" in sys.argv[1:] else as_text(environment))
