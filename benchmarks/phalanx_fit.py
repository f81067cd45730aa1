# SPDX-License-Identifier: Apache-2.0
"""The same step with Phalanx through Keras `model.fit`, on the same batch again and again."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import phalanx
from benchmarks.fit_epochs import Clock
from benchmarks.models import CASES, LEARNING_RATE

_programs: list[Callable[[int, int], Any]] = []


def prepare(case: str) -> list[float]:
    """Makes the program, runs ten steps, and returns their losses."""
    _programs.append(_program(case))
    return _programs[0](10, 1)["loss"]


def save_weights(case: str, path: str) -> None:
    """Writes the weights that the model begins with, for libraries without Keras."""
    np.savez(path, *CASES[case].model(keras).get_weights())


def seconds_a_step(count: int) -> float:
    """Times `count` steps, after as many in the same call of `fit`."""
    return _programs[0](2, count)["seconds"][-1] / count


def steps_for(turn_s: float) -> int:
    """Returns how many steps take about `turn_s`."""
    return max(3, round(turn_s / seconds_a_step(5)))


def _program(case: str) -> Callable[[int, int], Any]:
    strategy = phalanx.MirroredStrategy()
    with strategy.scope():
        model = CASES[case].model(keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
    x, y = CASES[case].batch(strategy.num_replicas_in_sync)

    def fit(epochs: int, steps: int) -> Any:
        arrays = [np.concatenate([a] * steps) for a in (x, y)]
        options = {"batch_size": len(x), "epochs": epochs, "shuffle": False, "verbose": 0}
        return model.fit(*arrays, callbacks=[Clock()], **options).history

    return fit
