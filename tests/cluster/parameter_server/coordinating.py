"""A coordinator in a process of its own: trains until it is told to stop, and says on its output how far it is.

Arguments: the number of workers and servers, on this machine, or none where TF_CONFIG says it.
"""

import json
import sys

import phalanx  # isort: skip

import keras
import numpy as np
from processes import servers_of, workers_of


def say(words):
    print(json.dumps(words), flush=True)


def main(counts):
    strategy = phalanx.ParameterServerStrategy(**counts, worker_timeout_s=120.0)
    coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = keras.Variable(np.ones((4, 2), "float32"))
        counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(keras.ops.matmul(x, weight)))
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        counter.assign_add(1)
        return loss

    def train(steps):
        for _ in range(steps):
            coordinator.schedule(step, args=(np.ones((3, 4), "float32"),))
        coordinator.join()

    train(20)
    say({"count": int(counter.value), "pids": [*workers_of(strategy), *servers_of(strategy)]})
    while sys.stdin.readline().strip() == "more":
        train(20)
        say({"count": int(counter.value)})
    strategy.close()
    say("closed")


if __name__ == "__main__":
    main(dict(zip(("workers", "ps"), map(int, sys.argv[1:]), strict=False)))
