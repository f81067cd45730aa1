# SPDX-License-Identifier: Apache-2.0
"""The base class of all heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from phalanx.errors import InputError, InvalidArgumentError, arguments, shown
from phalanx.estimator.heads.losses import reduced
from phalanx.estimator.loop.optimizing import minimize
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys
from phalanx.feature_column.numeric import NumericColumn
from phalanx.typing import PyTree

_REDUCTIONS = ("sum_over_batch_size", "sum")

WeightColumn: TypeAlias = str | NumericColumn | None
"""The name of the feature with the weights of the rows, or its column. None if all rows count the same."""

LossFn: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""Function of labels and logits that returns losses of rows."""


class Head(ABC):
    """Computes loss, metrics and predictions from logits. The base class of all heads.

    Args:
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      loss_reduction: `"sum_over_batch_size"`, the sum of the weighted losses over the number of rows; or `"sum"`.
      loss_fn: function of `labels` and `logits`. Returns losses (rows,) or (rows, dims). None for the loss of the head.
      name: suffix for metric names. None for no suffix.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.
    """

    def __init__(
        self, weight_column: WeightColumn, loss_reduction: str, loss_fn: LossFn | None, name: str | None
    ) -> None:
        # TensorFlow 1 calls a sum over rows weighted, whether there are weights or not.
        reduction = str(loss_reduction).lower().removeprefix("weighted_")
        if reduction not in _REDUCTIONS:
            raise InvalidArgumentError(
                f"loss_reduction={shown(loss_reduction)}", f"must be one of {_REDUCTIONS}.", 'loss_reduction="sum"'
            )
        if loss_fn is not None:
            arguments.function("loss_fn", loss_fn, "def loss_fn(labels, logits)")
        # Only a numeric column: others have a key, too, but their features are categories.
        self._weight_fn: Callable[[Any], Any] | None = None
        if isinstance(weight_column, NumericColumn):
            self._weight_fn, weight_column = weight_column.normalizer_fn, weight_column.key
        if weight_column is not None and not isinstance(weight_column, str):
            raise InvalidArgumentError(
                f"weight_column={shown(weight_column)}", "must be a name or a numeric column.", 'weight_column="weight"'
            )
        self._weight_column, self._reduction, self._loss_fn, self._name = weight_column, reduction, loss_fn, name

    @property
    def name(self) -> str | None:
        """The suffix for metric names."""
        return self._name

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes. None if there are none."""
        return None

    @property
    @abstractmethod
    def logits_dimension(self) -> int:
        """The number of logits per row."""

    @abstractmethod
    def host_labels(self, labels: PyTree) -> PyTree:
        """Returns the labels of a batch as numbers, before they go to the devices.

        Raises:
          InputError: a label is not one of the classes.
        """

    def host_predictions(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Returns predictions with the names of classes, if there are any, after they have come from the devices."""
        return predictions

    @abstractmethod
    def predictions(self, logits: jax.Array) -> dict[str, Any]:
        """Returns the predictions.

        Args:
          logits: array (rows, logits_dimension).
        """

    @abstractmethod
    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns one loss per row."""

    @abstractmethod
    def _metrics(
        self, labels: jax.Array, logits: jax.Array, weights: jax.Array | None
    ) -> dict[str, keras.metrics.Metric]:
        """Returns the metrics, updated."""

    def loss(self, labels: jax.Array, logits: jax.Array, features: PyTree = None) -> jax.Array:
        """Returns the loss over the rows of this replica, a scalar. Call it in a model function."""
        return reduced(self._row_losses, labels, logits, self._reduction, self._weights(features))

    def create_estimator_spec(
        self,
        features: PyTree,
        mode: str,
        logits: jax.Array,
        labels: jax.Array | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        trainable_variables: Sequence[keras.Variable] | None = None,
        train_op_fn: Callable[[Any], Any] | None = None,
        update_ops: object = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        """Returns the `EstimatorSpec` that a model function returns. Call it in a model function.

        Args:
          features: the features of the model function.
          mode: a value of `ModeKeys`.
          logits: array (rows, logits_dimension).
          labels: the labels of the model function.
          optimizer: trains the variables. None if `train_op_fn` does.
          trainable_variables: variables to train. None for all.
          train_op_fn: function of the loss. Returns a `train_op`.
          update_ops: must be None, because layers update their statistics themselves.
          regularization_losses: scalars to add to the loss.

        Raises:
          InvalidArgumentError: the logits have another shape, or both or none of `optimizer` and `train_op_fn` are given.

        Source: tf.estimator.Head.create_estimator_spec.
        """
        self._check_logits(logits)
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        # Not in the constructor of the specification: the message can say here that the input_fn must return labels.
        if labels is None:
            raise InputError(f"labels=None in mode {mode!r}", "a loss needs labels.", "return features, labels")
        loss = self.loss(labels, logits, features)
        # Added after the mean over rows, so that a penalty does not depend on the size of the batch.
        extra = sum(map(jnp.asarray, regularization_losses or ()), start=jnp.zeros((), loss.dtype))
        if mode == ModeKeys.EVAL:
            weights = self._weights(features)
            # `loss` is averaged over batches and `average_loss` over rows. They differ
            # if the last batch is short, as in tf.estimator.
            metrics = {"average_loss": self._mean("average_loss", self._row_losses(labels, logits), weights)}
            metrics |= self._metrics(labels, logits, weights)
            named = {f"{key}/{self._name}" if self._name else key: metric for key, metric in metrics.items()}
            return EstimatorSpec(mode, predictions=predictions, loss=loss + extra, eval_metric_ops=named)
        if (optimizer is None) == (train_op_fn is None):
            raise InvalidArgumentError(
                f"create_estimator_spec(optimizer={shown(optimizer)}, train_op_fn={shown(train_op_fn)})",
                "exactly one of them must be given.",
                "optimizer=keras.optimizers.Adam()",
            )
        if train_op_fn is not None:
            train_op = train_op_fn(loss + extra)
        else:
            train_op = minimize(optimizer, loss + extra, trainable_variables)
        return EstimatorSpec(mode, predictions=predictions, loss=loss + extra, train_op=train_op)

    def _row_losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        if self._loss_fn is None:
            return self._losses(labels, logits)
        losses = jnp.asarray(self._loss_fn(labels, logits))
        if losses.shape[:1] != logits.shape[:1]:
            raise InvalidArgumentError(
                f"a loss_fn that returns the shape {losses.shape}",
                f"it must return one loss per row, {logits.shape[:1]}.",
                "keras.losses.binary_crossentropy(labels, logits, from_logits=True)",
            )
        # Several losses of a row become their mean, since a weight belongs to a row and not to a label.
        return losses if losses.ndim == 1 else losses.reshape(losses.shape[0], -1).mean(axis=1)

    def _weights(self, features: PyTree) -> jax.Array | None:
        if self._weight_column is None:
            return None
        if not isinstance(features, Mapping) or self._weight_column not in features:
            raise InputError(
                f"weight_column={self._weight_column!r}",
                f"the features are {sorted(features) if isinstance(features, Mapping) else 'an array'}.",
                "a feature of this name, in the input_fn",
            )
        raw = features[self._weight_column]
        weights = jnp.asarray(raw if self._weight_fn is None else self._weight_fn(raw), jnp.float32)
        # (rows,) and (rows, 1) are the same weights. More per row would be weights of labels, and losses are per row.
        if weights.size != weights.shape[0]:
            raise InputError(
                f"the feature {self._weight_column!r} of the shape {weights.shape}",
                "a row has one weight.",
                "weights of the shape (rows,)",
            )
        return weights.reshape(-1)

    def _check_logits(self, logits: jax.Array) -> None:
        # Checked, because (rows,) and (rows, 1) would broadcast to (rows, rows) against the labels, without an error.
        if jnp.ndim(logits) != 2 or logits.shape[1] != self.logits_dimension:
            raise InvalidArgumentError(
                f"logits of the shape {jnp.shape(logits)}",
                f"the head needs the shape (rows, {self.logits_dimension}).",
                f"keras.layers.Dense({self.logits_dimension})",
            )

    @staticmethod
    def _mean(name: str, values: jax.Array, weights: jax.Array | None) -> keras.metrics.Metric:
        # Keras does not allow a slash in a name. The dict's key keeps tf.estimator's name.
        metric = keras.metrics.Mean(name=name.replace("/", "_"))
        metric.update_state(values, sample_weight=weights)
        return metric


def column(values: ArrayLike) -> jax.Array:
    """Returns values of rows as (rows, 1). Values (rows, ...) stay as they are."""
    array = jnp.asarray(values)
    return array[:, None] if array.ndim == 1 else array
