"""A script for `phalanx run --max-restarts`: trains, says on its output how far it is, and ends in the way that it is told.

Every gradient is 1, so the weights after n updates are known.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import phalanx  # isort: skip

import keras
import numpy as np
from processes import kill, pid_of, servers_of

from phalanx._src.parameter_server.processes.ray import RayCluster

RESTART = int(os.environ.get("PHALANX_RESTART", "0"))


class Training:
    """Variables of all kinds, and steps that change them."""

    def __init__(self, **options):
        self.strategy = phalanx.ParameterServerStrategy(**{"workers": 1, "worker_timeout_s": 120.0, **options})
        self.coordinator = phalanx.coordinator.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
            self.weight = keras.Variable(np.zeros((5, 3), "float32"))
            # Bounded staleness averages the updates of workers, and does not take sharded tables.
            table = keras.layers.Embedding if "max_staleness" in options else phalanx.keras.ShardedEmbedding
            self.table = table(11, 2, embeddings_initializer="zeros")
            self.table.build()
            self.optimizer = keras.optimizers.SGD(0.125, momentum=0.5)
        self.say()

    def step(self, ids):
        """Adds 1 to the counter, and follows gradients of 1."""
        variables = [self.weight, self.table.embeddings]
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum(self.weight) + keras.ops.sum(self.table(ids))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.counter.assign_add(1)

    def schedule(self, steps):
        return [self.coordinator.schedule(self.step, args=(np.array([1, 10], "int32"),)) for _ in range(steps)]

    def train_to(self, updates):
        """Trains until there were so many updates, as a loop that knows nothing of restarts does."""
        while int(self.optimizer.iterations.value) < updates:
            self.schedule(4)
            self.coordinator.join()

    def say(self):
        """Prints all values."""
        tell(
            updates=int(self.optimizer.iterations.value),
            count=int(self.counter.value),
            weights=np.unique(self.weight.numpy()).tolist(),
            rows=np.unique(self.table.embeddings.numpy()[[1, 10]]).tolist(),
        )


def tell(**words):
    print(json.dumps({"start": RESTART, **words}), flush=True)


def kill_itself():
    """Ends this process as the kernel does where memory runs out."""
    kill(os.getpid())


SHARDED = {
    "workers": 2,
    "ps": 2,
    "variable_partitioner": phalanx.experimental.partitioners.FixedShardsPartitioner(2),
    "snapshot_every_s": 600.0,
}
SYNCHRONOUS = {"workers": 2, "max_staleness": 0}
IN_ROUNDS_OF_ONE = {"workers": 1, "max_staleness": 0}


def begins(options):
    """Trains. What it assigns at the beginning is older than what the servers hold."""
    training = Training(**options)
    training.weight.assign(np.zeros((5, 3), "float32"))
    for shard in phalanx.experimental.ShardedVariable(training.weight, training.strategy):
        shard.assign(np.zeros(shard.shape, "float32"))
    training.optimizer.iterations.assign(0)
    training.say()
    training.train_to(int(training.optimizer.iterations.value) + 20)
    return training


def is_killed(options, *, loses_a_server=False):
    """In the middle of steps."""
    training = begins(options)
    if loses_a_server:
        training.strategy.homes.servers.take_snapshot()
        kill(servers_of(training.strategy)[1])
        with contextlib.suppress(phalanx.errors.ServerLostError):
            training.say()
    training.schedule(200)[20].fetch()
    kill_itself()


def ends(options):
    training = begins(options)
    training.say()
    training.weight.assign(np.full((5, 3), 7.0))
    tell(assigned=np.unique(training.weight.numpy()).tolist())


def exits():
    Training().train_to(20)
    sys.exit(3)


def note_of_stopped():
    return Path(os.environ["RAY_TMPDIR"], "stopped")


def leaves_a_stopped_server():
    (pid,) = servers_of(Training().strategy)
    note_of_stopped().write_text(str(pid))
    os.kill(pid, signal.SIGSTOP)
    kill_itself()


def cannot_use_it():
    """And lets it go on."""
    try:
        Training(worker_timeout_s=1.0)
    finally:
        os.kill(int(note_of_stopped().read_text()), signal.SIGCONT)
        note_of_stopped().unlink()


def closes_the_first():
    """And is killed with the second strategy."""
    Training().strategy.close()
    Training().train_to(12)
    kill_itself()


def raises():
    Training()
    Training()
    raise ValueError("no more clicks")


def starts_half():
    """Is killed before its servers know each other."""
    start = RayCluster.actor

    def actor(self, kind, job, index, *args, **options):
        started = start(self, kind, job, index, *args, **options)
        if index == 1:
            pid_of(started)
            kill_itself()
        return started

    RayCluster.actor = actor
    Training(ps=2)


def loses_a_server():
    training = Training(ps=2)
    training.train_to(12)
    kill(servers_of(training.strategy)[1])
    training.train_to(100)


def begins_anew():
    training = Training(ps=2)
    training.train_to(12)
    training.say()


def fits():
    """Evaluates, and is killed in the middle of `fit`, where the metrics hold a part of an epoch; the next time it waits after it."""
    strategy = phalanx.ParameterServerStrategy(workers=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def say():
        phalanx.coordinator.ClusterCoordinator(strategy).join()
        tell(evaluated=model.evaluate(x, y, batch_size=12, verbose=0), updates=int(model.optimizer.iterations.value))

    def die(batch, logs):
        # At batch 2 of 4, so the metrics that `fit` has reset hold three batches.
        if batch == 2:
            say()
            kill_itself()

    say()
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=die)] if RESTART == 0 else []
    model.fit(x, y, batch_size=12, epochs=1, verbose=0, callbacks=callbacks)
    tell(pids=[os.getpid(), *map(pid_of, strategy.cluster.actors)])
    threading.Event().wait()


WAYS = {
    "sharded": [partial(is_killed, SHARDED), partial(is_killed, SHARDED, loses_a_server=True), partial(ends, SHARDED)],
    "synchronous": [partial(is_killed, SYNCHRONOUS), partial(ends, SYNCHRONOUS)],
    "rounds_of_one": [partial(is_killed, IN_ROUNDS_OF_ONE), partial(ends, IN_ROUNDS_OF_ONE)],
    "one_server": [exits, leaves_a_stopped_server, cannot_use_it, closes_the_first, raises],
    "two_servers": [starts_half, loses_a_server, begins_anew],
    "fits": [fits, fits],
}
"""What each start does."""

if __name__ == "__main__":
    WAYS[sys.argv[1]][RESTART]()
