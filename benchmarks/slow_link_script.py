# SPDX-License-Identifier: Apache-2.0
"""A training of `slow_link` on one of two machines: `python -m benchmarks.slow_link_script WHAT STEPS`. Rank 0 prints the seconds."""

import itertools
import sys
import time
from typing import Any

import phalanx  # isort: skip  (Before Keras.)

import keras

from benchmarks.elastic_job import BATCH, LEARNING_RATE, WARM_UP, rows
from benchmarks.elastic_script import mlp, step_of
from phalanx.experimental import CommunicationOptions, DiLoCo, LocalSGD, PowerSGD, TopK

COMPRESSIONS: dict[str, Any] = {
    "bfloat16": "bfloat16",
    "int8": "int8",
    "TopK(0.01)": TopK(0.01),
    "TopK(0.05)": TopK(0.05),
    "PowerSGD(2)": PowerSGD(2),
    "PowerSGD(4)": PowerSGD(4),
}
LOCAL_UPDATES = {"LocalSGD(8)": LocalSGD(8), "DiLoCo(50)": DiLoCo(every=50), "DiLoCo(100)": DiLoCo(every=100)}


def main(name: str, steps: int) -> None:
    """Trains, and measures the steps after the first ones."""
    keras.utils.set_random_seed(0)
    strategy = phalanx.MultiWorkerMirroredStrategy(
        communication_options=CommunicationOptions(compression=COMPRESSIONS.get(name)),
        local_updates=LOCAL_UPDATES.get(name),
    )
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(LEARNING_RATE)
    step = step_of(strategy, model, optimizer)
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
