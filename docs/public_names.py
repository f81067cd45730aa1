"""The public names of Phalanx: what the API reference must contain."""

import importlib
import inspect

_ROOTS = ("phalanx", "phalanx.testing", "phalanx.typing")


def public_names() -> dict[str, object]:
    """Returns every public name with its object: the names in the `__all__` of the roots, and of the modules among them."""
    names: dict[str, object] = {}
    for root in _ROOTS:
        _add(root, importlib.import_module(root), names)
    return names


def _add(path: str, value: object, names: dict[str, object]) -> None:
    names[path] = value
    if inspect.ismodule(value):
        for name in value.__all__:
            _add(f"{path}.{name}", getattr(value, name), names)
