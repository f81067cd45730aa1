# SPDX-License-Identifier: Apache-2.0
"""Typed messages: instances of frozen dataclasses, each of which is a line of JSON with the name of its class.

The values of a message are restored and checked by the annotations of its fields. Uses the standard library only.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints


@dataclass_transform(frozen_default=True)
class Message:
    """What a process tells another one. Its classes become frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class SignOfLife(Message):
    """The sender is alive. A child process sends it, which knows nothing more. See `Pulse`."""


M = TypeVar("M", bound=Message)


def encoded(message: Message | Mapping[str, object]) -> bytes:
    """Returns a message as it is sent: a line of JSON."""
    return json.dumps(message, default=lambda x: {"kind": type(x).__name__, **vars(x)}).encode() + b"\n"


def decoded(line: bytes, kinds: Iterable[type[M]]) -> M | SignOfLife:
    """Returns the message of one of these classes that another process has sent. One of another class is a sign of life.

    Raises:
      RecursionError: the line has too many brackets.
      TypeError: a message of one of these classes has other fields, or values of other types.
      ValueError: the line is no JSON object.
    """
    if not isinstance(fields := json.loads(line), dict):
        raise ValueError(f"{line[:40]!r} is no JSON object")
    # A process of another version must not end this one.
    kind = next((kind for kind in kinds if kind.__name__ == fields.get("kind")), SignOfLife)
    return SignOfLife() if kind is SignOfLife else _restored(kind, fields)


def parsed(text: bytes) -> dict[str, Any]:
    """Returns a JSON object, or an empty dict if the text is none."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # Half a surrogate pair is a string of JSON, and no text.
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_hints = functools.cache(get_type_hints)


def _restored(kind: Any, value: Any) -> Any:
    """Returns a value of the type `kind`, of which JSON has made this one."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in kinds:
            return None
        rest = [each for each in kinds if each is not NoneType]
        named = [each for each in rest if isinstance(value, dict) and each.__name__ == value.get("kind")]
        return _restored((named or rest)[0], value)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        # The constructor refuses fields that it does not have.
        types = _hints(kind)
        return kind(**{name: _restored(types.get(name, type(x)), x) for name, x in value.items() if name != "kind"})
    if origin in (list, tuple) and isinstance(value, list):
        of_each = kinds if origin is tuple and kinds[-1] is not Ellipsis else kinds[:1] * len(value)
        if len(of_each) == len(value):
            return origin(map(_restored, of_each, value))
    # JSON writes a float without a fraction as it is, but other programs write it as an int. A bool is no number.
    elif type(value) is kind or (kind is float and type(value) is int) or (origin and isinstance(value, origin)):
        return value
    raise TypeError(f"{value!r:.40} in a message is no {kind}")
