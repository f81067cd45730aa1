# SPDX-License-Identifier: Apache-2.0
"""The names of the objects of a checkpoint: one table, built from the objects.

A name depends only on the program that creates the objects: on arguments of `Checkpoint`, on attributes, on keys, and on the names that
users give their layers. It depends neither on the strategy nor on the numbers in the names that Keras generates. The slots of an
optimizer have the names of the variables that they belong to. Two objects of a program never have one name.
"""

import copy
import functools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import keras

from phalanx._src import compat
from phalanx._src.checkpoint import text
from phalanx._src.checkpoint.objects import part_of, refuse_object
from phalanx._src.compat import Variable
from phalanx._src.mesh.values import PerReplica
from phalanx._src.programs.identity import IdentityMap
from phalanx.errors import CheckpointError
from phalanx.typing import PyTree

# `/` divides steps, `~` numbers, `:` slots, `@` pieces and components, `#` arrays of states, `=` keys that are not text.
_SPECIAL = re.compile("[%/@#~:=\0\ud800-\udfff]")
"""What has a meaning in names, or cannot be written in a file."""


def quoted(name: str) -> str:
    """Returns a text as one step of a name. Other texts give other steps."""
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", name) or "%"  # An empty step would vanish in `under`.


def under(path: str, name: str) -> str:
    """Returns the name of the child `name` of what has the name `path`."""
    return "/".join(filter(None, (path, name)))


def quoted_path(path: str) -> str:
    """Returns the path that Keras has given a variable as a part of a name."""
    return "/".join(map(quoted, path.split("/")))


def numbered(names: Iterable[str]) -> list[str]:
    """Returns names with a number for each that is there already."""
    counts, numbered = Counter[str](), []
    for name in names:
        numbered.append(f"{name}~{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return numbered


def is_numbered(path: str) -> bool:
    """Returns whether the last step of a name is a place among objects of one class or name."""
    return "~" in path.rpartition("/")[2]


def keys_outside(variables: Iterable[Variable]) -> list[str]:
    """Returns keys for the slots of variables that an optimizer in the checkpoint trains, and that are not in the checkpoint themselves."""
    return numbered(":" + quoted_path(v.path) for v in variables)


KeysOf: TypeAlias = Callable[[str, list[Variable], IdentityMap[str]], list[str]]
"""Returns the ends of the names of the slots, after the kind, for the variables that the optimizer at a place trains.

The arguments are the place, the variables, and the names of all variables.
"""


def _own_keys(place: str, variables: list[Variable], paths: IdentityMap[str]) -> list[str]:
    """Returns the keys in a new checkpoint."""
    outside = iter(keys_outside(v for v in variables if paths.get(v) is None))
    return [paths.get(v) or next(outside) for v in variables]


class Naming:
    """The steps of names, in files of the present format."""

    def attribute(self, name: str) -> str:
        """Returns the step of an attribute of a `Checkpoint`."""
        return quoted(name)

    def key(self, key: object) -> str:
        """Returns the step of a key of a dict."""
        return quoted(key) if isinstance(key, str) else "=" + quoted(repr(key))  # 1 and "1" are two keys.

    def items(self, values: Iterable[Any]) -> list[str]:
        """Returns the steps of the items of a list: names of users, numbers among objects of the same class, or positions."""
        values = list(values)
        names = [compat.given_name(v) if isinstance(v, compat.OWNERS) else None for v in values]
        uses, counts = Counter(names), Counter[str]()
        steps = []
        for i, (value, name) in enumerate(zip(values, names, strict=True)):
            if name is not None and uses[name] == 1 and not name.isdigit():  # "3" may be a position.
                steps.append(quoted(name))
            elif isinstance(value, compat.OWNERS):
                kind = quoted(compat.automatic_name(value))
                steps.append(f"{kind}~{counts[kind]}")  # Not a position, because layers of other classes may be added.
                counts[kind] += 1
            else:
                steps.append(str(i))
        return steps

    def variables(self, owner: Any) -> list[str]:
        """Returns the steps of the variables of one object."""
        return numbered(map(quoted, compat.variable_names(owner)))

    def slots(self, place: str, optimizer: Any, keys: dict[int, str]) -> Iterator[tuple[str, compat.OptimizerSlot]]:
        """Yields the variables of an optimizer with their names.

        Args:
          place: the name of the optimizer.
          optimizer: the optimizer.
          keys: see `KeysOf`, by the identity of the variable that is trained.
        """
        # A loss scale lies around an optimizer, and does not change the names of what is in it.
        around = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        whole = under(place, "loss_scale") if around else place
        slots = compat.slots_of(optimizer)
        names = [
            under(whole, quoted(kind)) if trained is None else f"{under(place, quoted(kind))}:{keys[id(trained)]}"
            for kind, trained, _ in slots
        ]
        yield from zip(numbered(names), slots, strict=True)

    def difference(self, place: str, owner: Any) -> str | None:
        """Returns in what an object differs from that at `place` in the file, so that it cannot have its values. None if it does not."""
        return None

    def part(self, owner: Any, name: str) -> str:
        """Returns the step of a part of a Keras object."""
        # A file then fits with and without a loss scale, so that a program can change its dtype policy.
        return (
            "" if isinstance(owner, keras.optimizers.LossScaleOptimizer) and name == "inner_optimizer" else quoted(name)
        )


class NamedValue(NamedTuple):
    """A value and its name.

    Args:
      path: the name.
      value: the value.
      owner: the object whose part it is.
      replace: puts another value in its place. None if the value cannot be replaced.
      slot: the slot of an optimizer whose variable the value is. None for other values.
    """

    path: str
    value: Any
    owner: Any
    replace: Callable[[Any], None] | None
    slot: compat.OptimizerSlot | None = None


class Hears(Protocol):
    """Something that waits for new parts of objects."""

    def hear(self, owner: Any, new: object = None) -> None:
        """Called with an object that has new parts, and with the Keras object that has replaced one of its parts, or None."""


OPEN: list[Hears] = []
"""Restorations for which objects may still get variables. They do not keep these objects alive."""


class Holder:
    """An object whose public attributes are saved. The attributes of its `_root` are saved as its own."""

    _root: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name, value)
        is_replaced = before is not value and is_owner(before) and is_owner(value)
        super().__setattr__(name, value)
        # A checkpoint that was restored before may contain the new attribute.
        # A copy, because `hear` removes a restoration that is complete.
        for restoration in list(OPEN):
            restoration.hear(self, value if is_replaced else None)

    def _names(self) -> list[str]:
        """Returns the names of the attributes."""
        # Sorted: the first name of an object with two attributes must not depend on the order of assignments.
        return sorted(name for name in vars(self) if not name.startswith("_"))


