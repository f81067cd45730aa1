# SPDX-License-Identifier: Apache-2.0
"""Checks for arguments that many public functions take. Each check returns the argument or raises an error that explains it.

Standard library only.
"""

import collections.abc
import contextlib
import functools
import importlib
import inspect
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from phalanx.errors import InvalidArgumentError, MissingDependencyError, PhalanxError, shown
from phalanx.typing import PyTree

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MOST_DIGITS = 18


def integer(
    name: str,
    value: object,
    *,
    least: int = 1,
    most: float = math.inf,
    kind: str | None = None,
    hint: str | None = None,
    error: type[InvalidArgumentError] = InvalidArgumentError,
) -> int:
    """Returns `value` as an int.

    Args:
      name: name of the argument.
      value: an int, or an object that Python accepts as an index, such as a NumPy integer. A bool is rejected.
      least: smallest allowed value.
      most: largest allowed value.
      kind: description of the allowed values, for the message.
      hint: what to write instead.
      error: class of the error to raise.

    Raises:
      InvalidArgumentError: `value` is not an integer, or is outside the range from `least` to `most`.

    Example:
      >>> integer("steps", 3)
      3
    """
    if not is_integer(value, least, most):
        kind = kind or ("a positive integer" if least == 1 else f"{least} or more, and an integer")
        raise error(f"{name}={shown(value)}", f"must be {kind}.", f"{name}={least}" if hint is None else hint)
    return operator.index(value)


def is_number(text: str) -> bool:
    """Returns whether a text is a number of digits. It has at most 18, because others chose it: Python takes long for thousands.

    Example:
      >>> is_number("8888"), is_number("-1"), is_number("9" * 5000)
      (True, False, False)
    """
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Returns whether `value` is an integer from `least` to `most`. A bool is not.

    Args:
      value: an int, or an object that Python accepts as an index, such as a NumPy integer.
      least: smallest allowed value.
      most: largest allowed value.

    Example:
      >>> is_integer(3, least=1), is_integer(True), is_integer(2.0)
      (True, False, False)
    """
    try:
        return not isinstance(value, bool) and least <= operator.index(value) <= most  # type: ignore[arg-type]
    except Exception:  # JAX alone raises three kinds of error: for traced, deleted and multi-element arrays.
        return False


def seconds(name: str, value: Any, *, hint: str | None = None) -> float | None:
    """Returns `value`, a time in seconds or None.

    Raises:
      InvalidArgumentError: `value` is neither None nor a finite number above 0.
    """
    if value is None:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # Also a number of NumPy.
    # `math.isfinite` would overflow on a large int such as 2**4000; a comparison does not.
    if not is_number or not 0 < value < math.inf:
        raise InvalidArgumentError(
            f"{name}={shown(value)}", "must be more than 0 seconds, or None.", hint or f"{name}=60"
        )
    return value  # type: ignore[no-any-return]


def flag(name: str, value: object, *, hint: bool = True) -> bool:
    """Returns `value`, a bool. The HINT shows `hint`.

    Raises:
      InvalidArgumentError: `value` is not a bool.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be True or False.", f"{name}={hint}")
    return value


def function(name: str, value: T, hint: str) -> T:
    """Returns `value`, a callable.

    Raises:
      InvalidArgumentError: `value` is not callable.
    """
    if not callable(value):
        raise InvalidArgumentError(f"{name}={shown(value)}", "is not callable.", hint)
    return value


def local_path(name: str, value: object, hint: str | None = None) -> str:
    """Returns a path of this machine's file system as a string.

    Raises:
      InvalidArgumentError: `value` is not a path, or one of a store, of which Python would make a folder such as `gs:` here.
    """
    text = path(name, value, hint)
    if "://" in text:
        problem = (
            "is a folder of a store, but must be one of a file system. Checkpoint and CheckpointManager take both."
        )
        raise InvalidArgumentError(f"{name}={shown(value)}", problem, hint or f'{name}="folder/name"')
    return text


