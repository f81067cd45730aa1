"""Activations for CPUs, against their definition in double precision."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src.kernels import activation

X = np.concatenate([np.linspace(-12, 12, 4801), [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0]]).astype("float32")


def test_gelu_is_that_of_its_definition():
    """Within a few roundings of a float, and so is its gradient: the probability, and x times the density. NaN stays NaN."""
    wide = X.astype("float64")
    below = np.asarray([0.5 * math.erfc(-x / math.sqrt(2)) for x in wide])
    density = np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(jax.jit(activation.gelu)(X), wide * below, rtol=3e-7, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: activation.gelu(x).sum()))(X)
    np.testing.assert_allclose(gradient, below + X * density, rtol=3e-7, atol=1e-6)
    found = activation.gelu(jnp.asarray([np.nan, np.inf], "float32"))
    assert np.isnan(found[0])
    assert np.isposinf(found[1])
