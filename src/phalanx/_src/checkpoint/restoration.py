# SPDX-License-Identifier: Apache-2.0
"""Matches the objects of a program with the contents of a checkpoint: when saving, when restoring, and when objects get variables later."""

import difflib
import functools
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from phalanx._src import compat
from phalanx._src.checkpoint.objects import (
    REPLICAS,
    Flat,
    Part,
    Snapshot,
    flatten,
    part_of,
    parts_of,
    refuse_object,
    under,
)
from phalanx._src.checkpoint.store import CheckpointFile
from phalanx._src.compat import Variable
from phalanx._src.programs.identity import IdentityMap
from phalanx.errors import CheckpointMismatchError, InputError, PhalanxError

_OPEN: "list[Restoration]" = []
"""Restorations for which objects may still get variables. They do not keep these objects alive."""


class Holder:
    """An object whose public attributes are saved. The attributes of its `_root` are saved as its own."""

    _root: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # A checkpoint that was restored before may contain the new attribute.
        for restoration in list(_OPEN):
            restoration.hear(self)

    def _names(self) -> list[str]:
        """Returns the names of the attributes."""
        return sorted(name for name in vars(self) if not name.startswith("_"))


class _Child(NamedTuple):
    """A value below an object.

    Args:
      name: its path below the object.
      value: the value.
      replace: puts another value in its place. None if the value cannot be replaced.
    """

    name: str
    value: Any
    replace: Callable[[Any], None] | None


def _is_owner(value: object) -> bool:
    return isinstance(value, (Holder, *compat.OWNERS))


def _children(owner: Any) -> Iterator[_Child]:
    """Yields what is saved below an object."""
    if not isinstance(owner, Holder):
        yield from (_Child(name, value, None) for name, value in parts_of(owner))
        return
    met: set[int] = set()
    if owner._root is not None:
        yield from _items("", owner._root, functools.partial(setattr, owner, "_root"), met)
    for name in owner._names():
        yield from _items(name, getattr(owner, name), functools.partial(setattr, owner, name), met)


def _items(name: str, value: Any, replace: Callable[[Any], None], met: set[int]) -> Iterator[_Child]:
    try:
        flat = flatten(value, met)
    except RecursionError as e:
        raise refuse_object(name, value, TypeError("it contains itself")) from e
    items = [item for _, item in flat.items]
    for i, (path, item) in enumerate(flat.items):
        yield _Child(under(name, path), item, _replacing(flat, items, i, replace))


def _replacing(flat: Flat, items: list[Any], index: int, replace: Callable[[Any], None]) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is not items[index]:
            items[index] = value
            replace(flat.join(list(items)))

    return put


def capture(objects: Holder, snapshot: Snapshot) -> None:
    """Copies all objects into a snapshot. An object with several paths is saved once, under its shortest path.

    Raises:
      CheckpointError: an object cannot be saved.
    """
    paths: IdentityMap[str] = IdentityMap()
    paths[objects] = ""
    waiting: deque[tuple[Any, str]] = deque([(objects, "")])
    while waiting:
        owner, place = waiting.popleft()
        for name, value, _ in _children(owner):
            path = under(place, name)
            is_owner, is_variable = _is_owner(value), isinstance(value, Variable)
            if is_owner or is_variable:
                first = paths.get(value)
                if first is not None:
                    snapshot.aliases[path] = first
                    continue
                paths[value] = path
            if is_owner:
                waiting.append((value, path))
                if owner is objects and isinstance(value, keras.Model) and (architecture := _architecture(value)):
                    snapshot.models[path] = architecture
                continue
            part = part_of(value)
            if part is None:
                raise refuse_object(path, value)
            try:
                part.save(path, snapshot)
            except PhalanxError:
                raise
            except (TypeError, ValueError) as e:
                raise refuse_object(path, value, e) from e


_architectures: "weakref.WeakKeyDictionary[keras.Model, str]" = weakref.WeakKeyDictionary()


def _architecture(model: keras.Model) -> str | None:
    """Returns the configuration of a model as JSON, without its optimizer. None if the model has none, or no variables yet."""
    if not model.built:
        return None
    if model not in _architectures:
        try:
            config = json.loads(model.to_json())
        except Exception:
            # Whatever `get_config` of a model raises, its variables can be saved.
            config = None
        _architectures[model] = "" if config is None else json.dumps(config | {"compile_config": None})
    return _architectures[model] or None


