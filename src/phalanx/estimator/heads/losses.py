# SPDX-License-Identifier: Apache-2.0
"""Losses of rows as the loss of a model function."""

from collections.abc import Callable
from typing import final

import jax
import keras
from jax.typing import ArrayLike
from typing_extensions import override

from phalanx._src.tracing import context
from phalanx.estimator.loop.graph import current_graph
from phalanx.estimator.loop.spec import ModeKeys


def reduced(
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    labels: ArrayLike,
    outputs: ArrayLike,
    reduction: str,
    weights: ArrayLike | None = None,
) -> jax.Array:
    """Returns the loss over the rows of this replica, a scalar.

    Args:
      fn: function of labels and outputs. Returns one loss per row.
      labels: array (rows, ...).
      outputs: array (rows, ...).
      reduction: `"sum_over_batch_size"` or `"sum"`.
      weights: weights of the rows. None if all rows count the same.
    """
    # A Keras loss, because Keras and Phalanx share one rule for padding, weights and the scale of replicas.
    loss: jax.Array = _RowLoss(fn, reduction)(labels, outputs, sample_weight=weights)
    return _of_batch(loss) if reduction == "sum" else loss


@final
class _RowLoss(keras.losses.Loss):
    """A Keras loss, so that padded rows do not count."""

    def __init__(self, fn: Callable[[jax.Array, jax.Array], jax.Array], reduction: str) -> None:
        # In mixed precision, a sum over many bfloat16 losses loses its small terms.
        super().__init__(reduction=reduction, dtype="float32")
        self._fn = fn

    @override
    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Returns the losses of rows."""
        return self._fn(y_true, y_pred)


def _of_batch(loss: jax.Array) -> jax.Array:
    """Returns a sum over rows as the loss of the model function that runs.

    Keras scales a sum such that the mean over replicas is the sum over all rows. An evaluation averages sums over batches.
    """
    graph = current_graph()
    is_evaluating = graph is not None and graph.mode == ModeKeys.EVAL
    return loss * context.require_replica().weight if is_evaluating else loss
