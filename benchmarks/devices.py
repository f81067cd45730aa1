# SPDX-License-Identifier: Apache-2.0
"""The devices that benchmarks and contract tests use: `PHALANX_TEST_DEVICES=gpu:0,gpu:1` names them."""

import os
from collections.abc import Iterable

VARIABLE = "PHALANX_TEST_DEVICES"
NAMES = tuple(filter(None, os.environ.get(VARIABLE, "").split(",")))
"""The names of the devices. If there are none, a measurement gets as many virtual CPU devices as it needs."""


def fitting(counts: Iterable[int]) -> list[int]:
    """Returns those numbers of replicas for which there are enough devices."""
    return [count for count in counts if not NAMES or count <= len(NAMES)]


def at_most(count: int) -> int:
    """Returns `count`, or the number of devices if there are fewer."""
    return min(count, len(NAMES) or count)


def environment(count: int) -> dict[str, str]:
    """Returns the environment variables of a process in which JAX has `count` devices."""
    if any(not name.startswith("cpu:") for name in NAMES):
        indices = ",".join(name.partition(":")[2] for name in NAMES[:count])
        visible = {f"JAX_{vendor}_VISIBLE_DEVICES": indices for vendor in ("CUDA", "ROCM")}
        return visible | {VARIABLE: ",".join(NAMES[:count]), "KERAS_BACKEND": "jax"}
    # What Phalanx sets, for programs without it: all-reduces deadlock with fewer threads.
    threads = {"NPROC": str(2 * count)} if count > 1 else {}
    names = ",".join(f"cpu:{i}" for i in range(count))
    return threads | {VARIABLE: names, "PHALANX_CPU_DEVICES": str(count), "KERAS_BACKEND": "jax"}
