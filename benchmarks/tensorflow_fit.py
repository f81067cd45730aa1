# SPDX-License-Identifier: Apache-2.0
"""The same step with tf.distribute through Keras `model.fit`. In an environment of its own.

Two Adams, three input pipelines and `steps_per_execution=10` were tried; none was clearly faster than this.
"""

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

from benchmarks.models import CASES, LEARNING_RATE
from benchmarks.tensorflow_peer import mirrored

_programs: list[Callable[[int, int], Any]] = []


class _Clock(keras.callbacks.Callback):
    """Times the steps of each epoch, without what a call of `fit` costs before and after them."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["seconds"] = time.perf_counter() - self._start


def prepare(case: str, replicas: int) -> list[float]:
    """Makes the program, runs ten steps, and returns their losses."""
    _programs.append(_program(case, replicas))
    return _programs[0](10, 1)["loss"]


def seconds_a_step(count: int) -> float:
    """Times `count` steps, after as many in the same call of `fit` that fill its pipeline."""
    return _programs[0](2, count)["seconds"][-1] / count


def steps_for(turn_s: float) -> int:
    """Returns how many steps take about `turn_s`."""
    return max(3, round(turn_s / seconds_a_step(5)))


def _program(case: str, replicas: int) -> Callable[[int, int], Any]:
    with mirrored(replicas).scope():
        model = CASES[case].model(keras)
        optimizer = keras.optimizers.legacy.Adam(LEARNING_RATE)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = CASES[case].batch(replicas)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).cache().repeat()

    def fit(epochs: int, steps: int) -> Any:
        clock = [_Clock()]
        return model.fit(dataset, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=clock).history

    return fit
