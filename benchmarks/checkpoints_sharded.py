# SPDX-License-Identifier: Apache-2.0
"""In each process of a group: Phalanx saves and restores a model whose variables and slots the processes divide."""

from typing import Any

import phalanx  # isort: skip  (before Keras, whose backend it chooses)

import jax
import keras

from benchmarks.checkpoints_orbax import KERNELS, WIDTH, bytes_of, measured
from phalanx.train import Checkpoint, CheckpointManager

_held: dict[str, Any] = {}


def prepare(folder: str) -> list[int]:
    """Creates the variables and their slots, and returns the bytes of those here and of all."""
    strategy = phalanx.MultiWorkerMirroredStrategy(layout=phalanx.fully_sharded())
    with strategy.scope():
        dense = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(KERNELS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    _held["strategy"], _held["model"] = strategy, model
    _held["manager"] = CheckpointManager(Checkpoint(model=model), folder, max_to_keep=1)
    return bytes_of(_arrays())


def save(path: str) -> dict[str, float]:
    """Saves as the next checkpoint, which is the path, and deletes the one before."""
    _step()  # Afterwards, no array is one that was restored.
    manager = _held["manager"]
    return measured(manager.save, lambda _: manager.sync(), _step)


def load(path: str) -> dict[str, float]:
    """Restores in place."""
    checkpoint = Checkpoint(model=_held["model"])
    return measured(lambda: checkpoint.restore(path), lambda _: jax.block_until_ready(_arrays()))


@phalanx.function
def _scale() -> None:
    for variable in _variables():
        if variable.shape:  # Not the counters.
            variable.assign(variable * 0.999)


def _step() -> None:
    with _held["strategy"].scope():
        _scale()
    jax.block_until_ready(_arrays())


def _arrays() -> list[jax.Array]:
    return [variable.value for variable in _variables()]


def _variables() -> list[keras.Variable]:
    return [*_held["model"].variables, *_held["model"].optimizer.variables]
