# SPDX-License-Identifier: Apache-2.0
"""In a child: the same call of Keras `fit`, in Phalanx's scope or under Keras's own `DataParallel`, without Phalanx."""

import statistics
import time
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras

from benchmarks.devices import NAMES
from benchmarks.models import CASES, LEARNING_RATE

_COMPARED = 16
_fits: list["_Fit"] = []


class Clock(keras.callbacks.Callback):
    """Notes the seconds of each epoch of `fit` in its history."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # The logs are numbers already, so the last step is done.
        logs["seconds"] = time.perf_counter() - self._start


class _Results(keras.callbacks.Callback):
    """Keeps the loss and the accuracy so far after every 16 steps, by the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[float]] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % _COMPARED == 0:
            self.found[str(batch)] = [float(logs["loss"]), float(logs["accuracy"])]


class _FirstStep(keras.callbacks.Callback):
    """Notes when the first step is done."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            jax.block_until_ready(logs)
            self.at = time.perf_counter()


class _Fit:
    """A compiled model and its arrays.

    Args:
      library: who divides the batches, `"phalanx"` or `"keras"`.
      case: the name of the model.
      steps: how many batches an epoch has.
      steps_per_execution: as `compile` takes it.
    """

    def __init__(self, library: str, case: str, steps: int, steps_per_execution: int | str = 1) -> None:
        self.steps, self._rows = steps, len(NAMES) * CASES[case].per_replica_batch
        self._x, self._y = CASES[case].batch(len(NAMES) * steps)
        with _scope(library):
            self._model = CASES[case].model(keras)
            self._model.compile(
                keras.optimizers.Adam(LEARNING_RATE),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
                steps_per_execution=steps_per_execution,
            )

    def __call__(self, epochs: int, callback: keras.callbacks.Callback) -> Any:
        """Trains, and returns the history."""
        options = {"batch_size": self._rows, "epochs": epochs, "shuffle": False, "verbose": 0}
        return self._model.fit(self._x, self._y, callbacks=[callback], **options).history


def _scope(library: str) -> AbstractContextManager[Any]:
    if library == "phalanx":
        import phalanx

        return phalanx.MirroredStrategy().scope()
    if NAMES[0].startswith("cpu:"):
        jax.config.update("jax_num_cpu_devices", len(NAMES))
    distribution = keras.distribution.DataParallel(devices=list(NAMES))
    keras.distribution.set_distribution(distribution)
    return distribution.scope()


def prepare(library: str, case: str, steps: int, steps_per_execution: int | str) -> dict[str, list[float]]:
    """Makes the model, trains it for an epoch, and returns loss and accuracy after every 16 steps of it that end an execution."""
    _fits.append(_Fit(library, case, steps, steps_per_execution))
    results = _Results()
    _fits[0](1, results)
    return results.found


def seconds_a_step(epochs: int) -> float:
    """Times epochs of one call of `fit`, after one that is not counted."""
    seconds = _fits[0](1 + epochs, Clock())["seconds"][1:]
    return statistics.fmean(seconds) / _fits[0].steps


def first_step(library: str, case: str) -> float:
    """Times `fit` from its call until the first step is done: it traces and compiles."""
    fit, callback = _Fit(library, case, _COMPARED), _FirstStep()
    start = time.perf_counter()
    fit(1, callback)
    return callback.at - start
