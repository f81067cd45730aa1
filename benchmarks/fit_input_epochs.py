# SPDX-License-Identifier: Apache-2.0
"""In a child: epochs of `fit` of a model that computes nothing, in Phalanx's scope and without it."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

import phalanx
from benchmarks import timing

_ROWS = 128


class _Batches(keras.utils.PyDataset):
    """Slices of arrays."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def measure(
    kind: str, megabytes: float, replicas: int, steps_per_execution: int, shuffle: bool, rounds: int
) -> list[timing.Pair]:
    """In a child: the seconds of a step in each round, of Phalanx and of Keras.

    Args:
      kind: kind of the data.
      megabytes: size of a global batch.
      replicas: number of replicas of Phalanx.
      steps_per_execution: as `compile` takes it.
      shuffle: whether the rows are shuffled.
      rounds: how many pairs to return.
    """
    width = max(16, int(megabytes * 1e6 / 4 / _ROWS))
    steps = 24 if megabytes > 50 else 96 if megabytes > 1 else 800
    x = np.empty((_ROWS * steps, width), np.float32)
    x[:] = np.random.default_rng(0).standard_normal((1, width), np.float32)
    y = np.zeros(_ROWS * steps, np.int32)
    data = _data_of(kind, x, y, shuffle)
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        ours = _model(width, steps_per_execution)
    timers = [functools.partial(_seconds, model, data, steps) for model in (ours, _model(width, steps_per_execution))]
    for timer in timers * 2:
        timer()
    return timing.interleaved(*timers, rounds)


def _model(width: int, steps_per_execution: int) -> keras.Model:
    inputs = keras.Input((width,))
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Lambda(lambda x: x[:, :8])(inputs)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, steps_per_execution=steps_per_execution)
    return model


def _data_of(kind: str, x: np.ndarray, y: np.ndarray, shuffle: bool) -> Callable[[], dict[str, Any]]:
    batches = [(x[i : i + _ROWS], y[i : i + _ROWS]) for i in range(0, len(x), _ROWS)]
    if kind == "generator":

        def generated() -> Iterator[Any]:
            yield from batches

        return lambda: {"x": generated()}
    if kind == "PyDataset":
        return lambda: {"x": _Batches(batches)}
    rows = jax.numpy.asarray(x) if kind == "JAX" else x
    return lambda: {"x": rows, "y": y, "batch_size": _ROWS, "shuffle": shuffle}


def _seconds(model: keras.Model, data: Callable[[], dict[str, Any]], steps: int) -> float:
    start = time.perf_counter()
    model.fit(verbose=0, **data())
    return (time.perf_counter() - start) / steps
