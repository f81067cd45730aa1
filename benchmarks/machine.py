# SPDX-License-Identifier: Apache-2.0
"""The devices that JAX has, with names, memory and versions: `python -m benchmarks.machine FILE` writes them as JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax

from benchmarks.gpu_report import MEMORY
from phalanx._src.mesh.devices import device_name
from phalanx._src.tools.env import report

_SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")


def describe() -> dict[str, dict[str, str]]:
    """Returns facts by section: the report of `phalanx env`, memory, and the drivers if they can be found."""
    devices = jax.local_devices()
    memory = {device_name(d): _memory(d) for d in devices}
    drivers = {"platform": " ".join(devices[0].client.platform_version.split()), **_drivers()}
    return report.describe() | {MEMORY: memory, "drivers": drivers}


def _memory(device: jax.Device) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f"{limit / 2**30:.1f} GiB" if limit else "not known to JAX"


def _drivers() -> dict[str, str]:
    """Returns what nvidia-smi prints, one line per GPU. Returns nothing if it is not installed."""
    if shutil.which(_SMI[0]) is None:
        return {}
    done = subprocess.run(_SMI, capture_output=True, text=True, timeout=60, check=False)
    return {f"{_SMI[0]} {i}": line for i, line in enumerate((done.stdout or done.stderr).splitlines())}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(describe()), encoding="utf-8")
