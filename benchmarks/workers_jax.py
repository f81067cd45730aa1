# SPDX-License-Identifier: Apache-2.0
"""In each of several workers, without Phalanx: the step that an expert writes in JAX, and an all-reduce alone."""

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import timing
from benchmarks.handwritten import pure_step
from benchmarks.models import COMPARED_STEPS, MLP, sizes
from benchmarks.sharded import HandSharded

_AXIS = "replica"
_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec(_AXIS)
_measures: dict[str, Callable[[int], float]] = {}


@functools.cache
def _mesh() -> Mesh:
    """Connects this process with the others, and returns the mesh of their devices."""
    config = json.loads(os.environ["TF_CONFIG"])
    addresses = config["cluster"]["worker"]
    if len(addresses) > 1:
        jax.distributed.initialize(addresses[0], len(addresses), config["task"]["index"])
    return Mesh(np.array(jax.devices()), (_AXIS,), axis_types=(AxisType.Auto,))


def prepare_loop(name: str) -> list[float]:
    """Makes the step, and returns the mean loss of some steps and the sizes of the weights after them."""
    n = _mesh().size
    step, state = pure_step(MLP.model(keras), _summed if n > 1 else lambda grads: grads, MLP.per_replica_batch * n)
    specs = {"in_specs": (_WHOLE, _SPLIT, _SPLIT), "out_specs": (_SPLIT, _WHOLE)}
    program = jax.jit(jax.shard_map(step, mesh=_mesh(), check_vma=False, **specs), donate_argnums=0)
    state = _placed(jax.tree.map(np.asarray, state), _WHOLE)
    batch = _placed(MLP.batch(n), _SPLIT)

    def run() -> jax.Array:
        nonlocal state
        loss, state = program(state, *batch)
        return loss

    losses = [multihost_utils.process_allgather(run(), tiled=True).sum() for _ in range(COMPARED_STEPS)]
    _measures[name] = functools.partial(timing.seconds_a_step, run, jax.block_until_ready)
    return [float(np.mean(losses)), *sizes(jax.device_get(jax.tree.leaves(state[0])))]


def prepare_sharded(name: str) -> list[float]:
    """Makes a step on variables in shards, one per worker, and returns the losses of some steps."""
    step = HandSharded(_mesh().size, 1, "replica")
    losses = [step.loss() for _ in range(COMPARED_STEPS)]
    _measures[name] = functools.partial(timing.seconds_a_step, step, jax.block_until_ready)
    return losses


def prepare_all_reduce(name: str, size_bytes: int) -> list[float]:
    """Makes a program that sums an array of each worker, and returns the smallest and the largest element of the sum."""
    program = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, _AXIS), mesh=_mesh(), in_specs=_SPLIT, out_specs=_SPLIT, check_vma=False
        )
    )
    ranks = 1 + np.arange(_mesh().size, dtype="float32")
    value = _placed(np.tile(ranks[:, None], size_bytes // 4), _SPLIT)
    total = np.asarray(program(value).addressable_shards[0].data)
    _measures[name] = functools.partial(timing.seconds_a_step, lambda: program(value), jax.block_until_ready)
    return [float(total.min()), float(total.max())]


def seconds_a_step(name: str, count: int) -> float:
    """Times `count` steps."""
    return _measures[name](count)


def _placed(tree: Any, spec: PartitionSpec) -> Any:
    return jax.device_put(tree, NamedSharding(_mesh(), spec))


def _summed(grads: Any) -> Any:
    buffer, unravel = ravel_pytree(grads)
    return unravel(jax.lax.psum(buffer, _AXIS))
