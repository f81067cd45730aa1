# SPDX-License-Identifier: Apache-2.0
"""Looks up ids in a table and combines the rows, in a program."""

import jax
import jax.numpy as jnp


def multi_hot(ids: jax.Array, weights: jax.Array | None, num_buckets: int) -> jax.Array:
    """Returns how often each id occurs, (batch, num_buckets), or the sum of its weights.

    Args:
      ids: integers (batch, k). Negative ones are missing.
      weights: (batch, k). None if each weight is 1.
      num_buckets: number of ids.
    """
    hot = jax.nn.one_hot(ids, num_buckets)
    return (hot if weights is None else hot * weights[..., None]).sum(axis=1)


def combined_rows(
    table: jax.Array, ids: jax.Array, weights: jax.Array | None, combiner: str, max_norm: float | None = None
) -> jax.Array:
    """Returns the combined rows of the ids, (batch, dimension). They are 0 if there are no ids.

    Args:
      table: (num_buckets, dimension).
      ids: integers (batch, k). Negative ones are missing.
      weights: (batch, k). None if each weight is 1. A mean skips ids whose weight is not positive.
      combiner: "mean", "sqrtn" or "sum".
      max_norm: largest norm of a row. Longer rows are scaled.
    """
    is_present = ids >= 0
    if weights is not None and combiner != "sum":
        is_present &= weights > 0
    factors = jnp.where(is_present, 1.0 if weights is None else weights, 0.0)
    rows = jnp.take(table, jnp.maximum(ids, 0), axis=0)
    if max_norm is not None:
        rows = _clipped(rows, max_norm)
    # A missing id must not add what is wrong with row 0.
    total = jnp.where(is_present[..., None], rows * factors[..., None], 0.0).sum(axis=1)
    if combiner == "sum":
        return total
    squares = (factors**2).sum(axis=1, keepdims=True)
    divisor = factors.sum(axis=1, keepdims=True) if combiner == "mean" else jnp.sqrt(jnp.where(squares > 0, squares, 1))
    return total / jnp.where(divisor > 0, divisor, 1)


def _clipped(rows: jax.Array, max_norm: float) -> jax.Array:
    squares = (rows**2).sum(axis=-1, keepdims=True)
    is_long = squares > max_norm**2
    # The gradient of the root at 0 is not finite.
    return rows * jnp.where(is_long, max_norm / jnp.sqrt(jnp.where(is_long, squares, 1)), 1)
