"""Counted operations, beside counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from phalanx._src.tools.estimate.flops import count

PRODUCT = 2 * 8 * 16 * 4


def convolved(a, b):
    """Convolves images of 8x8 with 2 channels by 16 kernels of 3x3, keeping the size."""
    images, kernels = jnp.ones((1, 8, 8, 2)), jnp.ones((3, 3, 2, 16))
    return jax.lax.conv_general_dilated(images, kernels, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(
    ("function", "by_hand"),
    [
        pytest.param(jnp.matmul, PRODUCT, id="product"),
        pytest.param(
            lambda a, b: jax.lax.scan(lambda c, _: (c, a @ b), 0.0, None, length=3)[1], 3 * PRODUCT, id="scan"
        ),
        pytest.param(
            lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.zeros((8, 4))), PRODUCT, id="cond"
        ),
        pytest.param(convolved, 2 * 8 * 8 * 16 * 3 * 3 * 2, id="convolution"),
        pytest.param(lambda a, b: jnp.exp(a.T.reshape(-1)).sum(), 2 * 8 * 16, id="sum of numbers; moving them is free"),
        pytest.param(jax.jit(lambda a, b: a @ b), PRODUCT, id="jit"),
    ],
)
def test_operations_are_counted(function, by_hand):
    """Within 2%: what compares or converts a single number counts too."""
    jaxpr = jax.make_jaxpr(function)(jnp.ones((8, 16)), jnp.ones((16, 4)))
    assert count(jaxpr.jaxpr) == pytest.approx(by_hand, rel=0.02)