def is_owner(value: object) -> bool:
    """Returns whether a value has a name only through its parts."""
    return isinstance(value, (Holder, *compat.OWNERS))


class Names:
    """The names of all values below some objects.

    Args:
      naming: makes the steps of the names.
      aliases: the names in a file of objects that have several names.
      keys_of: the keys of the slots in a file.

    Attributes:
      paths: the first name of each object and variable.
    """

    def __init__(self, naming: Naming, aliases: dict[str, str] | None = None, keys_of: KeysOf = _own_keys) -> None:
        self._naming, self._aliases = naming, aliases or {}
        self.paths: IdentityMap[str] = IdentityMap()
        self._keys_of = keys_of

    def below(self, start: Iterable[tuple[Any, str]], enter: Callable[[Any, str], bool]) -> Iterator[NamedValue]:
        """Yields objects and values with their names: first the shortest; an object with several names several times.

        Args:
          start: objects and their names.
          enter: says for an object and its name whether to look below it.
        """
        waiting, optimizers = deque(start), []
        while waiting:
            owner, place = waiting.popleft()
            for entry in self._children(owner, place):
                yield self._noted(entry)
                # The file has the parts of an object under its first name only.
                path = self._aliases.get(entry.path, entry.path)
                if is_owner(entry.value) and enter(entry.value, path):
                    waiting.append((entry.value, path))
            if isinstance(owner, compat.BaseOptimizer):
                optimizers.append((owner, place))
        # The names of slots contain the names of all other variables.
        for owner, place in optimizers:
            trained = list({id(v): v for _, v, _ in compat.slots_of(owner) if v is not None}.values())
            keys = dict(zip(map(id, trained), self._keys_of(place, trained, self.paths), strict=True))
            for path, slot in self._naming.slots(place, owner, keys):
                yield self._noted(NamedValue(path, slot.variable, owner, None, slot))

    def _noted(self, entry: "NamedValue") -> "NamedValue":
        """Returns an entry with its name in the file."""
        entry = entry._replace(path=self._aliases.get(entry.path, entry.path))
        if (is_owner(entry.value) or isinstance(entry.value, Variable)) and self.paths.get(entry.value) is None:
            self.paths[entry.value] = entry.path
        return entry

    def _children(self, owner: Any, place: str) -> Iterator[NamedValue]:
        if not isinstance(owner, Holder):
            yield from (NamedValue(under(place, name), value, owner, None) for name, value in self._parts(owner))
            return
        met: set[int] = set()
        if owner._root is not None:
            yield from self._items(owner, place, owner._root, functools.partial(setattr, owner, "_root"), met)
        for name in owner._names():
            path = under(place, self._naming.attribute(name))
            yield from self._items(owner, path, getattr(owner, name), functools.partial(setattr, owner, name), met)

    def _items(
        self, owner: Any, path: str, value: Any, replace: Callable[[Any], None], met: set[int]
    ) -> Iterator[NamedValue]:
        try:
            flat = flatten(value, met, self._naming)
        except RecursionError as e:
            raise refuse_object(path, value, e) from e
        # All `replace` functions of a value share this list, so each keeps what the earlier ones have replaced.
        items = [item for _, item in flat.items]
        for i, (step, item) in enumerate(flat.items):
            yield NamedValue(under(path, step), item, owner, _replacing(flat, items, i, replace))

    def _parts(self, owner: Any) -> Iterator[tuple[str, Any]]:
        """Yields the variables of a Keras object, except the slots of optimizers, and the Keras objects inside it."""
        if isinstance(owner, compat.BaseOptimizer):
            ids = {id(slot.variable) for slot in compat.slots_of(owner)}
        else:
            variables = compat.own_variables(owner)
            ids = set(map(id, variables))
            yield from zip(self._naming.variables(owner), variables, strict=True)
        reached: set[int] = set()
        for name, value in compat.parts_of(owner):
            for path, child in self._owners(self._naming.part(owner, name), value):
                # Keras tracks all layers. Their places there change with layers that an attribute leads to.
                if id(child) not in ids and not (name == compat.SUBLAYERS and id(child) in reached):
                    yield path, child
                    reached.add(id(child))

    def _owners(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yields the Keras objects and variables in nested lists, tuples and dicts."""
        if isinstance(value, (Variable, *compat.OWNERS)):
            yield name, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from self._owners(under(name, self._naming.key(key)), item)
        elif isinstance(value, (list, tuple)):
            for step, item in zip(self._naming.items(value), value, strict=True):
                yield from self._owners(under(name, step), item)


def _replacing(flat: "Flat", items: list[Any], index: int, replace: Callable[[Any], None]) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is not items[index]:
            items[index] = value
            replace(flat.join(items))

    return put


class Flat(NamedTuple):
    """A value flattened into what is saved on its own.

    Args:
      items: the path of each item within the value, and the item.
      join: returns the value from its items. Lists and dicts are changed in place, unless they were met before.
    """

    items: list[tuple[str, Any]]
    join: Callable[[list[Any]], Any]


def flatten(value: PyTree, met: set[int], naming: Naming) -> Flat:
    """Flattens lists, tuples, dicts and registered pytrees. Containers of plain values stay whole.

    Args:
      value: the value.
      met: ids of the containers that were flattened before. One that was met gets a copy for its new items: in the program that
        saved them, they may have become two, as the average of the weights that begins as the weights.
      naming: makes the steps of the paths.
    """
    children = None if text.is_plain(value) else _children(value, met, naming)
    if children is None:
        return Flat([("", value)], lambda items: items[0])
    names, values, join = children
    parts = [flatten(v, met, naming) for v in values]

    def joined(items: list[Any]) -> Any:
        rest = iter(items)
        return join([part.join([next(rest) for _ in part.items]) for part in parts])

    items = [(under(name, inner), item) for name, part in zip(names, parts, strict=True) for inner, item in part.items]
    return Flat(items, joined)


_Children = tuple[list[str], list[Any], Callable[[list[Any]], Any]]


def _children(value: Any, met: set[int], naming: Naming) -> _Children | None:
    """Returns names and values of the children of a container, and a function that replaces the children."""
    if isinstance(value, (dict, list)):
        container: Any = copy.copy(value) if id(value) in met else value
        met.add(id(value))
    if isinstance(value, dict):

        def fill_dict(items: list[Any]) -> Any:
            container.update(zip(list(container), items, strict=True))
            return container

        return list(map(naming.key, value)), list(value.values()), fill_dict
    if isinstance(value, list):

        def fill_list(items: list[Any]) -> Any:
            container[:] = items
            return container

        return naming.items(value), list(value), fill_list
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        make = None if fields is None else type(value)
        return (list(fields or naming.items(value)), list(value), lambda items: make(*items) if make else tuple(items))
    is_leaf = is_owner(value) or isinstance(value, Variable) or part_of(value) is not None
    # The array of a `PerReplica` with unequal rows has padding, whose place it does not tell.
    is_leaf |= isinstance(value, PerReplica) and value.rows is not None
    if is_leaf or jax.tree_util.all_leaves([value]):
        return None
    # One level only, because a child may be an object that has its own name, such as a Keras variable.
    pairs, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    names = ["/".join(_step(entry, naming) for entry in path) for path, _ in pairs]
    return names, [child for _, child in pairs], functools.partial(jax.tree.unflatten, structure)


def _step(entry: Any, naming: Naming) -> str:
    """Returns the step of an entry of a path of JAX."""
    if isinstance(entry, (jax.tree_util.DictKey, jax.tree_util.FlattenedIndexKey)):
        return naming.key(entry.key)
    return quoted(jax.tree_util.keystr((entry,), simple=True))


def refuse_name(path: str) -> CheckpointError:
    """Returns the error for two objects that have one name."""
    return CheckpointError(
        f"a checkpoint with the object {path!r}",
        "another object of the checkpoint has this name too, so that both would be restored with one value.",
        "give one of the two attributes or variables another name",
    )
