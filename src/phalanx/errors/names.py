# SPDX-License-Identifier: Apache-2.0
"""Suggests the name that was probably meant, when a public module does not have a name."""

import difflib
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NoReturn

_NOTHING: Mapping[str, str] = MappingProxyType({})


def suggest_names(module: str, instead: Mapping[str, str] = _NOTHING) -> None:
    """Makes the error for a missing name of a module show what to write instead. The module calls it in its last line.

    It sets the function `__getattr__` of the module. If the module defined that function itself, type checkers would accept any name.

    Args:
      module: name of the module.
      instead: what to write instead of names that other libraries have. For all other names, it is the nearest name.
    """
    names = vars(sys.modules[module])

    def refuse(name: str) -> NoReturn:
        # Python itself asks for names such as `__path__`.
        meant = "" if name.startswith("__") else instead.get(name) or nearest(name, module, names.get("__all__", names))
        raise no_such_name(module, name, meant)

    names["__getattr__"] = refuse


def no_such_name(module: str, name: str, meant: str) -> AttributeError:
    """Returns the error for a name that a module does not have, with a hint if `meant` is not empty."""
    hint = f"\nHINT: {meant}" if meant else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)


def nearest(name: str, module: str, names: Iterable[str]) -> str:
    """Returns the one of some names of a module that is spelt like `name`, with the module, or an empty text."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"{module}.{matches[0]}" if matches else ""
