"""A coordinator in a Ray cluster: trains from its last checkpoint until it is told to stop, and says where its processes are.

Arguments: what `ParameterServerStrategy` takes, as JSON, and the folder of the checkpoints.
"""

import json
import os
import sys
import time

import phalanx  # isort: skip

import keras
import numpy as np
from coordinating import say


def place_of(actor):
    """The node of an actor, the size of its thread pool, and what Ray has given it."""
    import ray  # Not before the strategy, which imports it in its own way.

    def told(_):
        return ray.util.get_node_ip_address(), os.environ["NPROC"], ray.get_runtime_context().get_assigned_resources()

    return ray.get(actor.__ray_call__.remote(told))


def rows():
    while True:
        yield np.ones(1, "int32")


def main(options, folder, data=rows):
    strategy = phalanx.ParameterServerStrategy(**options, worker_timeout_s=120.0)
    coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
    manager = phalanx.train.CheckpointManager(phalanx.train.Checkpoint(counter=counter), folder, max_to_keep=1)
    manager.restore_or_initialize()

    iterator = iter(coordinator.create_per_worker_dataset(data))

    def step(iterator):
        counter.assign_add(next(iterator)[0])

    def train():
        for _ in range(10):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        manager.save()
        manager.sync()
        say({"count": int(counter.value), "alive": coordinator.status().alive})

    train()
    say({"places": [place_of(actor) for actor in strategy.cluster.actors]})
    while sys.stdin.readline().strip() == "more":
        train()
    strategy.close()
    import ray

    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        time.sleep(0.05)
    say("closed")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
