"""Activations for CPUs, against their definition in double precision."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.kernels import activation

X = np.concatenate([np.linspace(-12, 12, 4801), [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0]]).astype("float32")


def test_gelu_is_that_of_its_definition():
    """Within a few roundings of a float, as far from zero as a float can be and for tiny numbers."""
    expected = [x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in X.astype("float64")]
    np.testing.assert_allclose(jax.jit(activation.gelu)(X), expected, rtol=3e-7, atol=1e-6)


def test_gradient_of_gelu_is_that_of_its_definition():
    """The probability, and x times the density."""
    below = [0.5 * math.erfc(-x / math.sqrt(2)) for x in X.astype("float64")]
    density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in X.astype("float64")]
    expected = np.asarray(below) + X * np.asarray(density)
    gradient = jax.jit(jax.grad(lambda x: activation.gelu(x).sum()))(X)
    np.testing.assert_allclose(gradient, expected, rtol=3e-7, atol=1e-6)


def test_gelu_of_what_is_no_number():
    """NaN stays NaN, and infinity is infinity or zero."""
    found = activation.gelu(jnp.asarray([np.nan, np.inf], "float32"))
    assert np.isnan(found[0])
    assert np.isposinf(found[1])
