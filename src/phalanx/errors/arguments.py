# SPDX-License-Identifier: Apache-2.0
"""The kinds of arguments that many public functions take: each check returns the argument, or raises what is wrong with it.

Standard library only.
"""

import collections.abc
import functools
import inspect
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.errors import InvalidArgumentError, PhalanxError, shown

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def integer(
    name: str,
    value: Any,
    *,
    least: int = 1,
    most: float = math.inf,
    kind: str | None = None,
    hint: str | None = None,
    error: type[InvalidArgumentError] = InvalidArgumentError,
) -> int:
    """Returns `value` as an int.

    Args:
      name: of the argument.
      value: an int, or what Python takes for one, such as an integer of NumPy; bools are none.
      least: the smallest that is allowed.
      most: the largest.
      kind: what it must be, for the message.
      hint: the line to write instead.
      error: what to raise.

    Raises:
      InvalidArgumentError: it is something else, or less than `least`.

    Example:
      >>> integer("steps", 3)
      3
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # Of JAX alone there are three kinds: traced, deleted, of several elements.
        number = None
    if number is None or not least <= number <= most:
        kind = kind or ("a positive integer" if least == 1 else f"{least} or more, and an integer")
        raise error(f"{name}={shown(value)}", f"must be {kind}.", f"{name}={least}" if hint is None else hint)
    return number


def seconds(name: str, value: Any, *, hint: str | None = None) -> float | None:
    """Returns a time in seconds, or None where none is given.

    Raises:
      InvalidArgumentError: it is not a finite number above 0.
    """
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared, for int(1e400) and float(2**4000) have no common type.
    if not is_number or not 0 < value < math.inf:
        raise InvalidArgumentError(
            f"{name}={shown(value)}", "must be more than 0 seconds, or None.", hint or f"{name}=60"
        )
    return value  # type: ignore[no-any-return]


def flag(name: str, value: Any) -> bool:
    """Returns a bool.

    Raises:
      InvalidArgumentError: it is something else.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be True or False.", f"{name}=True")
    return value


def function(name: str, value: T, hint: str) -> T:
    """Returns something that can be called.

    Raises:
      InvalidArgumentError: it cannot.
    """
    if not callable(value):
        raise InvalidArgumentError(f"{name}={shown(value)}", "is not callable.", hint)
    return value


def path(name: str, value: Any) -> str:
    """Returns a path as a string.

    Raises:
      InvalidArgumentError: it is something else. An integer would be a file that is open, such as the output of the process.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(text := os.fspath(value), str):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a path.", f'{name}="folder/name"')
    return text


def instance(name: str, value: Any, kind: type[T], hint: str) -> T:
    """Returns an object of a class.

    Raises:
      InvalidArgumentError: it is something else.
    """
    if not isinstance(value, kind):
        article = "" if kind.__name__.endswith("s") else "an " if kind.__name__[0] in "AEIO" else "a "
        raise InvalidArgumentError(f"{name}={shown(value)}", f"must be {article}{kind.__name__}.", hint)
    return value


def of_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which a function is to be called.

    Raises:
      InvalidArgumentError: `args` is neither a list nor a tuple, or `kwargs` neither a dict of names nor None.
    """
    if not isinstance(args, (list, tuple)):
        raise InvalidArgumentError(
            f"args={shown(args)}", "positional arguments must be a list or a tuple.", "args=(x,)"
        )
    if kwargs is not None and not (isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)):
        raise InvalidArgumentError(
            f"kwargs={shown(kwargs)}", "keyword arguments must be a dict from names to values.", 'kwargs={"x": x}'
        )
    return tuple(args), kwargs or {}


def typed(error: type[PhalanxError] = InvalidArgumentError) -> Callable[[F], F]:
    """Returns a decorator: the function, or class, raises `error` for an argument that is not of its annotated type.

    It is for functions that are called now and then. Of annotations it understands the types that the table below names,
    classes, and unions, lists and dicts of them; everything else fits all values.

    Example:
      >>> @typed()
      ... def wait(timeout_s: float | None = None) -> None: ...
      >>> wait("long")
      Traceback (most recent call last):
      phalanx.errors.InvalidArgumentError: timeout_s='long': must be a number or None.
      HINT: timeout_s=None
    """

    def decorate(fn: F) -> F:
        if isinstance(fn, type):
            fn.__init__ = decorate(fn.__init__)  # type: ignore[misc]
            return fn
        signature = inspect.signature(fn)

        @functools.cache
        def hints() -> dict[str, Any]:
            return typing.get_type_hints(fn)

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return fn(*args, **kwargs)  # What Python says of a call with other names.
            for name, value in given.items():
                kind = signature.parameters[name].kind
                if name in hints() and kind in (
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    inspect.Parameter.KEYWORD_ONLY,
                ):
                    _check(error, signature.parameters[name], hints()[name], value)
            return fn(*args, **kwargs)

        return typing.cast(F, checked)

    return decorate


def _check(error: type[PhalanxError], parameter: inspect.Parameter, hint: Any, value: Any) -> None:
    if _fits(value, hint):
        return
    kinds = _alternatives(hint)
    default = _EXAMPLES.get(kinds[0], "...") if parameter.default is parameter.empty else repr(parameter.default)
    names = [_name(kind) for kind in kinds]
    text = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    raise error(f"{parameter.name}={shown(value)}", f"must be {text}.", f"{parameter.name}={default}")


_NAMES: dict[Any, str] = {
    types.NoneType: "None",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    bytes: "bytes",
    collections.abc.Mapping: "a dict",
    collections.abc.Sequence: "a list",
    collections.abc.Callable: "a function",
}
_EXAMPLES: dict[Any, str] = {bool: "True", int: "1", float: "1.0", str: '"..."'}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    name = _NAMES.get(origin) or f"{'an' if origin.__name__[0] in 'AEIO' else 'a'} {origin.__name__}"
    parts = [getattr(part, "__name__", "") for part in typing.get_args(kind)] if name in ("a dict", "a list") else []
    return f"{name} of {' to '.join(parts)}" if parts and all(parts) else name


def _fits(value: Any, hint: Any) -> bool:
    return any(_is_one(value, kind) for kind in _alternatives(hint))


def _is_one(value: Any, kind: Any) -> bool:
    origin: Any = typing.get_origin(kind) or kind
    parts = typing.get_args(kind)
    if origin is Any or not inspect.isclass(origin):
        return True
    if origin in (int, float):
        number = numbers.Integral if origin is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value)
    if not isinstance(value, origin):
        return False
    elements: Any = value
    if parts and issubclass(origin, collections.abc.Mapping):
        return all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in elements.items())
    if parts and issubclass(origin, collections.abc.Sequence) and origin is not tuple:
        return not isinstance(value, (str, bytes)) and all(_fits(item, parts[0]) for item in elements)
    return True
