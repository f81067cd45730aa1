# SPDX-License-Identifier: Apache-2.0
"""Convolutions over arrays (rows, ..., channels) with kernels (..., input channels, output channels)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from phalanx._src.kernels.windows import Windows


def pointwise(x: jax.Array, kernel: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """Returns a convolution with windows of one element, as a matrix product."""
    if any(stride != 1 for stride in strides):
        x = lax.slice(x, [0] * x.ndim, x.shape, (1, *strides, 1))
    return jnp.matmul(x, kernel.reshape(kernel.shape[-2:]))


def depthwise(x: jax.Array, kernel: jax.Array, windows: Windows) -> jax.Array:
    """Returns a convolution that keeps channels apart.

    Args:
      x: array (rows, ..., channels).
      kernel: array (..., channels, multiplier).
      windows: the windows.

    Returns:
      Array (rows, ..., channels * multiplier).
    """
    multiplier = kernel.shape[-1]
    factors = kernel.reshape(-1, kernel.shape[-2] * multiplier)
    if multiplier > 1:
        x = jnp.repeat(x, multiplier, axis=-1)
    return functools.reduce(jnp.add, map(jnp.multiply, windows.linear_places(x), factors))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def convolution(x: jax.Array, kernel: jax.Array, windows: Windows) -> jax.Array:
    """Returns a convolution of XLA, whose gradient by `x` is a matrix product that is added where windows overlap.

    Args:
      x: array (rows, ..., input channels).
      kernel: array (..., input channels, output channels).
      windows: the windows.
    """
    numbers = _numbers(x.ndim)
    return lax.conv_general_dilated(x, kernel, windows.strides, windows.padding, dimension_numbers=numbers)


def _convolution_jvp(windows: Windows, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    y = convolution(x, kernel, windows)
    dy = jnp.zeros_like(y)
    if not isinstance(dkernel, SymbolicZero):
        dy += convolution(x, dkernel, windows)
    if not isinstance(dx, SymbolicZero):
        # JAX transposes these lines for the gradient: a matrix product, and an addition of overlapping windows.
        patches = jnp.concatenate(windows.linear_places(dx), -1)
        dy += jnp.matmul(patches, kernel.reshape(-1, kernel.shape[-1]))
    return y, dy


# The input of a first layer has no gradient. Its tangent is a symbolic zero, for which nothing is computed.
convolution.defjvp(_convolution_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def transposed(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    """Returns a transposed convolution of XLA, whose gradient by the kernel is a matrix product of patches.

    Args:
      x: array (rows, ..., input channels).
      kernel: array (..., input channels, output channels).
      strides: the strides.
      padding: padding of the array with zeros between its elements, as `jax.lax.conv_transpose` takes it.
    """
    return lax.conv_transpose(x, kernel, strides, padding, dimension_numbers=_numbers(x.ndim))


def _transposed_jvp(strides: Any, padding: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    y = transposed(x, kernel, strides, padding)
    dy = jnp.zeros_like(y)
    if not isinstance(dx, SymbolicZero):
        dy += transposed(dx, kernel, strides, padding)
    if not isinstance(dkernel, SymbolicZero):
        sizes = kernel.shape[:-2]
        cut = tuple((size - 1 - before, size - 1 - after) for size, (before, after) in zip(sizes, padding, strict=True))
        windows = Windows(tuple(range(1, x.ndim - 1)), sizes, strides, cut)
        # A transposed convolution reads its kernel backwards.
        backwards = jnp.flip(dkernel, tuple(range(len(sizes)))).reshape(math.prod(sizes), *kernel.shape[-2:])
        flat = jnp.matmul(x, backwards.transpose(1, 0, 2).reshape(x.shape[-1], -1))
        dy += windows.overlap_add(jnp.split(flat, math.prod(sizes), -1), y.shape)
    return y, dy


transposed.defjvp(_transposed_jvp, symbolic_zeros=True)


def _numbers(rank: int) -> tuple[str, str, str]:
    """Returns the names of the dims of an array of this rank, of its kernel and of the result, for JAX."""
    spatial = "DHW"[5 - rank :]
    return f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"
