# SPDX-License-Identifier: Apache-2.0
"""Functions of `tf.compat.v1.nn` on arrays of JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import elu, log_softmax, relu, sigmoid, softmax, softplus, tanh


def sigmoid_cross_entropy_with_logits(labels: Any = None, logits: Any = None) -> Any:
    """Returns one loss per logit. Source: tf.compat.v1.nn.sigmoid_cross_entropy_with_logits."""
    return jax.nn.softplus(logits) - labels * logits


def softmax_cross_entropy_with_logits(labels: Any = None, logits: Any = None) -> Any:
    """Returns one loss per row. Source: tf.compat.v1.nn.softmax_cross_entropy_with_logits."""
    return -(labels * jax.nn.log_softmax(logits)).sum(axis=-1)


def sparse_softmax_cross_entropy_with_logits(labels: Any = None, logits: Any = None) -> Any:
    """Returns one loss per row. Source: tf.compat.v1.nn.sparse_softmax_cross_entropy_with_logits."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[..., None], axis=-1)[..., 0]
