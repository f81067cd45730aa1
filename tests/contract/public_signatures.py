"""Prints every public name with its signature, one per line: what a program may depend on.

`public_signatures.txt` is what this prints for commit e16423c, in which the whole engine still was public by its paths:

    git archive e16423c src | tar -x -C FOLDER
    PYTHONPATH=FOLDER/src python tests/contract/public_signatures.py > tests/contract/public_signatures.txt

A parameter is written as `name` or `name=default`: with `/` before it if it has no keyword, with `--` if it has no position.
"""

import enum
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MARKS = {
    inspect.Parameter.POSITIONAL_ONLY: "/",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "--",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def signatures() -> dict[str, str]:
    """Returns what each public name is: a module, a value, a property, an enumeration, or a call with its parameters."""
    names = runpy.run_path(str(DOCS / "public_names.py"))["public_names"]()
    table = {path: _text_of(path, value) for path, value in names.items()}
    for path, value in names.items():
        if inspect.isclass(value):
            table |= {f"{path}.{name}": text for name, text in _members(value)}
    return dict(sorted(table.items()))


def _members(owner: type) -> Iterator[tuple[str, str]]:
    """Yields what Phalanx defines in a class. What a class inherits from Keras or Python may change with them."""
    for name in dir(owner):
        definer = next((base for base in owner.__mro__ if name in vars(base)), owner)
        if definer.__module__.startswith("phalanx") and (name == "__call__" or not name.startswith("_")):
            yield name, _text_of(name, getattr(owner, name))


def _text_of(path: str, value: object) -> str:
    if inspect.ismodule(value):
        return "module" if value.__name__ == path else "module of another path"
    if isinstance(value, property):
        return "property"
    if isinstance(value, enum.EnumType):
        return "enumeration"  # The signature of its call is Python's, and differs between versions.
    if not callable(value):
        return "value"
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # Before Python 3.13 exceptions have no signature unless they define a constructor.
        return "call *args"
    return " ".join(["call", *(_text_of_parameter(parameter) for parameter in parameters)])


def _text_of_parameter(parameter: inspect.Parameter) -> str:
    name = MARKS[parameter.kind] + parameter.name
    if parameter.default is inspect.Parameter.empty:
        return name
    # Neither the address of a default nor the module that defines it is part of the signature.
    default = re.sub(r" at 0x\w+|phalanx\.(?:\w+\.)*", "", repr(parameter.default))
    return f"{name}={default.replace(' ', '')}"


if __name__ == "__main__":
    print("\n".join(f"{path}: {text}" for path, text in signatures().items()))
