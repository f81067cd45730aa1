# SPDX-License-Identifier: Apache-2.0
"""The training that `kills` starts in each process: a custom loop that saves every few steps and logs the rows of each step."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (before Keras, whose backend it chooses)

import keras
import numpy as np

from benchmarks.kills import EVERY

_BATCH, _WIDTH, _CLASSES = 32, 784, 10
_MOST_ROWS = 10_000_000
_LARGE = 8192


def main() -> None:
    folder, start, until = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    layout = phalanx.fully_sharded() if os.environ["SHARDED"] == "yes" else None
    strategy = phalanx.MultiWorkerMirroredStrategy(layout=layout)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = keras.layers
        hidden = [layers.Dense(512, "relu"), layers.Dropout(0.1), layers.Dense(512, "relu")]
        model = keras.Sequential([keras.Input((_WIDTH,)), *hidden, layers.Dense(_CLASSES)])
        optimizer = keras.optimizers.Adam(1e-3)
        step = keras.Variable(0, dtype="int32")
        # Large enough to be sharded: mixed shards of two starts would have two numbers.
        saver = keras.Variable(np.full(_LARGE, -1), dtype="int32")
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    waves = np.random.default_rng(0).random(_WIDTH, dtype="float32")

    @phalanx.function
    def train_step(rows: Any) -> Any:
        def replica_step(rows: Any) -> Any:
            x = keras.ops.sin(rows[:, None] * waves)
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss(cross_entropy(rows % _CLASSES, model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(rows,)), axis=None)

    # No row comes twice.
    order = np.arange(_MOST_ROWS, dtype="int64") * 7919 % _MOST_ROWS
    iterator = iter(strategy.experimental_distribute_dataset(order.astype("float32"), batch_size=_BATCH))
    checkpoint = phalanx.train.Checkpoint(model=model, optimizer=optimizer, step=step, saver=saver, iterator=iterator)
    manager = phalanx.train.CheckpointManager(checkpoint, folder, max_to_keep=3)
    manager.restore_or_initialize()
    restored, rank = int(step), strategy.cluster_resolver.task_id or 0
    saved_by = np.unique(saver.numpy()).tolist()
    saver.assign(np.full(_LARGE, start))
    with open(folder / f"log-{rank}-{start}", "a") as log:
        while not until or int(step) < until:
            rows = next(iterator)
            loss = float(train_step(rows))
            step.assign_add(1)
            own = [int(row) for part in strategy.experimental_local_results(rows) for row in np.asarray(part)]
            entry = {"start": start, "rank": rank, "pid": os.getpid(), "restored": restored, "saved_by": saved_by}
            entry |= {"step": int(step), "at_s": time.time()}
            log.write(json.dumps({**entry, "loss": loss, "rows": own}) + "\n")
            log.flush()
            if int(step) % EVERY == 0:
                manager.save()
    manager.sync()


if __name__ == "__main__":
    main()
