# SPDX-License-Identifier: Apache-2.0
"""Max-pooling and average-pooling."""

import functools
import math

import jax
import jax.numpy as jnp

from phalanx._src.kernels.windows import Windows


# JAX's derivative of `maximum` would give each of two equal elements half of the gradient.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def max_pool(x: jax.Array, windows: Windows) -> jax.Array:
    """Returns the largest element of each window.

    As in XLA, the gradient of a window belongs to its first element that is the largest.

    Args:
      x: array of floats.
      windows: the windows. Padding is never the largest.
    """
    return functools.reduce(jnp.maximum, windows.places(x, -jnp.inf))


@max_pool.defjvp
def _max_pool_jvp(
    windows: Windows, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    largest = max_pool(x, windows)
    # NaN equals nothing, so padding is not the largest element of a window of -inf either.
    places = windows.places(x, jnp.nan if any(map(any, windows.padding)) else 0)
    first = jnp.full(largest.shape, len(places) - 1, jnp.uint8 if len(places) <= 256 else jnp.uint32)
    # Backwards, so that the first of several equal elements is written last.
    for number, place in reversed(list(enumerate(places[:-1]))):
        first = jnp.where(place == largest, first.dtype.type(number), first)
    chosen = (jnp.where(first == number, dy, 0) for number, dy in enumerate(windows.linear_places(dx)))
    return largest, functools.reduce(jnp.add, chosen)


def average_pool(x: jax.Array, windows: Windows) -> jax.Array:
    """Returns the mean of the elements of each window. Padding is not counted.

    Args:
      x: array of floats.
      windows: the windows.
    """
    total = functools.reduce(jnp.add, windows.linear_places(x))
    if not any(map(any, windows.padding)):
        return total / math.prod(windows.sizes)
    like = [n if d in windows.dims else 1 for d, n in enumerate(x.shape)]  # The counts are equal along all other dims.
    return total / functools.reduce(jnp.add, windows.places(jnp.ones(like, x.dtype), 0))
