# SPDX-License-Identifier: Apache-2.0
"""The facts that a bug report needs."""

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from phalanx.errors.printable import printable

_NEEDED = ("phalanx", "jax", "jaxlib", "keras", "numpy")
_OPTIONAL = ("click", "flax", "grain", "optax", "orbax-checkpoint", "ray", "tensorboardX", "tensorflow", "torch")
# Names that begin with TF_CLI_ configure Terraform.
_NAMES = re.compile(
    r"(CUDA|GLOO|JAX|KERAS|NCCL|OMP|PHALANX|RAY|ROCM|SLURM|TF(?!_CLI_)|TPU|XLA)_|(NPROC|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$"
)
_HARMLESS = frozenset(
    [
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "CUDA_PATH",
        "GLOO_SOCKET_IFNAME",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_DEBUG_NANS",
        "JAX_DEFAULT_MATMUL_PRECISION",
        "JAX_DISABLE_JIT",
        "JAX_ENABLE_X64",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_NUM_PROCESSES",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
        "JAX_PLATFORMS",
        "JAX_PROCESS_ID",
        "JAX_TRACEBACK_FILTERING",
        "KERAS_BACKEND",
        "KERAS_HOME",
        "LD_LIBRARY_PATH",
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "NPROC",
        "OMP_NUM_THREADS",
        "PHALANX_CPU_DEVICES",
        "PHALANX_LEAST_WORKERS",
        "PHALANX_MEMBER",
        "PHALANX_MOST_WORKERS",
        "PHALANX_PROFILE",
        "PHALANX_RENDEZVOUS",
        "PHALANX_REPORT",
        "PHALANX_RESTART",
        "PHALANX_SERVERS_FOLDER",
        "PHALANX_STALL_TIMEOUT_S",
        "PHALANX_START_TIMEOUT_S",
        "PYTHONPATH",
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_TMPDIR",
        "ROCM_PATH",
        "SLURM_CPUS_PER_TASK",
        "SLURM_GPUS_PER_TASK",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_LOCALID",
        "SLURM_NNODES",
        "SLURM_NODEID",
        "SLURM_NPROCS",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "TF_CPP_MIN_LOG_LEVEL",
        "TPU_ACCELERATOR_TYPE",
        "TPU_CHIPS_PER_HOST_BOUNDS",
        "TPU_HOST_BOUNDS",
        "TPU_PROCESS_ADDRESSES",
        "TPU_PROCESS_BOUNDS",
        "TPU_SKIP_MDS_QUERY",
        "TPU_TOPOLOGY",
        "TPU_VISIBLE_CHIPS",
        "TPU_VISIBLE_DEVICES",
        "TPU_WORKER_HOSTNAMES",
        "TPU_WORKER_ID",
        "VIRTUAL_ENV",
        "XLA_FLAGS",
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
    ]
)
"""The variables whose values are shown. Other values may be secrets, whatever their names are."""

# A URL may have a password before the `@`, and a key or a signature behind the `?`.
_LOGIN, _QUERY = re.compile(r"//[^@\s]*@"), re.compile(r"(://[^?\s]*)\?\S*")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that affect JAX, Keras and Phalanx. Only values that are known to be harmless are shown.

    Example:
      >>> variables({"JAX_PLATFORMS": "cpu", "RAY_AUTH_TOKEN": "1234", "HOME": "/root"})
      {'JAX_PLATFORMS': 'cpu', 'RAY_AUTH_TOKEN': '(hidden)'}
    """
    named = {name: environ[name] for name in sorted(environ) if _NAMES.match(name)}
    return {name: _harmless(name, value) for name, value in named.items()}


def _harmless(name: str, value: str) -> str:
    """Returns the value of a variable, or as much of it as anyone may see."""
    if name == "TF_CONFIG":
        with suppress(ValueError, AttributeError, RecursionError):  # A description that is none may hold anything.
            known = json.loads(value)
            # Whatever else a user has written into it may be a secret.
            return json.dumps({part: known[part] for part in ("cluster", "task") if part in known})
    if name not in _HARMLESS:
        return "(hidden)"
    return printable(_QUERY.sub(r"\1?(hidden)", _LOGIN.sub("//(hidden)@", value)))


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
    # A batch system may allow fewer cores than `os.cpu_count` returns. macOS does not have the first function.
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
        # Here and not above: an import that fails is a part of the report too.
        import jax
        import keras

        # JAX adds the attributes of its config when it is imported, so type checkers do not know them.
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
