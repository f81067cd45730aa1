# SPDX-License-Identifier: Apache-2.0
"""Replaces poolings, convolutions and GELU of Keras by those of `phalanx._src.kernels` in steps for CPUs, where they are faster."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from phalanx._src import compat
from phalanx._src.kernels import activation, convolution, platforms, pooling
from phalanx._src.kernels.windows import Windows
from phalanx._src.runtime.settings import settings
from phalanx._src.tracing import context
from phalanx._src.typed_jax import optimization_barrier
from phalanx.errors import arguments
from phalanx.typing import PyTree

_MOST_PLACES = 128
"""Number of elements of a window up to which its places are computed one by one. More would take long to compile."""
_MOST_PATCHES, _MOST_PRODUCTS = 3 * 2**19, 2**23
"""Number of floats that a gradient may store besides its arguments. With more, memory costs more than a matrix product saves."""
_FEW_CHANNELS = 4


def set_cpu_kernels(enabled: bool) -> None:
    """Sets whether steps for CPUs compute poolings, convolutions and GELU of Keras by kernels of Phalanx. They do by default.

    May be called in any context. Steps that are already compiled do not change, so call it before the first step. Programs for
    GPUs and TPUs contain none of the kernels.

    Args:
      enabled: False for XLA's operations.

    Raises:
      InvalidArgumentError: `enabled` is not a bool.

    Example:
      >>> import phalanx
      >>> phalanx.keras.set_cpu_kernels(False)
      >>> phalanx.keras.set_cpu_kernels(True)
    """
    settings.cpu_kernels = arguments.flag("enabled", enabled)


def _is_for(x: Any, *arrays: Any) -> bool:
    """Returns whether `x` is computed by a traced step for CPUs, in a scope, and all arrays are floats."""
    if not (settings.cpu_kernels and isinstance(x, jax.core.Tracer) and context.has_strategy()):
        return False
    topology = context.current().strategy.topology
    devices = topology.devices if topology.has_devices else ()
    is_whole = not topology.has_devices or topology.devices_per_replica == 1
    return (
        is_whole
        and platforms.are_cpus(devices)
        and all(jnp.issubdtype(one.dtype, jnp.floating) for one in (x, *arrays))
    )


def _pooling(kernel: Callable[[jax.Array, Windows], jax.Array]) -> Callable[..., Any]:
    def pool(
        original: Callable[..., Any],
        inputs: PyTree,
        pool_size: PyTree,
        strides: PyTree = None,
        padding: str = "valid",
        data_format: str | None = None,
    ) -> Any:
        strides = pool_size if strides is None else strides
        # What Keras refuses is left to it.
        if _is_for(inputs) and padding in ("same", "valid") and 0 not in _per_dim(strides, inputs.ndim - 2):
            rank = inputs.ndim - 2
            dims = range(2, 2 + rank) if compat.is_channels_first(data_format) else range(1, 1 + rank)
            sizes = _per_dim(pool_size, rank)
            windows = Windows.over(inputs.shape, dims, sizes, _per_dim(strides, rank), padding)
            if math.prod(sizes) <= _MOST_PLACES and all(n > 0 for n in windows.counts(inputs.shape)):
                return kernel(inputs, windows)
        return original(inputs, pool_size, strides, padding, data_format)

    return pool


def _convolving(kernel_of: Callable[[jax.Array, jax.Array, Windows], jax.Array | None]) -> Callable[..., Any]:
    def convolve(
        original: Callable[..., Any],
        inputs: PyTree,
        kernel: PyTree,
        strides: PyTree = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: PyTree = 1,
    ) -> Any:
        operands = _windows(inputs, kernel, strides, padding, data_format, dilation_rate)
        result = None
        # Fewer channels in the kernel than in the inputs stand for groups, which no kernel here has.
        if operands is not None and inputs.shape[-1] == kernel.shape[-2] and kernel.shape[-1]:
            result = kernel_of(*operands)
        return original(inputs, kernel, strides, padding, data_format, dilation_rate) if result is None else result

    return convolve


def _convolution(x: jax.Array, kernel: jax.Array, windows: Windows) -> jax.Array | None:
    """Returns a convolution, or None if XLA's convolution is not slower."""
    if math.prod(windows.sizes) == 1:
        return convolution.pointwise(x, kernel, windows.strides)
    patches = x.shape[0] * math.prod(windows.counts(x.shape)) * math.prod(kernel.shape[:-1])
    is_unpadded = not any(map(any, windows.padding))
    is_slow = is_unpadded or max(windows.strides) > 1 or x.shape[-1] <= _FEW_CHANNELS
    return convolution.convolution(x, kernel, windows) if is_slow and patches <= _MOST_PATCHES else None