def path(name: str, value: object, hint: str | None = None) -> str:
    """Returns a path as a string.

    Raises:
      InvalidArgumentError: `value` is not a path. Integers are rejected because Python takes them for open file descriptors.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    with contextlib.suppress(UnicodeEncodeError):  # Half a character of UTF-16 is in no name of a file.
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    raise InvalidArgumentError(f"{name}={shown(value)}", "must be a path.", hint or f'{name}="folder/name"')


PICTURES = (".png", ".svg", ".pdf")
"""Endings of the names of pictures."""


def json_or_picture(name: str, value: object, hint: str) -> Path:
    """Returns the path of a file for results.

    Raises:
      InvalidArgumentError: the file type is not supported, the folder does not exist, or something that is not a file has the name.
      MissingDependencyError: the file is a picture, and matplotlib is not installed.
    """
    file = Path(path(name, value, hint))
    called = f"{name}={str(file)!r}"
    if file.suffix not in (".json", *PICTURES):
        raise InvalidArgumentError(called, "must end with .json, .png, .svg or .pdf.", hint)
    if not os.path.isdir(file.parent):
        raise InvalidArgumentError(called, "its folder does not exist.", f"mkdir -p {file.parent}")
    # Another user may have put a link there, through which this process would overwrite another file.
    if os.path.lexists(file) and (os.path.islink(file) or not os.path.isfile(file)):
        raise InvalidArgumentError(called, "it is a link, a folder, a device or a pipe.", hint)
    if file.suffix in PICTURES:
        try:
            # Before the results exist, because computing them takes minutes.
            importlib.import_module("matplotlib.figure")
        except ImportError as e:
            words = "the package matplotlib is not installed."
            raise MissingDependencyError(called, words, "pip install matplotlib") from e
    return file


def instance(name: str, value: object, kind: type[T], hint: str) -> T:
    """Returns `value`, an instance of `kind`.

    Raises:
      InvalidArgumentError: `value` is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        article = "" if kind.__name__.endswith("s") else "an " if kind.__name__[0] in "AEIO" else "a "
        raise InvalidArgumentError(f"{name}={shown(value)}", f"must be {article}{kind.__name__}.", hint)
    return value


def of_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional arguments as a tuple and keyword arguments as a dict.

    Raises:
      InvalidArgumentError: `args` is neither a list nor a tuple, or `kwargs` is neither a dict with string keys nor None.
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
    """Returns a decorator that makes a function or class raise `error` if an argument does not match its annotation.

    Use it on functions that are called rarely, because every call is checked. It understands classes, the types listed in
    `_NAMES`, and unions, lists and dicts of these. Any other annotation accepts all values.

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
            # The class itself is returned, so that `isinstance` and subclasses work.
            fn.__init__ = decorate(fn.__init__)  # type: ignore[misc]
            return fn
        signature = inspect.signature(fn)

        @functools.cache
        def hints() -> dict[str, Any]:
            # At the first call, because an annotation may name a class that its module defines later.
            return typing.get_type_hints(fn)

        @functools.wraps(fn)
        def checked(*args: object, **kwargs: object) -> PyTree:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return fn(*args, **kwargs)  # Python's own message for a call that does not match the signature.
            for name, value in arguments.items():
                kind = signature.parameters[name].kind
                if name in hints() and kind in (
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    inspect.Parameter.KEYWORD_ONLY,
                ):
                    _check(error, signature.parameters[name], hints()[name], value)
            return fn(*args, **kwargs)

        return typing.cast(F, checked)

    return decorate


def _check(error: type[PhalanxError], parameter: inspect.Parameter, hint: object, value: object) -> None:
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


def _alternatives(hint: object) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    name = _NAMES.get(origin) or f"{'an' if origin.__name__[0] in 'AEIO' else 'a'} {origin.__name__}"
    parts = [getattr(part, "__name__", "") for part in typing.get_args(kind)] if name in ("a dict", "a list") else []
    return f"{name} of {' to '.join(parts)}" if parts and all(parts) else name


def _fits(value: object, hint: object) -> bool:
    return any(_is_one(value, kind) for kind in _alternatives(hint))


def _is_one(value: object, kind: object) -> bool:
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
