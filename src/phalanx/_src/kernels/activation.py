# SPDX-License-Identifier: Apache-2.0
"""Activations."""

import math

import jax
import jax.numpy as jnp
from jax import lax


# The backward pass then reads one stored array. JAX's own derivative stores three: x, the probability and an exponential.
@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Returns x times the probability that a normally distributed number is below x.

    JAX computes that probability by `erfc`, for which XLA evaluates two polynomials and an exponential. `erf` is one quotient
    of polynomials. The two differ by the rounding of a float.

    Args:
      x: array of floats.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415.
    """
    return x * _below(x)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    below = _below(x)
    density = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return x * below, dx * (below + x * density)


def _below(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
