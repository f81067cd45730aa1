# SPDX-License-Identifier: Apache-2.0
"""Functions of `tf.compat.v1.nn` on JAX arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def elu(features: ArrayLike, name: str | None = None) -> jax.Array:
    """Returns exponential linear units. Source: tf.compat.v1.nn.elu."""
    return jax.nn.elu(features)


def log_softmax(logits: ArrayLike, axis: int = -1, name: str | None = None) -> jax.Array:
    """Returns logarithms of probabilities. Source: tf.compat.v1.nn.log_softmax."""
    return jax.nn.log_softmax(logits, axis)


def relu(features: ArrayLike, name: str | None = None) -> jax.Array:
    """Returns the features that are positive, and else 0. Source: tf.compat.v1.nn.relu."""
    return jax.nn.relu(features)


def sigmoid(x: ArrayLike, name: str | None = None) -> jax.Array:
    """Returns probabilities. Source: tf.compat.v1.nn.sigmoid."""
    return jax.nn.sigmoid(x)


def softmax(logits: ArrayLike, axis: int = -1, name: str | None = None) -> jax.Array:
    """Returns probabilities that add up to 1 over a dim. Source: tf.compat.v1.nn.softmax."""
    return jax.nn.softmax(logits, axis)


def softplus(features: ArrayLike, name: str | None = None) -> jax.Array:
    """Returns a smooth form of `relu`. Source: tf.compat.v1.nn.softplus."""
    return jax.nn.softplus(features)


def tanh(x: ArrayLike, name: str | None = None) -> jax.Array:
    """Returns the hyperbolic tangent. Source: tf.compat.v1.nn.tanh."""
    return jnp.tanh(x)


def sigmoid_cross_entropy_with_logits(labels: Any = None, logits: Any = None, name: str | None = None) -> jax.Array:
    """Returns one loss per logit. Source: tf.compat.v1.nn.sigmoid_cross_entropy_with_logits."""
    return jax.nn.softplus(logits) - jnp.multiply(labels, logits)


def softmax_cross_entropy_with_logits(labels: Any = None, logits: Any = None, name: str | None = None) -> jax.Array:
    """Returns one loss per row. Source: tf.compat.v1.nn.softmax_cross_entropy_with_logits."""
    return -jnp.multiply(labels, jax.nn.log_softmax(logits)).sum(axis=-1)


def sparse_softmax_cross_entropy_with_logits(
    labels: Any = None, logits: Any = None, name: str | None = None
) -> jax.Array:
    """Returns one loss per row. Source: tf.compat.v1.nn.sparse_softmax_cross_entropy_with_logits."""
    # A gather of the label's logit, so that no one-hot labels are needed.
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[..., None], axis=-1)[..., 0]
