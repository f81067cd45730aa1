# SPDX-License-Identifier: Apache-2.0
"""Wraps Keras methods and functions."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from keras.src import backend
from keras.src.backend.common.backend_utils import compute_conv_transpose_padding_args_for_jax

from phalanx.typing import PyTree


def extend(owner: object, name: str) -> Callable[[Callable[..., Any]], None]:
    """Returns a decorator that wraps the method or function `name` of a class or module.

    Args:
      owner: class or module that defines `name`.
      name: name of the method or function.

    Returns:
      A decorator for `wrapper(original, *args, **kwargs)`, which replaces `owner.name`.
    """

    def install(wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: PyTree, **kwargs: PyTree) -> Any:
            return wrapper(original, *args, **kwargs)

        # Keras 3.15 calls `inspect.getfullargspec`, which does not follow the `__wrapped__` that `wraps` sets.
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        setattr(owner, name, method)

    return install


def extend_backend(name: str, wrapper: Callable[..., Any]) -> None:
    """Wraps a function of Keras's JAX backend in `wrapper(original, ...)`. `name` is for example "nn.sigmoid"."""
    module, _, function = name.rpartition(".")
    extend(getattr(backend, module) if module else backend, function)(wrapper)


def is_channels_first(data_format: str | None) -> bool:
    """Returns whether channels come before the spatial dims. None means what `keras.config` says."""
    return bool(backend.standardize_data_format(data_format) == "channels_first")


transposed_padding = compute_conv_transpose_padding_args_for_jax
"""Returns the padding of a transposed convolution for JAX, from shapes, strides, padding, output padding and dilation."""

to_tensor = backend.convert_to_tensor
"""Converts any argument of a Keras operation to an array."""
