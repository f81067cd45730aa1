# SPDX-License-Identifier: Apache-2.0
"""In each process of a group, without Phalanx: Orbax saves and loads sharded arrays, with OCDBT and without compression."""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

WIDTH, KERNELS = 4096, 5
"""Kernels of 67 MB each in float32. With two slots per kernel, 1.0 GB."""

_arrays: list[jax.Array] = []


def prepare() -> list[int]:
    """Connects the processes, makes arrays that they divide, and returns the bytes of those here and of all."""
    config = json.loads(os.environ["TF_CONFIG"])
    addresses = config["cluster"]["worker"]
    if len(addresses) > 1:
        jax.distributed.initialize(addresses[0], len(addresses), config["task"]["index"])
    mesh = Mesh(np.array(jax.devices()), ("replica",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("replica"))
    draw = jax.jit(jax.random.uniform, static_argnums=1, out_shardings=rows)
    _arrays[:] = [draw(jax.random.key(i), (WIDTH, WIDTH)) for i in range(3 * KERNELS)]
    return bytes_of(_arrays)


def save(path: str) -> dict[str, float]:
    """Saves as a path that does not exist yet."""
    _step()
    with _options():
        return measured(lambda: ocp.save_async(path, _arrays), lambda response: response.result(), _step)


def load(path: str) -> dict[str, float]:
    """Loads arrays with the shardings of those that are here."""
    with _options():
        return measured(lambda: ocp.load(path, _arrays), jax.block_until_ready)


def _step() -> None:
    _arrays[:] = jax.block_until_ready(_scaled(_arrays))


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(arrays: list[jax.Array]) -> list[jax.Array]:
    """Computes new values in the memory of the old ones, as a training step does."""
    return [array * np.float32(0.999) for array in arrays]


def _options() -> ocp.Context:
    """Returns the options. Random numbers cannot be compressed."""
    options = ocp.Context()
    options.array.saving.use_compression = False
    return options


def bytes_of(arrays: list[jax.Array]) -> list[int]:
    """Returns the bytes that this process has of arrays, and those of all processes."""
    here = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    return [here, sum(array.nbytes for array in arrays)]


def measured(
    begin: Callable[[], Any], finish: Callable[[Any], object], step: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Returns seconds, and the peak of resident memory in GB.

    Args:
      begin: begins the work: `blocks` are the seconds until it returns.
      finish: waits for the end of the work, given what `begin` returned: `whole` are the seconds until then.
      step: called after `begin`: `next` are the seconds until then.
    """
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak that `VmHWM` shows: proc(5).
    start = time.perf_counter()
    begun = begin()
    blocks = time.perf_counter() - start
    step()
    next_step = time.perf_counter() - start
    finish(begun)
    whole = time.perf_counter() - start
    return {"blocks": blocks, "next": next_step, "whole": whole, "peak": _resident("VmHWM")}


def _resident(name: str) -> float:
    """Returns a line of the status of this process, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024e-9 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
