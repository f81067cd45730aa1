# SPDX-License-Identifier: Apache-2.0
"""Typed messages: instances of frozen dataclasses, each of which is a line of JSON with the name of its class.

The values of a message are restored and checked by the annotations of its fields. Uses the standard library only.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints


@dataclass_transform(frozen_default=True)
class Message:
    """A message from one process to another. Its classes become frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class SignOfLife(Message):
    """The sender is alive. A child process sends it, which knows nothing more. See `Pulse`."""


M = TypeVar("M", bound=Message)
T = TypeVar("T")


def encoded(message: Message | Mapping[str, object]) -> bytes:
    """Returns a message as it is sent: a line of JSON."""
    return json.dumps(message, default=lambda x: {"kind": type(x).__name__, **vars(x)}).encode() + b"\n"


def decoded(line: bytes, kinds: Iterable[type[M]]) -> M | SignOfLife:
    """Returns the message of one of these classes that another process has sent. One of another class is a sign of life.

    Raises:
      RecursionError: the line has too many brackets.
      TypeError: a message of one of these classes has other fields, or values of other types.
      ValueError: the line is no JSON object, or a tuple in it has another length.
    """
    if not isinstance(fields := json.loads(line), dict):
        raise ValueError(f"{line[:40]!r} is no JSON object")
    # A process of another version must not end this one.
    kind: type = next((kind for kind in kinds if kind.__name__ == fields.get("kind")), SignOfLife)
    return SignOfLife() if kind is SignOfLife else _reader(kind)(fields)


def parsed(text: bytes) -> dict[str, Any]:
    """Returns a JSON object, or an empty dict if the text is none."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # Half a surrogate pair is a string of JSON, and no text.
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns a function from what JSON has made of a value of the type `kind` to that value.

    Functions, because rank 0 of a large cluster reads thousands of messages per second: to look at the types each time takes most of that.
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        readers = {each.__name__: _reader(each) for each in kinds}
        rest = next(read for name, read in readers.items() if name != "NoneType")
        return lambda x: readers.get("NoneType" if x is None else f"{isinstance(x, dict) and x.get('kind')}", rest)(x)
    if isinstance(kind, type) and is_dataclass(kind):
        fields = {name: _reader(each) for name, each in get_type_hints(kind).items()}
        # The constructor refuses fields that it does not have.
        return lambda x: kind(
            **{n: fields[n](y) if n in fields else y for n, y in _checked(x, dict).items() if n != "kind"}
        )
    if origin is list or (origin is tuple and kinds[-1] is Ellipsis):
        read = _reader(kinds[0])
        return lambda x: origin(map(read, _checked(x, list)))
    if origin is tuple:
        parts = [_reader(each) for each in kinds]
        return lambda x: tuple([read(y) for read, y in zip(parts, _checked(x, list), strict=True)])
    # Other programs than Python write a float without a fraction as an integer.
    types = (float, int) if kind is float else origin or kind
    return lambda x: x if type(x) is kind else _checked(x, types)


def _checked(value: T, kind: type | tuple[type, ...]) -> T:
    # Python's bools are integers.
    if isinstance(value, kind) and (type(value) is not bool or kind is bool):
        return value
    raise TypeError(f"{value!r:.40} in a message is no {kind}")
