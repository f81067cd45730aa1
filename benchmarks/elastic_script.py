# SPDX-License-Identifier: Apache-2.0
"""A training that `elastic` disturbs: `elastic_script.py fit|loop FOLDER EPOCHS`. Each process writes down when it finished a step."""

import mmap
import os
import struct
import sys
import time
from pathlib import Path

import phalanx

import keras
import numpy as np

RECORD = struct.Struct("qqqd")
"""Number of the worker, generation, step, and the time of `time.monotonic` at which the step was finished."""
STEPS = 40
"""Steps of an epoch."""
BATCH = 48

how, folder, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
keras.utils.set_random_seed(0)
strategy = phalanx.MultiWorkerMirroredStrategy(
    elastic=phalanx.elastic.ElasticOptions(donate=os.environ.get("DONATE") != "no")
)
rng = np.random.default_rng(0)
x = rng.normal(size=(STEPS * BATCH, 784)).astype("float32")
y = rng.integers(0, 10, size=STEPS * BATCH)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((784,)), *(keras.layers.Dense(512, activation="relu") for _ in range(2)), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

path = folder / str(os.getpid())
path.write_bytes(b"\0" * RECORD.size)
with path.open("r+b") as file:
    record = mmap.mmap(file.fileno(), RECORD.size)
order = path.with_suffix(".do")


def note() -> None:
    """Writes down that a step is finished, and does what the parent has ordered."""
    member = phalanx.cluster.membership.own()
    number = member.number if member else strategy.cluster_resolver.task_id
    generation = member.generation.number if member and member.generation else 0
    record[:] = RECORD.pack(number, generation, int(optimizer.iterations.value), time.monotonic())
    if order.exists():
        if order.read_text() == "raise":
            raise ValueError("the parent has ordered it")
        os._exit(3)


class Noting(keras.callbacks.Callback):
    """Calls `note` after each step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Writes down that a step is finished."""
        note()


if how == "fit":
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[Noting()]).history
    losses = history["loss"]
else:

    def replica_step(batch):
        inputs, targets = batch
        with phalanx.GradientTape() as tape:
            value = keras.ops.sum(
                keras.losses.sparse_categorical_crossentropy(targets, model(inputs, training=True), from_logits=True)
            )
            value = value / BATCH
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))
        return value

    @phalanx.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=BATCH)
    losses = []
    for value in phalanx.elastic.steps(step, dataset, epochs=epochs):
        losses.append(float(value))
        note()
if strategy.extended.should_checkpoint:
    np.savez(folder / "end.npz", *(np.asarray(v.value) for v in model.trainable_variables), losses=losses)
