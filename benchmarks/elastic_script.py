# SPDX-License-Identifier: Apache-2.0
"""A training that `elastic` disturbs: `python -m benchmarks.elastic_script fit|loop EPOCHS FOLDER`."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (Before Keras.)

import keras
import numpy as np

from benchmarks.elastic_job import BATCH, LEARNING_RATE, MOMENTUM, WIDTHS, StepFile, rows
from phalanx._src.cluster.watch import membership


class Record:
    """Writes down the steps of this process, and does what the parent has ordered.

    Args:
      folder: where the files are.
      strategy: the strategy.
      optimizer: counts the steps.
    """

    def __init__(self, folder: Path, strategy: Any, optimizer: Any) -> None:
        self._file = StepFile(folder)
        self._order, self._hurry = self._file.path.with_suffix(".do"), folder / "hurry"
        self._strategy, self._optimizer = strategy, optimizer

    @property
    def order(self) -> str | None:
        """What the parent has ordered."""
        return self._order.read_text() if self._order.exists() else None

    def note(self) -> None:
        """Writes down that a step is finished, and does what the parent has ordered."""
        member = membership.own()
        number = self._strategy.cluster_resolver.task_id if member is None else member.number
        generation = member.generation.number if member and member.generation else 0
        step = int(self._optimizer.iterations.value)
        self._file.write(number, generation, step)
        # Longer and longer, so that the training lasts until the parent has done what it wants, on a busy machine too.
        if not self._hurry.exists():
            growth = (step / 20) ** int(os.environ.get("PAUSE_GROWTH", "1"))
            time.sleep(float(os.environ["PAUSE_S"]) * (1 + growth))
        match self.order:
            case "raise":
                raise ValueError("the parent has ordered it")
            case "leave":
                sys.exit(3)
            case "memory":
                self._held = b"x" * (1 << 32)
            case "exit":
                os._exit(3)


class Noting(keras.callbacks.Callback):
    """Writes down each step of `fit`."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes down that a step is finished."""
        self._record.note()


def mlp() -> keras.Model:
    """Returns the model of all these trainings."""
    widths = map(int, os.environ["WIDTHS"].split()) if "WIDTHS" in os.environ else WIDTHS[1:-1]
    hidden = [keras.layers.Dense(width, activation="tanh") for width in widths]
    return keras.Sequential([keras.Input((WIDTHS[0],)), *hidden, keras.layers.Dense(WIDTHS[-1])])


def step_of(strategy: phalanx.Strategy, model: keras.Model, optimizer: keras.Optimizer) -> Callable[[Any], Any]:
    """Returns a training step of a custom loop, from a batch to its loss."""

    def replica_step(batch: Any) -> Any:
        inputs, targets = batch
        with phalanx.GradientTape() as tape:
            logits = model(inputs, training=True)
            each = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
            value = keras.ops.sum(each) / BATCH
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    @phalanx.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    return step


def main(how: str, epochs: int, folder: Path) -> None:
    """Trains, and saves the weights and the losses."""
    keras.utils.set_random_seed(0)
    options = phalanx.elastic.ElasticOptions(donate=os.environ.get("DONATE") != "no")
    layout = phalanx.fully_sharded(min_size=1) if os.environ.get("SHARDED") == "yes" else None
    strategy = phalanx.MultiWorkerMirroredStrategy(elastic=options, layout=layout)
    x, y = rows()
    with strategy.scope():
        model = mlp()
        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    record = Record(folder, strategy, optimizer)
    if how == "fit":
        callbacks = [Noting(record)]
        losses = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks).history["loss"]
    else:
        step = step_of(strategy, model, optimizer)
        dataset = strategy.experimental_distribute_dataset((x, y), batch_size=BATCH)
        losses = []
        for value in phalanx.elastic.steps(step, dataset, epochs=epochs):
            losses.append(float(value))
            record.note()
    # On all processes, because with a layout none of them has a whole variable.
    weights = model.get_weights()
    if strategy.extended.should_checkpoint:
        np.savez(folder / "end.npz", *weights, losses=losses)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
