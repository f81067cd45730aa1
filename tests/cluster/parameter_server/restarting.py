"""A script for `phalanx run --max-restarts`: trains, says on its output how far it is, and ends in the way that it is told.

Every gradient is 1, so the weights after n updates are known.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import phalanx  # isort: skip

import keras
import numpy as np
from processes import pid_of, servers_of

from phalanx.servers.ray import RayCluster

RESTART = int(os.environ.get("PHALANX_RESTART", "0"))
OPTIONS = {
    "sharded": {"ps": 2, "variable_partitioner": phalanx.experimental.partitioners.FixedShardsPartitioner(2)},
    "synchronous": {"max_staleness": 0},
    "snapshots": {"ps": 2, "snapshot_every_s": 600.0},
}


class Training:
    """Variables of all kinds, and steps that change them."""

    def __init__(self, **options):
        self.strategy = phalanx.ParameterServerStrategy(**options)
        self.coordinator = phalanx.coordinator.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
            self.weight = keras.Variable(np.zeros((5, 3), "float32"))
            # Bounded staleness averages the updates of workers, and does not take sharded tables.
            table = keras.layers.Embedding if "max_staleness" in options else phalanx.keras.ShardedEmbedding
            self.table = table(11, 2, embeddings_initializer="zeros")
            self.table.build()
            self.optimizer = keras.optimizers.SGD(0.125, momentum=0.5)

    def step(self, ids):
        """Adds 1 to the counter, and follows gradients of 1."""
        variables = [self.weight, self.table.embeddings]
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum(self.weight) + keras.ops.sum(self.table(ids))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.counter.assign_add(1)

    def schedule(self, steps):
        """Schedules steps."""
        for _ in range(steps):
            self.coordinator.schedule(self.step, args=(np.array([1, 10], "int32"),))

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
    """Prints a line."""
    print(json.dumps({"start": RESTART, **words}), flush=True)


def kill_itself():
    """Ends this process as the kernel does where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(options):
    """Is killed twice, in the middle of steps. What it assigns at the beginning is older than what the servers hold."""
    training = Training(**options)
    training.say()
    training.weight.assign(np.zeros((5, 3), "float32"))
    for shard in phalanx.experimental.ShardedVariable(training.weight, training.strategy):
        shard.assign(np.zeros(shard.shape, "float32"))
    training.optimizer.iterations.assign(0)
    training.say()
    training.train_to(int(training.optimizer.iterations.value) + 20)
    if RESTART < 2:
        if options.get("snapshot_every_s") and RESTART == 1:
            training.strategy.homes.servers.take_snapshot()
            os.kill(servers_of(training.strategy)[1], signal.SIGKILL)
            with contextlib.suppress(phalanx.errors.ServerLostError):
                training.say()
        training.schedule(200)
        time.sleep(0.2)
        kill_itself()
    training.say()
    training.weight.assign(np.full((5, 3), 7.0))
    tell(assigned=np.unique(training.weight.numpy()).tolist())


def raises():
    """Ends with an exit code in its first start, and with an exception in the next. Nothing of the training is left by then."""
    training = Training(workers=1)
    training.say()
    training.train_to(20 * (RESTART + 1))
    if RESTART == 0:
        sys.exit(3)
    raise ValueError("no more clicks")


def loses_a_server():
    """Loses a server for good in its first start."""
    training = Training(workers=1, ps=2)
    training.say()
    training.train_to(12)
    if RESTART == 0:
        os.kill(servers_of(training.strategy)[1], signal.SIGKILL)
        training.train_to(100)
    training.say()


def stops_a_server():
    """Leaves a server that stands still. The next start cannot use it, and lets it go on."""
    note = Path(os.environ["RAY_TMPDIR"], "stopped")
    try:
        training = Training(workers=1, worker_timeout_s=3.0)
    except phalanx.errors.ServerLostError:
        os.kill(int(note.read_text()), signal.SIGCONT)
        note.unlink()
        raise
    training.say()
    training.train_to(8)
    if RESTART == 0:
        (pid,) = servers_of(training.strategy)
        note.write_text(str(pid))
        os.kill(pid, signal.SIGSTOP)
        kill_itself()
    training.say()


def starts_half():
    """Is killed before its servers know each other."""
    start = RayCluster.actor

    def actor(self, kind, job, index, *args, **options):
        started = start(self, kind, job, index, *args, **options)
        if index == 1 and RESTART == 0:
            pid_of(started)
            kill_itself()
        return started

    RayCluster.actor = actor
    Training(ps=2).say()


def closes():
    """Closes its first strategy in each start, and is killed with the second."""
    first = Training(workers=1)
    first.say()
    first.train_to(8)
    first.strategy.close()
    second = Training(workers=1)
    second.say()
    second.train_to(24)
    if RESTART == 0:
        kill_itself()
    second.say()


def waits():
    """Says which processes there are, and waits to be killed."""
    training = Training(workers=1)
    training.train_to(4)
    tell(pids=[os.getpid(), *map(pid_of, training.strategy.cluster.actors)])
    time.sleep(600)


def fits():
    """Evaluates, and is killed in the middle of `fit`, where the metrics hold a part of an epoch."""
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


if __name__ == "__main__":
    ways = {f.__name__: f for f in (raises, loses_a_server, stops_a_server, starts_half, closes, waits, fits)}
    if sys.argv[1] in ways:
        ways[sys.argv[1]]()
    else:
        killed(OPTIONS[sys.argv[1]])
