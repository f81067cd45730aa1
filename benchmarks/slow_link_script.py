# SPDX-License-Identifier: Apache-2.0
"""A training of `slow_link` on one of two machines: `python -m benchmarks.slow_link_script COMPRESSION STEPS`. Rank 0 prints the seconds."""

import itertools
import sys
import time
from typing import Any

import phalanx  # isort: skip  (Before Keras.)

import keras

from benchmarks.elastic_job import BATCH, LEARNING_RATE, WIDTHS, rows
from benchmarks.slow_link_job import WARM_UP
from phalanx.experimental import CommunicationOptions, PowerSGD, TopK

COMPRESSIONS: dict[str, Any] = {
    "none": None,
    "bfloat16": "bfloat16",
    "int8": "int8",
    "TopK(0.01)": TopK(0.01),
    "PowerSGD(2)": PowerSGD(2),
}


def main(name: str, steps: int) -> None:
    """Trains, and measures the steps after the first ones."""
    keras.utils.set_random_seed(0)
    options = CommunicationOptions(compression=COMPRESSIONS[name])
    strategy = phalanx.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="tanh") for width in WIDTHS[1:-1]]
        model = keras.Sequential([keras.Input((WIDTHS[0],)), *hidden, keras.layers.Dense(WIDTHS[-1])])
        optimizer = keras.optimizers.SGD(LEARNING_RATE)

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

    dataset = strategy.experimental_distribute_dataset(rows(), batch_size=BATCH)
    batches = itertools.chain.from_iterable(itertools.repeat(dataset))
    for batch in itertools.islice(batches, WARM_UP):
        float(step(batch))
    began_s = time.monotonic()
    for batch in itertools.islice(batches, steps):
        float(step(batch))
    if strategy.extended.should_checkpoint:
        print("seconds", time.monotonic() - began_s, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
