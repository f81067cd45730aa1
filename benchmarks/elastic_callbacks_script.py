# SPDX-License-Identifier: Apache-2.0
"""A `fit` with callbacks that `elastic_callbacks` disturbs: `python -m benchmarks.elastic_callbacks_script EPOCHS FOLDER`."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (Before Keras.)

import keras
import numpy as np

from benchmarks.elastic_script import Noting, Record

_BATCH, _STEPS, _CLASSES, _FEATURES = 24, 6, 4, 8
_KEPT = ("best", "best_epoch", "cooldown_counter", "min_delta", "patience", "stopped_epoch", "wait")


class Averages(keras.callbacks.Callback):
    """A callback of a user: a moving average of the loss, what it has been called for, and the best layer so far."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.calls, self.least = 0.0, [0, 0, 0], float("inf")
        self.layer = np.zeros((_FEATURES, _CLASSES), "float32")

    def get_state(self) -> dict[str, Any]:
        """Returns all of it."""
        return {"average": self.average, "calls": self.calls, "least": self.least, "layer": self.layer}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes it over."""
        vars(self).update({**state, "layer": np.array(state["layer"])})

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts."""
        self.calls = [self.calls[0] + 1, *self.calls[1:]]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts."""
        self.calls = [self.calls[0], self.calls[1] + 1, self.calls[2]]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages, and keeps the best layer."""
        self.calls = [*self.calls[:2], self.calls[2] + 1]
        self.average = 0.9 * self.average + 0.1 * float(logs["loss"])
        if logs["val_loss"] < self.least:
            self.least, self.layer = float(logs["val_loss"]), np.asarray(self.model.layers[0].kernel.value)


class Mortal(keras.callbacks.Callback):
    """Kills its process at a moment that the parent has ordered, such as "epoch 1": in the second of these callbacks in the list.

    Args:
      record: knows the file of the order.
      place: number of the callback.
    """

    def __init__(self, record: Record, place: int) -> None:
        super().__init__()
        self._record, self._place = record, place

    def _die(self, moment: str) -> None:
        if self._record.order == f"{moment} {self._place}":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Dies, if ordered."""
        self._die("begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Dies, if ordered."""
        self._die("batch")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Dies, if ordered."""
        self._die("test")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Dies, if ordered."""
        self._die("epoch")


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels that a linear model can learn in part, the last third for the validation."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH * _STEPS * 3 // 2, _FEATURES)).astype("float32")
    scores = x @ rng.normal(size=(_FEATURES, _CLASSES)) + 2.0 * rng.normal(size=(len(x), _CLASSES))
    return x, scores.argmax(axis=1)


def main(epochs: int, folder: Path) -> None:
    """Trains, and saves what this process has in the end."""
    keras.utils.set_random_seed(0)
    strategy = phalanx.MultiWorkerMirroredStrategy()
    x, y = rows()
    with strategy.scope():
        # Convex, so that what processes round differently does not grow.
        model = keras.Sequential([keras.Input((_FEATURES,)), keras.layers.Dense(_CLASSES)])
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    record = Record(folder, strategy, optimizer)
    plateau = keras.callbacks.ReduceLROnPlateau(factor=0.9, patience=1, min_lr=0.01)
    stop = keras.callbacks.EarlyStopping(patience=epochs, restore_best_weights=True)
    best, averages = keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True), Averages()
    first, second, third = (Mortal(record, place) for place in range(3))
    callbacks = [first, Noting(record), plateau, stop, second, best, averages, third]
    history = model.fit(
        x, y, batch_size=_BATCH, epochs=epochs, validation_split=1 / 3, verbose=0, callbacks=callbacks
    ).history
    values = [*model.variables, *optimizer.variables, *stop.best_weights, averages.layer]
    states = [{name: vars(each).get(name) for name in _KEPT} for each in (plateau, stop)]
    kept = {name: value for name, value in averages.get_state().items() if name != "layer"}
    end = {
        "values": [np.asarray(value).astype("float64").ravel().tolist() for value in values],
        "numbers": [states, kept, history],
        "best": best.best if strategy.topology.is_chief else None,
    }
    (folder / f"end{os.getpid()}.json").write_text(json.dumps(end, default=float))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
