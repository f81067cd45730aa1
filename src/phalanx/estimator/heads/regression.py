# SPDX-License-Identifier: Apache-2.0
"""The head of numbers."""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from phalanx.errors import InputError, arguments
from phalanx.estimator.heads.base import Head, LossFn, WeightColumn, column
from phalanx.typing import PyTree


@final
class RegressionHead(Head):
    """A head for numbers, with the squared error as its loss. May be created in any context.

    Args:
      label_dimension: number of values per row.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      loss_fn: function of `labels` and `logits`. Returns losses. None for the squared error.
      inverse_link_fn: function of the logits that returns the predictions. None for the logits themselves.
      name: suffix for metric names. None for no suffix.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.RegressionHead.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.RegressionHead(label_dimension=2).logits_dimension
      2
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        loss_reduction: str = "sum_over_batch_size",
        loss_fn: LossFn | None = None,
        inverse_link_fn: Callable[[jax.Array], jax.Array] | None = None,
        name: str | None = None,
    ) -> None:
        self._dimension = arguments.integer("label_dimension", label_dimension)
        if inverse_link_fn is not None:
            arguments.function("inverse_link_fn", inverse_link_fn, "inverse_link_fn=jnp.exp")
        self._link = inverse_link_fn
        super().__init__(weight_column, loss_reduction, loss_fn, name)

    @property
    @override
    def logits_dimension(self) -> int:
        """The number of logits per row."""
        return self._dimension

    @override
    def host_labels(self, labels: PyTree) -> PyTree:
        """Returns labels as floats. See `Head.host_labels`."""
        array = np.asarray(labels)
        # (rows,) is (rows, 1): tf.estimator expands such labels, too.
        width = array.shape[-1] if array.ndim > 1 else 1
        if array.dtype.kind not in "iufb" or array.ndim not in (1, 2) or width != self._dimension:
            raise InputError(
                f"labels of {array.dtype}{list(array.shape)}",
                f"a row has {self._dimension} numbers.",
                f"label_dimension={width}",
            )
        # Integers are frequent as labels of a regression, and their difference to float logits must be a float.
        return array.astype(np.float32)

    @override
    def predictions(self, logits: jax.Array) -> dict[str, Any]:
        """Returns the predictions. See `Head.predictions`."""
        # Without a link the logits are the predictions. tf.estimator then omits the key `logits`.
        if self._link is None:
            return {"predictions": logits}
        return {"predictions": self._link(logits), "logits": logits}

    @override
    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.square(logits - column(labels).astype(logits.dtype)).mean(axis=-1)

    @override
    def _metrics(
        self, labels: jax.Array, logits: jax.Array, weights: jax.Array | None
    ) -> dict[str, keras.metrics.Metric]:
        predicted = self.predictions(logits)["predictions"]
        return {
            "prediction/mean": self._mean("prediction/mean", predicted.mean(axis=-1), weights),
            "label/mean": self._mean("label/mean", column(labels).mean(axis=-1), weights),
        }
