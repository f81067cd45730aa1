# SPDX-License-Identifier: Apache-2.0
"""The error about an argument that a strategy does not take, but others do."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.errors import CallError, shown

if TYPE_CHECKING:
    from phalanx._src.strategies.base import Strategy


def explaining(init: Callable[..., None], root: type) -> Callable[..., None]:
    """Wraps a constructor so that it explains why it does not take an argument that other strategies take.

    Args:
      init: the constructor.
      root: the base class of all strategies.
    """
    parameters = inspect.signature(init).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(init)
    def explained_init(self: "Strategy", *args: object, **kwargs: object) -> None:
        unknown = () if takes_all else [name for name in kwargs if name not in parameters]
        for name in unknown:
            reason, hint = type(self)._explanation, _suggested(type(self), name, list(parameters), root)
            # Without a suggestion, Python's own error is as good.
            if reason and hint:
                called = f"{type(self).__name__}({name}={shown(kwargs[name])})"
                raise CallError(called, f"it has no argument {name!r}: {reason}", hint)
        init(self, *args, **kwargs)

    return explained_init


def _suggested(cls: "type[Strategy]", name: str, parameters: Sequence[str], root: type) -> str:
    """Returns the line to write instead of an argument that a class does not take, or an empty text."""
    if name in cls._instead:
        return cls._instead[name]
    if near := difflib.get_close_matches(name, parameters, n=1, cutoff=0.7):
        return f"{cls.__name__}({near[0]}=...)"
    if any(_takes(base, name) for base in cls.__mro__[1:]):
        return f"phalanx.{cls.__name__}({name}=...)"  # The class of `phalanx.experimental` has the same name.
    return " or ".join(sorted({f"{other.__name__}({name}=...)" for other in _subclasses(root) if _takes(other, name)}))


def _takes(cls: type, name: str) -> bool:
    """Returns whether a strategy that users create has an argument with several values."""
    if "_explanation" not in vars(cls):
        return False
    parameter = inspect.signature(cls).parameters.get(name)
    return parameter is not None and parameter.annotation is not None


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [*children, *(each for child in children for each in _subclasses(child))]
