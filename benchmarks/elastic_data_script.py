# SPDX-License-Identifier: Apache-2.0
"""A `fit` that counts rows, and that `elastic_data` disturbs: `python -m benchmarks.elastic_data_script KIND EPOCHS FOLDER`.

Each row has a weight of its own, of which an epoch takes 1. So the weights say how often each row was trained on, whatever was repeated.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (Before Keras.)

import keras
import numpy as np

from benchmarks.elastic_callbacks_script import Mortal
from benchmarks.elastic_data import BATCH, ROWS
from benchmarks.elastic_script import Noting, Record

IDS = np.arange(ROWS, dtype="int32")


class Count(keras.losses.Loss):
    """The sum of the weights of the rows."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the weight of each row."""
        return y_pred[:, 0]


class Batches(keras.utils.PyDataset):
    """Batches of rows, which Keras shuffles.

    Args:
      shuffle: shuffles an array of rows in place at the end of each epoch. None leaves it to Keras.
      generator: the generator of `shuffle`, which is part of the position.
      **options: those of PyDataset.
    """

    def __init__(
        self, shuffle: Callable[[np.ndarray], None] | None = None, generator: Any = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.rows, self.shuffle, self.generator = IDS.copy(), shuffle, generator

    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[index * BATCH : (index + 1) * BATCH]
        return rows, rows

    def on_epoch_end(self) -> None:
        """Shuffles."""
        if self.shuffle is not None:
            self.shuffle(self.rows)


class Opened:
    """An iterable of batches, which shuffles them by a generator of its own when it is opened."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = list(range(ROWS // BATCH))
        self.random.shuffle(order)
        return iter([Batches()[index] for index in order])


def owned() -> Batches:
    """Returns batches that shuffle themselves by a generator of their own."""
    generator = np.random.default_rng(0)
    return Batches(generator.shuffle, generator)


def shuffled_when_opened() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns batches in an order that Python's generator decides."""
    order = list(range(ROWS // BATCH))
    random.shuffle(order)
    return iter([Batches()[index] for index in order])


def grains() -> Any:
    """Returns a dataset of Grain that shuffles the rows."""
    import grain

    return grain.MapDataset.source([(row, row) for row in IDS]).shuffle(seed=1).batch(BATCH)


def data(kind: str, strategy: Any) -> dict[str, Any]:
    """Returns the data arguments of `fit`."""
    distribute = strategy.experimental_distribute_dataset
    arrays = {"x": IDS, "y": IDS, "batch_size": BATCH}
    make: dict[str, Callable[[], dict[str, Any]]] = {
        "arrays": lambda: arrays,
        "arrays by batches": lambda: {**arrays, "shuffle": "batch"},
        "batches": lambda: {"x": Batches()},
        "batches of threads": lambda: {"x": Batches(workers=2)},
        "shuffled by NumPy": lambda: {"x": Batches(np.random.shuffle)},
        "shuffled by Python": lambda: {"x": Batches(random.shuffle)},
        "shuffled by itself": lambda: {"x": owned()},
        "Grain": lambda: {"x": grains(), "shuffle": False},
        "distributed arrays": lambda: {"x": distribute((IDS, IDS), batch_size=BATCH)},
        "distributed batches": lambda: {"x": distribute(owned())},
        "distributed iterable": lambda: {"x": distribute(Opened())},
        "distributed function": lambda: {"x": distribute(shuffled_when_opened)},
    }
    return make[kind]()


def counting(strategy: Any, **options: Any) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Returns a compiled model with a weight of 0 per row, of which each step of a row takes 1, and its optimizer."""
    with strategy.scope():
        layers = [keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros"), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        optimizer = keras.optimizers.SGD(1.0)
        model.compile(optimizer, Count(reduction="sum"), **options)
    return model, optimizer


def counts_of(model: keras.Model) -> list[float]:
    """Returns how often each row was trained on."""
    counts: list[float] = (-np.asarray(model.layers[0].embeddings.value)[:, 0]).tolist()
    return counts


def main(kind: str, epochs: int, folder: Path) -> None:
    """Trains, and saves how often each row was trained on."""
    keras.utils.set_random_seed(0)
    strategy = phalanx.MultiWorkerMirroredStrategy()
    model, optimizer = counting(strategy)
    record = Record(folder, strategy, optimizer)
    callbacks = [Mortal(record, 0), Noting(record), Mortal(record, 1)]
    model.fit(**data(kind, strategy), epochs=epochs, verbose=0, callbacks=callbacks)
    (folder / f"end{os.getpid()}.json").write_text(json.dumps(counts_of(model)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
