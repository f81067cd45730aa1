# SPDX-License-Identifier: Apache-2.0
"""The MLP of `sharded.py` with Phalanx."""

from typing import Any

import jax
import keras

import phalanx
from benchmarks import sharded
from benchmarks.models import LEARNING_RATE

LAYOUTS = {
    None: None,
    "model": {".*/expand/kernel": (None, "model"), ".*/expand/bias": ("model",), ".*/contract/kernel": ("model",)},
    "replica": phalanx.fully_sharded(),
}
"""The layouts by the axis over which kernels and their slots are divided."""


class PhalanxSharded:
    """The usual step. Only the strategy has a layout.

    Args:
      strategy: the strategy.
    """

    def __init__(self, strategy: phalanx.Strategy) -> None:
        self._strategy = strategy
        with self._strategy.scope():
            model = sharded.model()
            optimizer = keras.optimizers.Adam(LEARNING_RATE)
            optimizer.build(model.trainable_variables)
            losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self._variables = [*model.variables, *optimizer.variables]

        def step(batch: Any) -> Any:
            x, y = batch
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss(losses(y, model(x, training=True)))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        self._step = step
        (self._batch,) = self._strategy.experimental_distribute_dataset([sharded.batch()])

    def __call__(self) -> jax.Array:
        """Does one step and returns the replicas' losses."""
        losses = self._strategy.run(self._step, args=(self._batch,))
        return losses.data if isinstance(losses, phalanx.PerReplica) else losses

    def loss(self) -> float:
        """Does one step and returns the loss as a number."""
        losses = self._strategy.run(self._step, args=(self._batch,))
        return float(self._strategy.reduce("SUM", losses, axis=None))

    def bytes_of_a_device(self) -> int:
        """Returns what one device holds of weights and slots."""
        return sharded.bytes_of_a_device(v.value for v in self._variables)

    def whole_bytes(self) -> int:
        """Returns what it would hold of whole ones."""
        return sum(v.value.nbytes for v in self._variables)
