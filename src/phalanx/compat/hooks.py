# SPDX-License-Identifier: Apache-2.0
"""How a method or function of Keras is replaced by one that calls the original."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from keras.src import backend


def extend(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replaces method or function `name` of a class or module by `wrapper(original, ...)`, which gets all its arguments."""

    def install(wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        # Keras asks for the arguments by name, past what `wraps` does.
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        setattr(owner, name, method)

    return install


def extend_backend(name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a function of Keras's backend, for example "nn.sigmoid", by `wrapper(original, ...)`."""
    module, _, function = name.rpartition(".")
    extend(getattr(backend, module) if module else backend, function)(wrapper)


to_tensor = backend.convert_to_tensor
"""Returns an array for what an operation of Keras takes as one."""
