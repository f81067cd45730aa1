# SPDX-License-Identifier: Apache-2.0
"""A training of `unequal`: `phalanx run --workers 2 benchmarks/unequal_script.py WEIGHTS STEPS`. Rank 0 prints the seconds and the shares."""

import ast
import json
import os
import subprocess
import sys
import time

import phalanx  # isort: skip  (Before Keras.)

import keras
import numpy as np

BATCH = 3000
_WARM_UP = 10
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"


def main(weights: str, steps: int) -> None:
    """Trains two epochs for warmth, and measures the third."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    strategy = phalanx.MultiWorkerMirroredStrategy(replica_weights=ast.literal_eval(weights))
    busy = [] if rank == 0 else [subprocess.Popen([sys.executable, "-c", _BUSY])]  # It shares the core of rank 1.
    try:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(2)]
            model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
        x = np.random.default_rng(0).normal(size=(BATCH * max(steps, _WARM_UP), 256)).astype("float32")
        y = x[:, :10].argmax(1)
        for _ in range(2):
            model.fit(x, y, batch_size=BATCH, steps_per_epoch=_WARM_UP, shuffle=False, verbose=0)
        began_s = time.monotonic()
        model.fit(x, y, batch_size=BATCH, steps_per_epoch=steps, shuffle=False, verbose=0)
        if rank == 0:
            print("seconds", time.monotonic() - began_s, *strategy.topology.shares.weights, flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
