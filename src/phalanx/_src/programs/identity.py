# SPDX-License-Identifier: Apache-2.0
"""A weak map by identity, for objects that compare by value or have no hash."""

import functools
import weakref
from collections.abc import Callable, KeysView
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityMap(Generic[T]):
    """A map from objects, compared by identity, to items. An item is dropped when its object is.

    Keras variables and JAX arrays compare by value, and models of users may: none of them can be the key of a dict. An object
    that weak references cannot point to is kept alive.

    Example:
      >>> import keras
      >>> seen, v = IdentityMap(), keras.Variable(1.0)
      >>> seen[v] = "yes"
      >>> seen.get(v)
      'yes'
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[Callable[[], Any], T]] = {}

    def __setitem__(self, owner: object, item: T) -> None:
        key = id(owner)
        if key in self._items:
            self._items[key] = (self._items[key][0], item)
            return
        try:
            # `dict.pop` itself, not a Python function: Python ignores what a signal handler raises in a callback.
            self._items[key] = (weakref.ref(owner, functools.partial(self._items.pop, key)), item)
        except TypeError:
            self._items[key] = (lambda: owner, item)

    def __len__(self) -> int:
        return len(self._items)

    def get(self, owner: object) -> T | None:
        """Returns the item of `owner`, or None."""
        entry = self._items.get(id(owner))
        return entry[1] if entry else None

    def items(self) -> list[tuple[Any, T]]:
        """Returns the objects that still exist, and their items."""
        # From a copy, because the garbage collector may drop an item between two iterations.
        pairs = [(reference(), item) for reference, item in list(self._items.values())]
        return [(owner, item) for owner, item in pairs if owner is not None]

    def ids(self) -> KeysView[int]:
        """Returns the identities of the objects, for loops that have no time for a call per object."""
        return self._items.keys()

    def discard(self, owner: object) -> None:
        """Drops the item of `owner`, if there is one."""
        self._items.pop(id(owner), None)