def _depthwise(x: jax.Array, kernel: jax.Array, windows: Windows) -> jax.Array | None:
    """Returns a convolution that keeps channels apart, or None if its windows are too large."""
    return convolution.depthwise(x, kernel, windows) if math.prod(windows.sizes) <= _MOST_PLACES else None


def _transposed(
    original: Callable[..., Any],
    inputs: PyTree,
    kernel: PyTree,
    strides: PyTree = 1,
    padding: str = "valid",
    output_padding: PyTree = None,
    data_format: str | None = None,
    dilation_rate: PyTree = 1,
) -> Any:
    operands = _windows(inputs, kernel, strides, padding, data_format, dilation_rate)
    if operands is not None and inputs.shape[-1] == kernel.shape[-1]:
        x, weights, windows = operands
        if math.prod(x.shape[:-1]) * math.prod(kernel.shape[:-1]) <= _MOST_PRODUCTS:
            pads = compat.transposed_padding(x.shape, kernel.shape, strides, padding, output_padding, dilation_rate)
            # Keras stores the kernel of the forward convolution, whose transpose this is.
            backwards = jnp.flip(weights, tuple(range(x.ndim - 2))).swapaxes(-1, -2)
            return convolution.transposed(x, backwards, windows.strides, tuple(map(tuple, pads)))
    return original(inputs, kernel, strides, padding, output_padding, data_format, dilation_rate)


def _gelu(original: Callable[..., Any], x: PyTree, approximate: bool = True) -> Any:
    # The approximation needs no `erfc`, which is what is slow.
    if not approximate and _is_for(x) and x.dtype == jnp.float32:
        return activation.gelu(x)
    return original(x, approximate)


def _windows(
    inputs: Any, kernel: Any, strides: Any, padding: str, data_format: str | None, dilation_rate: Any
) -> tuple[Any, Any, Windows] | None:
    """Returns inputs and kernel as arrays, and the windows of a convolution; None if there is no kernel for it here."""
    if padding not in ("same", "valid") or compat.is_channels_first(data_format):
        return None
    if not isinstance(inputs, jax.Array) or any(rate != 1 for rate in _per_dim(dilation_rate, inputs.ndim - 2)):
        return None
    weights = compat.to_tensor(kernel)
    # As Keras does: the kernel decides the dtype.
    x = compat.to_tensor(inputs, dtype=weights.dtype)
    if not _is_for(x, weights):
        return None
    rank = x.ndim - 2
    windows = Windows.over(x.shape, range(1, 1 + rank), weights.shape[:rank], _per_dim(strides, rank), padding)
    return (x, weights, windows) if all(n > 0 for n in windows.counts(x.shape)) else None


def _per_dim(value: PyTree, rank: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank


def _normalized(original: Callable[..., Any], layer: keras.Layer, inputs: PyTree) -> Any:
    # Behind a residual connection, XLA would add all gradients since the last layer again in each operation that reads their
    # sum: with four blocks, a quarter of the step. The barrier also stands in the gradient, where the sum is then stored.
    return original(layer, optimization_barrier(inputs) if _is_for(inputs) else inputs)


compat.extend(keras.layers.LayerNormalization, "call")(_normalized)
compat.extend(keras.layers.RMSNormalization, "call")(_normalized)
compat.extend_backend("nn.gelu", _gelu)
compat.extend_backend("nn.max_pool", _pooling(pooling.max_pool))
compat.extend_backend("nn.average_pool", _pooling(pooling.average_pool))
compat.extend_backend("nn.conv", _convolving(_convolution))
compat.extend_backend("nn.depthwise_conv", _convolving(_depthwise))
compat.extend_backend("nn.conv_transpose", _transposed)
