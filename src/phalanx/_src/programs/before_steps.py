# SPDX-License-Identifier: Apache-2.0
"""Functions that are called before each step of a custom loop, or before each program. Uses the standard library only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

hooks: list[Callable[[Any], None]] = []
"""Functions of the arguments of a step, of which the last is called before it. Steps look at it, so it is a plain list."""

watchers: list[Callable[[Any], None]] = []
"""Functions that are called before each compiled program runs, of its `programs.program.Call`. Programs look at it, so it is a
plain list."""


@contextmanager
def none() -> Iterator[None]:
    """Returns a context in which nothing is called before steps."""
    saved_hooks = hooks[:]
    hooks.clear()
    try:
        yield
    finally:
        hooks[:] = saved_hooks
