"""The public names of Phalanx: what the API reference must contain."""

import importlib
import inspect
from types import ModuleType

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
        for name in names_of(value):
            _add(f"{path}.{name}", getattr(value, name), names)


def names_of(module: ModuleType) -> list[str]:
    """Returns the `__all__` of a module; without one, the public names that it defines itself."""
    defined = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return getattr(module, "__all__", None) or [name for name in defined if not name.startswith("_")]
