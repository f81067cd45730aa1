"""Counted operations, beside counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from phalanx.forecast.flops import count


def product(a, b):
    """Returns a product of matrices, which takes 2 * 8 * 16 * 4 operations."""
    return a @ b


def looped(a, b):
    """Multiplies three times."""
    return jax.lax.scan(lambda c, _: (c, a @ b), 0.0, None, length=3)[1]


def branched(a, b):
    """Multiplies, or does not."""
    return jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.zeros((8, 4)))


def convolved(a, b):
    """Convolves images of 8x8 with 2 channels by 16 kernels of 3x3, keeping the size."""
    del a, b
    return jax.lax.conv_general_dilated(
        jnp.ones((1, 8, 8, 2)), jnp.ones((3, 3, 2, 16)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def summed(a, b):
    """Adds 8 * 16 numbers, after one operation on each. Moving them is free."""
    del b
    return jnp.exp(a.T.reshape(-1)).sum()


@pytest.mark.parametrize(
    ("function", "by_hand"),
    [
        (product, 2 * 8 * 16 * 4),
        (looped, 3 * 2 * 8 * 16 * 4),
        (branched, 2 * 8 * 16 * 4),
        (convolved, 2 * 8 * 8 * 16 * 3 * 3 * 2),
        (summed, 2 * 8 * 16),
        (jax.jit(product), 2 * 8 * 16 * 4),
    ],
    ids=["product", "scan", "cond", "convolution", "sum", "jit"],
)
def test_operations_are_counted(function, by_hand):
    """Within 2%: what compares or converts a single number counts too."""
    jaxpr = jax.make_jaxpr(function)(jnp.ones((8, 16)), jnp.ones((16, 4)))
    assert count(jaxpr.jaxpr) == pytest.approx(by_hand, rel=0.02)
