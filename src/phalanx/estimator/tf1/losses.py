# SPDX-License-Identifier: Apache-2.0
"""Losses of `tf.compat.v1.losses`: means over the rows of a replica."""

from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from phalanx.errors import InvalidArgumentError, shown
from phalanx.estimator.heads.losses import reduced
from phalanx.estimator.tf1 import nn


@final
class Reduction:
    """How losses of rows become one number.

    Source: tf.compat.v1.losses.Reduction.
    """

    SUM = "weighted_sum"
    MEAN = "weighted_mean"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"


_NAMES = {
    Reduction.SUM: "sum",
    Reduction.MEAN: "sum_over_batch_size",
    Reduction.SUM_OVER_BATCH_SIZE: "sum_over_batch_size",
    Reduction.SUM_BY_NONZERO_WEIGHTS: "sum_over_batch_size",
}


def _loss(
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: float,
    reduction: str,
) -> jax.Array:
    # Weights per row would make the three means of TensorFlow 1 differ. Keras losses take them.
    if not isinstance(weights, (int, float, np.number)):
        raise InvalidArgumentError(
            f"weights={shown(weights)}",
            "only a number is supported.",
            "keras.losses.MeanSquaredError()(labels, predictions, sample_weight=weights)",
        )
    if not isinstance(reduction, str) or reduction not in _NAMES:
        raise InvalidArgumentError(
            f"reduction={shown(reduction)}", f"must be one of {tuple(_NAMES)}.", "omit reduction"
        )
    # MEAN divides by the sum of the weights (losses_impl.py), so that only a weight of 0 makes a difference.
    scale = float(weights != 0) if reduction == Reduction.MEAN else float(weights)
    return reduced(fn, labels, predictions, _NAMES[reduction]) * scale


def mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: float = 1.0, reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS
) -> jax.Array:
    """Returns the mean squared error. Call it in a model function. Source: tf.compat.v1.losses.mean_squared_error."""
    return _loss(lambda y, p: jnp.square(p - y), labels, predictions, weights, reduction)


def absolute_difference(
    labels: ArrayLike, predictions: ArrayLike, weights: float = 1.0, reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS
) -> jax.Array:
    """Returns the mean absolute error. Call it in a model function. Source: tf.compat.v1.losses.absolute_difference."""
    return _loss(lambda y, p: jnp.abs(p - y), labels, predictions, weights, reduction)


def sigmoid_cross_entropy(
    multi_class_labels: ArrayLike,
    logits: ArrayLike,
    weights: float = 1.0,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> jax.Array:
    """Returns the mean cross-entropy of independent classes. Call it in a model function.

    Source: tf.compat.v1.losses.sigmoid_cross_entropy.
    """
    return _loss(nn.sigmoid_cross_entropy_with_logits, multi_class_labels, logits, weights, reduction)


def softmax_cross_entropy(
    onehot_labels: ArrayLike, logits: ArrayLike, weights: float = 1.0, reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS
) -> jax.Array:
    """Returns the mean cross-entropy of classes. Call it in a model function.

    Source: tf.compat.v1.losses.softmax_cross_entropy.
    """
    return _loss(nn.softmax_cross_entropy_with_logits, onehot_labels, logits, weights, reduction)


def sparse_softmax_cross_entropy(
    labels: ArrayLike, logits: ArrayLike, weights: float = 1.0, reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS
) -> jax.Array:
    """Returns the mean cross-entropy of numbers of classes. Call it in a model function.

    Source: tf.compat.v1.losses.sparse_softmax_cross_entropy.
    """
    ids = jnp.asarray(labels)
    # TensorFlow 1 also takes labels (rows, 1), as datasets of one column yield them.
    ids = ids[..., 0] if ids.ndim == jnp.ndim(logits) else ids
    return softmax_cross_entropy(jax.nn.one_hot(ids, jnp.shape(logits)[-1]), logits, weights, reduction)
