# SPDX-License-Identifier: Apache-2.0
"""Counts how values are distributed, in a program."""

import jax
import jax.numpy as jnp
from jax import lax

from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.typed_jax import pmax, pmin, psum


def bucket_counts(data: jax.Array, count: int, num_replicas: int) -> jax.Array:
    """Returns a histogram, (count, 3): the left end, the right end and the number of values of each bucket.

    Args:
      data: array of real numbers, of any shape.
      count: number of buckets.
      num_replicas: number of replicas whose values are counted together. 1 outside replica context.
    """
    # A record is no part of a loss, and the least value of all replicas has no gradient.
    values = lax.stop_gradient(data).astype(jnp.float32).ravel()
    is_finite = jnp.isfinite(values)
    low = jnp.min(values, initial=jnp.inf, where=is_finite)
    high = jnp.max(values, initial=-jnp.inf, where=is_finite)
    if num_replicas > 1:
        # The edges are agreed first, so that the counts of the replicas can be added.
        low, high = pmin(low, REPLICA_AXIS), pmax(high, REPLICA_AXIS)
    # As in TensorFlow, one value is the middle of a bucket of width 1, and no value gives empty buckets.
    low, high = (jnp.where(low <= high, x, 0) for x in (low, high))
    low, high = jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)
    edges = jnp.linspace(low, high, count + 1)
    places = jnp.clip(((values - low) * (count / (high - low))).astype(jnp.int32), 0, count - 1)
    counts = jnp.zeros(count).at[places].add(is_finite.astype(jnp.float32))
    if num_replicas > 1:
        counts = psum(counts, REPLICA_AXIS)
    return jnp.stack([edges[:-1], edges[1:], counts], axis=1)
