# SPDX-License-Identifier: Apache-2.0
"""Names in files of the format before: positions in lists, and in the variables of an optimizer.

The names that Keras had given the variables are in the notes of these files. They tell what was at a position.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.checkpoint.names import Naming, under
from phalanx._src.checkpoint.store import CheckpointFile


def _quoted(name: object) -> str:
    return str(name).replace("%", "%25").replace("/", "%2F").replace("@", "%40").replace("#", "%23")


def _without_numbers(name: str) -> str:
    return re.sub(r"_\d+(?=_|$)", "", name)


class OldNaming(Naming):
    """The steps of names in a file of the format before.

    Args:
      stored: the file.
    """

    def __init__(self, stored: CheckpointFile) -> None:
        self._names: dict[str, str] = stored.notes["names"]
        self._below: dict[str, set[str]] = {}
        for path, name in self._names.items():
            for i in range(1, path.count("/") + 1):
                self._below.setdefault(path.rsplit("/", i)[0], set()).update(name.split("/"))

    @override
    def attribute(self, name: str) -> str:
        return name

    @override
    def key(self, key: object) -> str:
        return _quoted(key)

    @override
    def items(self, values: Iterable[Any]) -> list[str]:
        return [str(i) for i, _ in enumerate(values)]

    @override
    def variables(self, owner: Any) -> list[str]:
        counts, steps = Counter[str](), []
        for name in (_quoted(v.name) for v in compat.own_variables(owner)):
            steps.append(f"{name}_{counts[name]}" if counts[name] else name)
            counts[name] += 1
        return steps

    @override
    def part(self, owner: Any, name: str) -> str:
        return name

    @override
    def slots(self, place: str, optimizer: Any, keys: dict[int, str]) -> Iterator[tuple[str, compat.OptimizerSlot]]:
        before, variables = self._variables_of(place), compat.own_variables(optimizer)
        slots = {id(slot.variable): slot for slot in compat.slots_of(optimizer)}
        names = [self._name_before(slots[id(v)], keys) for v in variables]
        # A name that two slots had does not say which of them is at a position.
        uses = Counter(before)
        indices = {name: i for i, name in enumerate(before) if uses[name] == 1}
        # Names that tell nothing, as those of the two factors of a variable, count if all others are in their places.
        in_place = list(map(_without_numbers, before)) == [_without_numbers(v.name) for v in variables] and all(
            indices.get(name, i) == i for i, name in enumerate(names)
        )
        for i, (variable, name) in enumerate(zip(variables, names, strict=True)):
            index = indices.get(name, i if in_place else None)
            # "none" is not a position, so the file has no such name, and the slot is not restored.
            yield under(place, f"variables/{'none' if index is None else index}"), slots.pop(id(variable))
        # The slots that remain are kept next to the optimizer (`compat.beside`), and are not among its `variables`.
        trained = {id(v): i for i, v in enumerate(compat.trained_by(optimizer, None))}
        for slot in slots.values():
            index = trained[id(slot.trained)] if in_place else None
            yield under(place, f"phalanx_kept/{_quoted(slot.kind)}/{'none' if index is None else index}"), slot

    def _name_before(self, slot: compat.OptimizerSlot, keys: dict[int, str]) -> str:
        """Returns the name that Keras would have given a slot in the program that saved it."""
        if slot.trained is None:
            return slot.kind
        path = self._names.get(keys[id(slot.trained)], slot.trained.path)
        return f"{path.replace('/', '_')}_{slot.kind}"

    def _variables_of(self, place: str) -> list[str]:
        """Returns the names that Keras had given the variables of the optimizer at a place."""
        names: list[str] = []
        while (path := under(place, f"variables/{len(names)}")) in self._names:
            names.append(self._names[path].partition("/")[2])
        return names

    @override
    def difference(self, place: str, owner: Any) -> str | None:
        if isinstance(owner, compat.BaseOptimizer):
            before = self._names.get(under(place, "variables/0"), owner.name).partition("/")[0]
            is_same = _without_numbers(before) == _without_numbers(owner.name)
            return None if is_same else f"is the optimizer {owner.name!r}, and {before!r} in the checkpoint"
        if not (isinstance(owner, keras.layers.Layer) and place.rpartition("/")[2].isdigit() and place in self._below):
            return None
        steps, before = {step for v in owner.variables for step in v.path.split("/")}, self._below[place]
        if owner.name not in steps:
            return None
        name = compat.given_name(owner)
        is_same = name in before if name else compat.automatic_name(owner) in map(_without_numbers, before)
        return None if is_same else f"is the layer {owner.name!r}, and one of {sorted(before)} in the checkpoint"
