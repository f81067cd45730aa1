"""Poolings for CPUs, against those of XLA: to the last bit, and where a sum has another order, to 1e-6."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from tests.draws import draws

from phalanx._src.kernels import pooling
from phalanx._src.kernels.windows import Windows


@st.composite
def poolings(draw):
    """Shapes, windows and dtypes, of one, two and three spatial dims, wherever they are."""
    rank = draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 4)] * rank))
    strides = draw(st.tuples(*[st.integers(1, 4)] * rank))
    lengths = [draw(st.integers(size, size + 6)) for size in sizes]
    channels_first = draw(st.booleans())
    shape = (2, 3, *lengths) if channels_first else (2, *lengths, 3)
    dims = range(2, 2 + rank) if channels_first else range(1, 1 + rank)
    padding = draw(st.sampled_from(["valid", "same"]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    values = draw(st.sampled_from([2, 4, 1000]))
    return shape, Windows.over(shape, dims, sizes, strides, padding), padding, dtype, values


def by_xla(x, start, fn, windows, padding):
    sizes, strides = [1] * x.ndim, [1] * x.ndim
    for d, size, stride in zip(windows.dims, windows.sizes, windows.strides, strict=True):
        sizes[d], strides[d] = size, stride
    return lax.reduce_window(x, np.asarray(start, x.dtype), fn, sizes, strides, padding.upper())


def with_gradient(fn, x):
    """The result of a function, and the gradient for other weights of each result."""

    @jax.jit
    def results(x):
        y, back = jax.vjp(fn, x)
        weights = np.random.default_rng(1).integers(-8, 9, size=y.shape).astype(y.dtype)
        return y, back(jnp.asarray(weights))[0]

    return results(x)


@draws(3, 60)
@given(poolings())
def test_largest_elements_are_those_of_xla(case):
    """Result and gradient have the same bits, also where several elements are the largest. The weights add up exactly.

    The sum of a mean may have another order.
    """
    shape, windows, padding, dtype, values = case
    x = jnp.asarray(np.random.default_rng(0).integers(values, size=shape), dtype)
    ours = with_gradient(lambda x: pooling.max_pool(x, windows), x)
    theirs = with_gradient(lambda x: by_xla(x, -jnp.inf, lax.max, windows, padding), x)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    x = x.astype("float32")
    counts = by_xla(jnp.ones_like(x), 0, lax.add, windows, padding)
    ours = with_gradient(lambda x: pooling.average_pool(x, windows), x)
    theirs = with_gradient(lambda x: by_xla(x, 0, lax.add, windows, padding) / counts, x)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


def test_padding_is_never_the_largest():
    """A window of -inf alone has its gradient at its first element, although its padding is -inf too."""
    x = jnp.full((1, 4, 1), -jnp.inf)
    windows = Windows.over(x.shape, (1,), (3,), (1,), "same")
    ours = with_gradient(lambda x: pooling.max_pool(x, windows), x)
    theirs = with_gradient(lambda x: by_xla(x, -jnp.inf, lax.max, windows, "same"), x)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kernel", [pooling.max_pool, pooling.average_pool])
def test_all_transformations_of_jax(kernel):
    """Both derivatives of second order, and batches of arrays, as with operations of JAX."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 5, 2)).astype("float32"))
    windows = Windows.over(x.shape, (1, 2), (2, 2), (2, 2), "same")
    start, fn = (-jnp.inf, lax.max) if kernel is pooling.max_pool else (0, lax.add)
    counts = 1 if kernel is pooling.max_pool else by_xla(jnp.ones_like(x), 0, lax.add, windows, "same")
    ours = lambda x: (kernel(x, windows) ** 3).sum()  # noqa: E731
    theirs = lambda x: ((by_xla(x, start, fn, windows, "same") / counts) ** 3).sum()  # noqa: E731

    def derivatives(f, x):
        along = lambda f: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]  # noqa: E731
        return along(f), along(jax.grad(f)), jax.grad(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1])(x)

    found, expected = (jax.jit(functools.partial(derivatives, f))(x) for f in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    many = np.stack([x, 2 * np.asarray(x)])
    np.testing.assert_allclose(jax.jit(jax.vmap(ours))(many), [jax.jit(ours)(x) for x in many], rtol=1e-6)
