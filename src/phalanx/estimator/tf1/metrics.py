# SPDX-License-Identifier: Apache-2.0
"""Metrics of `tf.compat.v1.metrics`: each creates a Keras metric and updates it. Call them in a model function.

Each returns a pair, as in TensorFlow 1. Both items are the current value.
"""

import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from phalanx.estimator.heads.base import column
from phalanx.estimator.loop.spec import UpdatedMetric


def _updated(
    metric: keras.metrics.Metric, labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None
) -> UpdatedMetric:
    # Keras takes the mean over the last dim, which must not be that of the rows.
    metric.update_state(column(labels), column(predictions), sample_weight=weights)
    return UpdatedMetric(metric)


def accuracy(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> UpdatedMetric:
    """Returns how often predictions equal labels. Source: tf.compat.v1.metrics.accuracy."""
    labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
    return _updated(
        keras.metrics.Accuracy(name=name or "accuracy"), labels.reshape(predictions.shape), predictions, weights
    )


def auc(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike | None = None,
    num_thresholds: int = 200,
    curve: str = "ROC",
    name: str | None = None,
) -> UpdatedMetric:
    """Returns the area under a curve. Source: tf.compat.v1.metrics.auc."""
    # 200 thresholds in both. For precision and recall, Keras interpolates where TensorFlow 1 takes trapezoids.
    metric = keras.metrics.AUC(num_thresholds, curve, name=name or "auc")
    return _updated(metric, labels, predictions, weights)


def mean(values: ArrayLike, weights: ArrayLike | None = None, name: str | None = None) -> UpdatedMetric:
    """Returns the mean of values. Source: tf.compat.v1.metrics.mean."""
    metric = keras.metrics.Mean(name=name or "mean")
    metric.update_state(values, sample_weight=weights)
    return UpdatedMetric(metric)


def mean_absolute_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> UpdatedMetric:
    """Returns the mean absolute error. Source: tf.compat.v1.metrics.mean_absolute_error."""
    return _updated(keras.metrics.MeanAbsoluteError(name=name or "mean_absolute_error"), labels, predictions, weights)


def mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> UpdatedMetric:
    """Returns the mean squared error. Source: tf.compat.v1.metrics.mean_squared_error."""
    return _updated(keras.metrics.MeanSquaredError(name=name or "mean_squared_error"), labels, predictions, weights)


def root_mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> UpdatedMetric:
    """Returns the root of the mean squared error. Source: tf.compat.v1.metrics.root_mean_squared_error."""
    metric = keras.metrics.RootMeanSquaredError(name=name or "root_mean_squared_error")
    return _updated(metric, labels, predictions, weights)


def precision(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> UpdatedMetric:
    """Returns the precision. Source: tf.compat.v1.metrics.precision."""
    return _updated(keras.metrics.Precision(name=name or "precision"), labels, predictions, weights)


def recall(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, name: str | None = None
) -> UpdatedMetric:
    """Returns the recall. Source: tf.compat.v1.metrics.recall."""
    return _updated(keras.metrics.Recall(name=name or "recall"), labels, predictions, weights)
