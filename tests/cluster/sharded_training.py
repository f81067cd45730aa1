"""A training with fully sharded variables that a test disturbs: `python -m tests.cluster.sharded_training even|fit|backup|loop|optax EPOCHS FOLDER`.

Each process looks at its bytes all the time, and writes down the largest part of a sharded variable that it has had.
"""

import sys
from pathlib import Path

import phalanx  # isort: skip  (Before Keras.)

import jax
import keras
import numpy as np
import optax
from benchmarks.elastic_script import Noting, Record

from phalanx._src.elastic import copies
from phalanx._src.mesh.topology import Topology

BATCH = 12
ROWS = {"even": 48, "fit": 50, "backup": 50, "loop": 50, "optax": 50}
"""Rows by the kind of training. The last batch of 50 has two: not all of three replicas get one."""
SHAPES = {(10, 768), (768, 12)}
"""Kernels, and their slots. The first is sharded along one dim over two processes, and along the other over three."""


def data(how: str) -> np.ndarray:
    """The rows, which are their own targets."""
    return np.random.default_rng(0).normal(size=(ROWS[how], 10)).astype("float32")


def compiled(how: str) -> keras.Model:
    """A model, made in the scope of a strategy. With "optax", Optax updates it."""
    layers = [keras.layers.Dense(768, "tanh"), keras.layers.Dense(12), keras.layers.Dense(10, name="last")]
    model = keras.Sequential([keras.Input((10,)), *layers])
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(scale=0.1, size=w.shape) for w in model.weights])
    optimizer = phalanx.keras.OptaxOptimizer(optax.adam(0.01)) if how == "optax" else keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(how: str, model: keras.Model, epochs: int, callbacks: list[keras.callbacks.Callback]) -> list[float]:
    """Trains, and returns the losses."""
    x = data(how)
    history = model.fit(x, x, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return [float(loss) for loss in history.history["loss"]]


def train_in_a_loop(strategy: phalanx.Strategy, model: keras.Model, epochs: int, record: Record) -> list[float]:
    """Does the same in a custom loop."""
    optimizer = model.optimizer

    def replica_step(batch: np.ndarray) -> jax.Array:
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(keras.ops.mean((model(batch, training=True) - batch) ** 2, axis=1))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @phalanx.function
    def step(batch: np.ndarray) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    losses = []
    for loss in phalanx.elastic.steps(
        step, strategy.experimental_distribute_dataset(data("loop"), batch_size=BATCH), epochs=epochs
    ):
        losses.append(float(loss))
        record.note()
    return losses


class Parts:
    """The largest part of a sharded variable that this process has had: on its devices, in its copies, and what it was sent at a time."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        keep, send = copies.Copier.copy, Topology.broadcast

        def copying(*args: object, **kwargs: object) -> copies.Copy | None:
            copy = keep(*args, **kwargs)
            count = args[4].num_workers
            for variable, holding in copy.values.items() if copy else ():
                if tuple(variable.shape) in SHAPES:
                    self._note(f"copies of {count}", sum(p.nbytes for p in holding.pieces.values()), variable.shape)
            self.look(count)
            return copy

        def sending(topology: Topology, values: list[np.ndarray], worker: int) -> list[np.ndarray]:
            self.look(topology.num_workers)
            assert not SHAPES & {value.shape for value in values}
            return send(topology, values, worker)

        copies.Copier.copy, Topology.broadcast = copying, sending

    def look(self, count: int) -> None:
        """Looks at all arrays of JAX."""
        for array in jax.live_arrays():
            if array.shape in SHAPES and not array.is_deleted():
                here = sum(shard.data.nbytes for shard in array.addressable_shards)
                self._note(f"arrays of {count}", here, array.shape)

    def _note(self, what: str, num_bytes: int, shape: tuple[int, ...]) -> None:
        self.largest[what] = max(self.largest.get(what, 0.0), num_bytes / (4 * int(np.prod(shape))))


def main(how: str, epochs: int, folder: Path) -> None:
    """Trains, and saves the weights and the losses."""
    parts = Parts()
    strategy = phalanx.MultiWorkerMirroredStrategy(layout=phalanx.fully_sharded(min_size=1))
    with strategy.scope():
        model = compiled(how)
    parts.look(strategy.topology.num_workers)
    record = Record(folder, strategy, model.optimizer)
    if how == "loop":
        losses = train_in_a_loop(strategy, model, epochs, record)
    else:
        backup = [phalanx.keras.BackupAndRestore(folder / "backup", save_freq=3)] if how == "backup" else []
        losses = train(how, model, epochs, [Noting(record), *backup])
    weights = model.get_weights()
    print("parts", parts.largest, flush=True)
    if strategy.extended.should_checkpoint:
        np.savez(folder / "end.npz", *weights, losses=losses)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
