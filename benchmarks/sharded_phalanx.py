# SPDX-License-Identifier: Apache-2.0
"""The MLP of `sharded.py` with Phalanx."""

from typing import Any

import jax

import phalanx
from benchmarks import sharded
from benchmarks.with_phalanx import train_step_and_variables

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
        self._step, self._variables = train_step_and_variables(strategy, sharded.model)
        (self._batch,) = self._strategy.experimental_distribute_dataset([sharded.batch()])

    def __call__(self) -> jax.Array:
        """Does one step and returns the replicas' losses."""
        losses = self._losses()
        return losses.data if isinstance(losses, phalanx.PerReplica) else losses

    def loss(self) -> float:
        """Does one step and returns the loss as a number."""
        return float(self._strategy.reduce("SUM", self._losses(), axis=None))

    def _losses(self) -> Any:
        return self._strategy.run(self._step, args=(self._batch,))

    def bytes_of_a_device(self) -> int:
        """Returns what one device holds of weights and slots."""
        return sharded.bytes_of_a_device(v.value for v in self._variables)

    def whole_bytes(self) -> int:
        """Returns what it would hold of whole ones."""
        return sum(v.value.nbytes for v in self._variables)