class Restoration:
    """Restores a checkpoint into objects, also into variables that they get later.

    Args:
      objects: the objects.
      stored: the checkpoint.
      without: a Keras object among them that stays as it is, with all that it consists of. None for none.

    Raises:
      CheckpointMismatchError: a variable or array has another shape or dtype in the checkpoint. Nothing was restored.
    """

    def __init__(self, objects: Holder, stored: CheckpointFile, without: object | None = None) -> None:
        self._objects, self.stored = weakref.ref(objects), stored
        self._without = None if without is None else weakref.ref(without)
        values: dict[str, Any] = stored.notes["values"]
        self._contents = {name.removesuffix(REPLICAS) for name in stored.names} | set(values)
        self._folders = {
            "",
            *(name.rsplit("/", i)[0] for name in self._contents for i in range(1, name.count("/") + 1)),
        }
        self._places: IdentityMap[str] = IdentityMap()
        self._used: set[str] = set()
        self._resume([(objects, "")])
        if self.unused():
            _OPEN.append(self)

    def _resume(self, start: list[tuple[Any, str]]) -> None:
        """Restores the values below the objects of `start` that were not restored yet."""
        matches, problems = [], []
        for path, child in self._values(start):
            part = None if path in self._used else part_of(child.value)
            if part is None:
                continue
            try:
                names = part.find(path, self.stored)
            except ValueError as e:
                problems.append(f"{path}: {e}")
                continue
            if names:
                matches.append((part, path, names, child.replace))
        problems += self._one_for_several([(part, path) for part, path, *_ in matches])
        if problems:
            raise self._refuse(problems)
        for part, path, names, replace in matches:
            self._restore(part, path, names, replace)

    def _one_for_several(self, matches: list[tuple[Part, str]]) -> list[str]:
        """Returns a problem for each object of the program that has several paths with different values in the checkpoint."""
        first: dict[int, str] = {}
        problems = []
        for part, path in matches:
            other = path if part.changes is None else first.setdefault(id(part.changes), path)
            if other != path and self._contents_of(other) != self._contents_of(path):
                problems.append(f"{other} and {path} are one object, and have different values in the checkpoint")
        return problems

    def _contents_of(self, path: str) -> tuple[str, list[bytes]]:
        """Returns everything that a checkpoint contains for one value, for comparison."""
        names = [n for n in self.stored.names if n == path or n.startswith((path + REPLICAS, f"{path}#"))]
        value = json.dumps(self.stored.notes["values"].get(path))
        return value.replace(json.dumps(path)[1:-1] + "#", "#"), [self.stored.array(n).tobytes() for n in sorted(names)]

    def _restore(self, part: Part, path: str, names: set[str], replace: Callable[[Any], None] | None) -> None:
        try:
            is_done, value = part.restore(path, self.stored)
        except InputError as e:  # The position of an iterator over other data.
            raise CheckpointMismatchError(
                f"the checkpoint {self.stored.file}",
                f"{path} does not fit this program: {e.found}",
                "use the data and the batch size of the program that saved it; or delete the checkpoint, to begin again",
            ) from e
        if is_done:
            self._used |= {path, *names}
            if replace is not None:
                replace(value)

    def resume(self) -> None:
        """Restores what became possible since the last call."""
        self._resume(self._places.items())

    def hear(self, owner: Any) -> None:
        """Restores the new variables of a Keras object."""
        place = self._places.get(owner)
        try:
            self._resume(self._places.items() if place is None else [(owner, place)])
        except PhalanxError:
            # It would fail again whenever another object gets a variable. After Ctrl-C it may still succeed.
            self._close()
            raise
        if not (self._places.items() and self.unused()):
            self._close()

    def _close(self) -> None:
        """Stops waiting for new variables. `hear` may have been called within `hear`, and have done it already."""
        if self in _OPEN:
            _OPEN.remove(self)

    def unused(self) -> list[str]:
        """Returns the values of the checkpoint that no object has received."""
        return sorted(self._contents - {name.removesuffix(REPLICAS) for name in self._used})

    def missing(self) -> list[str]:
        """Returns the paths of values in this program that were not restored."""
        values = self._values([(self._objects(), "")], everywhere=True)
        return [path for path, _ in values if path not in self._used]

    def _values(self, start: list[tuple[Any, str]], *, everywhere: bool = False) -> Iterator[tuple[str, _Child]]:
        """Yields the values below some objects, with their paths in the checkpoint, and notes the places of the objects.

        Args:
          start: objects and their paths in the checkpoint.
          everywhere: also the values below objects that the checkpoint does not contain.
        """
        waiting, seen = deque(start), set()
        while waiting:
            owner, place = waiting.popleft()
            is_stored = place in self._folders
            if id(owner) in seen or not (is_stored or everywhere):
                continue
            seen.add(id(owner))
            if is_stored:
                self._places[owner] = place
            for child in _children(owner):
                path = under(place, child.name)
                path = self.stored.notes["aliases"].get(path, path)
                if _is_owner(child.value):
                    if self._without is None or child.value is not self._without():
                        waiting.append((child.value, path))
                else:
                    yield path, child

    @property
    def matched(self) -> bool:
        """Whether anything was restored."""
        return bool(self._used)

    def _refuse(self, problems: list[str]) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"the checkpoint {self.stored.file}",
            f"it does not fit the objects of this program: {_listed(problems)}. Nothing was restored.",
            "create the objects as in the program that saved the checkpoint",
        )


def _listed(names: list[str], most: int = 5) -> str:
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")


def with_nearest(names: list[str], candidates: list[str]) -> str:
    """Returns names for a message, each with the most similar of `candidates`."""
    shown = []
    for name in names[:5]:
        near = difflib.get_close_matches(name, candidates, n=1)
        shown.append(f"{name} (nearest: {near[0]})" if near else name)
    return ", ".join(shown) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


@compat.on_growth
def _hear(owner: Any) -> None:
    for restoration in list(_OPEN):
        restoration.hear(owner)
