# SPDX-License-Identifier: Apache-2.0
"""In each of several workers, with `MultiWorkerMirroredStrategy`: a custom loop, Keras `fit`, and an all-reduce alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

import phalanx
from benchmarks import timing
from benchmarks.fit_epochs import Clock
from benchmarks.models import COMPARED_STEPS, LEARNING_RATE, MLP, sizes
from benchmarks.sharded_phalanx import PhalanxSharded
from benchmarks.with_phalanx import train_step

_measures: dict[str, Callable[[int], float]] = {}


@functools.cache
def _strategy() -> phalanx.Strategy:
    return phalanx.MultiWorkerMirroredStrategy()


def prepare_loop(name: str) -> list[float]:
    """Makes the loop, and returns the mean loss of some steps and the sizes of the weights after them."""
    strategy, model = _strategy(), _model()
    train = train_step(strategy, lambda: model)
    (batch,) = strategy.experimental_distribute_dataset([MLP.batch(strategy.num_replicas_in_sync)])
    step = phalanx.function(lambda batch: strategy.run(train, args=(batch,)))
    losses = [float(strategy.reduce("SUM", step(batch), axis=None)) for _ in range(COMPARED_STEPS)]
    _measures[name] = functools.partial(timing.seconds_a_step, lambda: step(batch), jax.block_until_ready)
    return [float(np.mean(losses)), *sizes(model.get_weights())]


def prepare_fit(name: str, steps_per_execution: int) -> list[float]:
    """The same by `fit`, on the same batch again and again."""
    model = _model()
    with _strategy().scope():
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(LEARNING_RATE), loss_of, steps_per_execution=steps_per_execution)
    batch = MLP.batch(_strategy().num_replicas_in_sync)

    def fit(epochs: int, steps: int) -> Any:
        options = {"batch_size": len(batch[0]), "epochs": epochs, "shuffle": False, "verbose": 0}
        return model.fit(*(np.concatenate([a] * steps) for a in batch), callbacks=[Clock()], **options).history

    (loss,) = fit(1, COMPARED_STEPS)["loss"]
    _measures[name] = lambda count: fit(2, count)["seconds"][-1] / count
    return [loss, *sizes(model.get_weights())]


def prepare_sharded(name: str) -> list[float]:
    """Makes a step on variables in shards, one per worker, and returns the losses of some steps."""
    step = PhalanxSharded(phalanx.MultiWorkerMirroredStrategy(layout=phalanx.fully_sharded()))
    losses = [step.loss() for _ in range(COMPARED_STEPS)]
    _measures[name] = functools.partial(timing.seconds_a_step, step, jax.block_until_ready)
    return losses


def prepare_all_reduce(name: str, size_bytes: int) -> list[float]:
    """Makes a program that sums an array of each worker, and returns the smallest and the largest element of the sum."""
    strategy = _strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(size_bytes // 4, 1 + context.replica_id_in_sync_group, "float32")
    )
    summed = lambda x: phalanx.get_replica_context().all_reduce("SUM", x)  # noqa: E731
    step = phalanx.function(lambda value: strategy.run(summed, args=(value,)))
    (total,) = strategy.experimental_local_results(step(value))
    _measures[name] = functools.partial(timing.seconds_a_step, lambda: step(value), jax.block_until_ready)
    return [float(total.min()), float(total.max())]


def seconds_a_step(name: str, count: int) -> float:
    """Times `count` steps; of `fit`, those of the second of two epochs."""
    return _measures[name](count)


def _model() -> keras.Model:
    with _strategy().scope():
        return MLP.model(keras)
