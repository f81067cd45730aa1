# SPDX-License-Identifier: Apache-2.0
"""In a child: passes over arrays with Phalanx's distributed iterator, and with plain `jax.device_put`."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import phalanx
from benchmarks import batches, timing

_TURN_S = 0.1
_CLASSES = 64
Pass = Callable[[], float]


def measure(batch_bytes: int, use: str, aligned: bool, rounds: int, turns: int) -> dict[str, Any]:
    """Checks that both hand out the same rows, then times a pass of each in turn.

    Args:
      batch_bytes: the size of a batch.
      use: what is done with each batch, of `_USES`.
      aligned: whether `device_put` need not copy.
      rounds: how many pairs to return.
      turns: how often each measures in a round.
    """
    strategy = phalanx.MirroredStrategy()
    x, y = batches.arrays(batch_bytes, aligned=aligned)
    rows = batches.rows_of(batch_bytes)
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=rows)
    used = _USES[use]
    plain = _passing(lambda: _plain(strategy, x, y, rows), used)
    ours = _passing(lambda: map(_arrays_of, dataset), used)
    _check(_plain(strategy, x, y, rows), map(_arrays_of, dataset))
    passes = _passes_for(plain)
    results = timing.interleaved(lambda: _mean_s(plain, passes), lambda: _mean_s(ours, passes), rounds, turns)
    return {"rounds": results, "passes_a_turn": passes}


def _plain(strategy: phalanx.Strategy, x: Any, y: Any, rows: int) -> Iterator[Any]:
    """Puts the same slices on the devices with the same sharding, one after the other."""
    n, topology = strategy.num_replicas_in_sync, strategy.topology
    divided = (n, rows // n) if n > 1 else (rows,)
    sharding = topology.per_replica if n > 1 else topology.replicated
    for start in range(0, len(x), rows):
        batch = (x[start : start + rows], y[start : start + rows])
        yield jax.device_put(tuple(a.reshape(*divided, *a.shape[1:]) for a in batch), sharding)


def _arrays_of(batch: Any) -> Any:
    """Returns the global arrays of a distributed batch."""
    return tuple(a.data if isinstance(a, phalanx.PerReplica) else a for a in batch)


def _waiting(n: int, batch: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    return None, lambda state, batch: jax.block_until_ready(batch)


def _reading(n: int, batch: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    return jnp.float32(0), jax.jit(lambda total, batch: total + batch[0].sum() + batch[1].sum())


def _training(n: int, batch: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """A step of linear regression, by each device on its own rows alone."""
    x, _ = batch
    kernel = jax.device_put(jnp.zeros((*x.shape[:-2], x.shape[-1], _CLASSES)), x.sharding)

    def loss_of(kernel: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ kernel - y[..., None] / 1e6) ** 2)

    return kernel, jax.jit(lambda kernel, batch: kernel - 1e-5 * jax.grad(loss_of)(kernel, *batch))


_USES = {"is waited for": _waiting, "is summed": _reading, "trains": _training}


def _passing(batches_of: Callable[[], Iterator[Any]], used: Any) -> Pass:
    first = next(batches_of())
    state, use = used(len(jax.devices()), first)
    jax.block_until_ready(use(state, first))

    def seconds() -> float:
        last = state
        start = time.perf_counter()
        for batch in batches_of():
            last = use(last, batch)
        jax.block_until_ready(last)
        return time.perf_counter() - start

    return seconds


def _check(*both: Iterator[Any]) -> None:
    for a, b in zip(*both, strict=True):
        same = [p.sharding == q.sharding and bool((p == q).all()) for p, q in zip(a, b, strict=True)]
        if not all(same):
            raise AssertionError("the two hand out different batches")


def _passes_for(one: Pass) -> int:
    one()
    return max(1, math.ceil(_TURN_S / one()))


def _mean_s(one: Pass, passes: int) -> float:
    return sum(one() for _ in range(passes)) / passes


_programs: list[Pass] = []


def prepare(batch_bytes: int, in_step: bool) -> float:
    """Makes a pass that waits for batches, or one of `strategy.run` of a sum, and returns the sum of the last labels."""
    strategy = phalanx.MirroredStrategy()
    x, y = batches.arrays(batch_bytes, aligned=False)
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=batches.rows_of(batch_bytes))

    def step(batch: Any) -> Any:
        x, y = batch
        return x.sum() + y.sum()

    _programs.append(
        _passing_through(
            lambda b: strategy.run(step, args=(b,)) if in_step else jax.block_until_ready(_arrays_of(b)), dataset
        )
    )
    if in_step:
        last = [strategy.run(step, args=(batch,)) for batch in dataset][-1]
        return float(strategy.reduce("SUM", last, axis=None))
    return float(sum(a.sum() for batch in dataset for a in jax.tree.leaves(_arrays_of(batch)[1])))


def _passing_through(step: Callable[[Any], Any], dataset: phalanx.DistributedDataset) -> Pass:
    def seconds() -> float:
        start = time.perf_counter()
        for batch in dataset:
            result = step(batch)
        jax.block_until_ready([a.data if isinstance(a, phalanx.PerReplica) else a for a in jax.tree.leaves(result)])
        return time.perf_counter() - start

    return seconds


def seconds_a_pass(passes: int) -> float:
    """Times passes over all batches."""
    return _mean_s(_programs[0], passes)
