"""Convolutions for CPUs, against those of XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from tests.draws import draws

from phalanx._src.kernels import convolution
from phalanx._src.kernels.windows import Windows

NUMBERS = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC"), 5: ("NDHWC", "DHWIO", "NDHWC")}


@st.composite
def convolutions(draw):
    """An array, the shape of a kernel without channels, strides and padding."""
    rank = draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 4)] * rank))
    strides = draw(st.tuples(*[st.integers(1, 3)] * rank))
    lengths = [draw(st.integers(size, size + 4)) for size in sizes]
    channels = draw(st.integers(1, 4))
    x = np.random.default_rng(0).normal(size=(2, *lengths, channels)).astype("float32")
    return x, sizes, strides, draw(st.sampled_from(["valid", "same"])), draw(st.integers(1, 3))


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def require_same(ours, theirs, x, kernel):
    """Compares results and both gradients, in both directions of differentiation."""

    def results(fn, x, kernel):
        y, back = jax.vjp(fn, x, kernel)
        tangent = jax.jvp(fn, (x, kernel), (jnp.ones_like(x), jnp.ones_like(kernel)))[1]
        of_kernel = jax.grad(lambda k: (fn(x, k) ** 2).sum())(kernel)
        of_input = jax.grad(lambda x: (fn(x, kernel) ** 2).sum())(x)
        return y, tangent, *back(jnp.asarray(normal(*y.shape))), of_kernel, of_input

    found, expected = (jax.jit(functools.partial(results, fn))(x, kernel) for fn in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@draws(3, 60)
@given(convolutions())
def test_convolutions_are_those_of_xla(case):
    """Of all strides and paddings; depthwise, with one and several outputs of each channel, too."""
    x, sizes, strides, padding, outputs = case
    windows = Windows.over(x.shape, range(1, x.ndim - 1), sizes, strides, padding)
    by_xla = functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding.upper(),
        dimension_numbers=NUMBERS[x.ndim],
    )
    kernel = normal(*sizes, x.shape[-1], outputs)
    require_same(lambda x, k: convolution.convolution(x, k, windows), by_xla, x, kernel)
    require_same(
        lambda x, k: convolution.depthwise(x, k, windows),
        lambda x, k: by_xla(x, k.reshape(*sizes, 1, -1), feature_group_count=x.shape[-1]),
        x,
        kernel,
    )


@draws(3, 60)
@given(convolutions())
def test_transposed_convolutions_are_those_of_jax(case):
    """Their windows overlap, touch, or leave gaps."""
    x, sizes, strides, padding, outputs = case
    pads = []
    for length, size, stride in zip(x.shape[1:-1], sizes, strides, strict=True):
        total = (
            length * stride + (max(size - stride, 0) if padding == "valid" else 0) + size - 2 - (length - 1) * stride
        )
        before = min(total, stride - 1 if size < stride else size - 1) if padding == "valid" else -(-total // 2)
        pads.append((before, total - before))
    require_same(
        lambda x, k: convolution.transposed(x, k, strides, tuple(pads)),
        lambda x, k: lax.conv_transpose(x, k, strides, pads, dimension_numbers=NUMBERS[x.ndim]),
        x,
        normal(*sizes, x.shape[-1], outputs),
    )


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_pointwise_convolutions_are_those_of_xla(strides):
    """A matrix product for each place."""
    require_same(
        lambda x, k: convolution.pointwise(x, k, strides),
        lambda x, k: lax.conv_general_dilated(x, k, strides, "VALID", dimension_numbers=NUMBERS[4]),
        normal(2, 5, 7, 3),
        normal(1, 1, 3, 4),
    )
