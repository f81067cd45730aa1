# SPDX-License-Identifier: Apache-2.0
"""Matches the objects of a program with the contents of a checkpoint: when restoring, and when objects get variables later."""

import contextlib
import difflib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import keras

from phalanx._src import compat
from phalanx._src.checkpoint.format_1 import OldNaming
from phalanx._src.checkpoint.names import OPEN, Holder, NamedValue, Names, Naming, is_numbered, is_owner
from phalanx._src.checkpoint.objects import REPLICAS, Part, StatePart, VariablePart, kind_of_optimizer, part_of
from phalanx._src.checkpoint.slots import StoredSlots
from phalanx._src.checkpoint.store import CheckpointFile
from phalanx._src.compat import Variable
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.interrupts import deferred
from phalanx.errors import CheckpointMismatchError, InputError, PhalanxError
from phalanx.typing import PyTree

_LORA = "lora_"
"""The names with which Keras's weights begin that are added to a trained layer."""


_KEPT_BYTES = 256 << 20
"""The size of checkpoints whose plans keep the arrays."""


class _Match(NamedTuple):
    """A part of the program that has a value in the checkpoint."""

    part: Part
    path: str
    names: set[str]
    replace: Callable[[Any], None] | None
    value: PyTree = None
    """The arrays, if the plan keeps them. None if they are read again."""


class _LeftOut:
    """Objects that stay as they are, with all that they consist of. Does not keep them alive.

    Attributes:
      has_optimizers: whether optimizers of another class than in the checkpoint are among them.
    """

    def __init__(self) -> None:
        self._objects: list[weakref.ref[Any]] = []
        self.has_optimizers = False

    def add(self, value: object) -> None:
        """Adds an object."""
        self._objects.append(weakref.ref(value))

    def __contains__(self, value: object) -> bool:
        return any(value is each() for each in self._objects)


class Restoration:
    """Restores a checkpoint into objects, including variables that they get later.

    Creating it makes a plan, and checks all of it: names, shapes, dtypes, and the arrays in the file. `begin` carries it out.

    Args:
      objects: the objects.
      stored: the checkpoint.
      without: a Keras object among them that stays as it is, with all that it consists of. None for none.

    Attributes:
      left_out: the objects that stay as they are.

    Raises:
      CheckpointError: the file is damaged.
      CheckpointMismatchError: an object of the program and that of its name in the checkpoint differ. Nothing was restored.
    """

    def __init__(self, objects: Holder, stored: CheckpointFile, without: object | None = None) -> None:
        self._objects, self.stored = weakref.ref(objects), stored
        self._checked: set[str] = set()
        """The layers whose weights are known to be those of the checkpoint. They may get others later."""
        self.left_out = _LeftOut()
        if without is not None:
            self.left_out.add(without)
        self._contents = {name.removesuffix(REPLICAS) for name in stored.names} | set(stored.notes["values"])
        # Arrays in the state of an object are read with the state.
        self._contents -= {name for name in self._contents if "#" in name}
        self._folders = {"", *_folders(self._contents)}
        self._naming = OldNaming(stored) if stored.is_old else Naming()
        self._places: IdentityMap[str] = IdentityMap()
        self._received: IdentityMap[str] = IdentityMap()
        """The variables that are in the checkpoint, and their names there."""
        self._slots = StoredSlots(stored, self._received)
        self._used: set[str] = set()
        self._met: set[str] = set()
        """All names in the program, also of objects without variables, and the folders in which they are."""
        self._places[objects] = ""
        self._is_busy = False
        self._lacking: list[str] = []
        """The names of the values in the program that the checkpoint did not have when the last plan was made."""
        self._plan = self._match([(objects, "")])

    def begin(self) -> None:
        """Restores what the plan says.

        Raises:
          CheckpointMismatchError: an object has refused its state. Nothing was restored.
        """
        self._carry_out(self._plan)
        self._plan = []  # It would keep the objects alive.
        if self.unused():
            OPEN.append(self)

    def _match(self, start: Sequence[tuple[Any, str]]) -> list[_Match]:
        """Returns the values below the objects of `start` that can be restored and are not restored yet."""
        matches: list[_Match] = []
        problems = [self._difference(owner, place) for owner, place in start]
        lacking: list[NamedValue] = []
        receivers: dict[str, Variable] = {}
        holders: dict[str, dict[int, Any]] = {}
        for entry in self._entries(start):
            path, value = entry.path, entry.value
            self._met.add(path)
            self._met.update(_folders([path]))
            if is_owner(value):
                problems.append(self._difference(value, path))
                if value in self.left_out:
                    continue
                holders.setdefault(path, {})[id(value)] = value
                continue
            part = part_of(value) if entry.slot is None else self._slots.part(entry, self._places.get(entry.owner))
            if part is None:
                continue
            if isinstance(value, Variable) and path in self._contents:
                if receivers.setdefault(path, value) is not value:
                    problems.append(f"{path} is one variable in the checkpoint, and two in this program")
                # `StoredSlots` names slots by these. `below` yields optimizers' slots last, when all other variables are known.
                if self._received.get(value) is None:
                    self._received[value] = path
            if path in self._used:
                continue
            try:
                names = part.find(path, self.stored)
                if names:
                    matches.append(_Match(part, path, names, entry.replace, self._checked_value(part, path, names)))
                else:
                    whole = _folders([path]) & self._contents
                    problems += [f"{folder} has arrays in this program, and none in the checkpoint" for folder in whole]
                    lacking.append(entry)
            except ValueError as e:
                problems.append(f"{path}: {e}")
        lacking += self._below_strangers(holders)
        self._lacking = [entry.path for entry in lacking]
        problems += [
            *self._tied_later(holders),
            *self._one_for_several(matches),
            *self._slots.problems,
            *self._renamed(lacking),
            *_other_weights(
                self._places, lacking, set() if self.stored.is_old else self._contents, self._met, self._checked
            ),
        ]
        if differences := list(dict.fromkeys(filter(None, problems))):
            raise _refuse(self.stored.file, differences)
        return matches

    def _checked_value(self, part: Part, path: str, names: AbstractSet[str]) -> PyTree:
        """Reads a value, to check it. Returns None if `_put` has to read it again.

        All arrays of a large checkpoint together would take the memory of a second model.
        """
        value = part.read(path, self.stored)
        # What does not come from the file depends on what is restored before it.
        is_kept = isinstance(part, VariablePart) and names <= self.stored.names and self.stored.num_bytes <= _KEPT_BYTES
        return value if is_kept else None

    def _below_strangers(self, holders: dict[str, dict[int, Any]]) -> list[NamedValue]:
        """Returns the values below those objects of some places that the checkpoint does not have."""
        at_places = (
            (o, path)
            # The last name of an object is shown, which is better one that users know.
            for path, objects in sorted(holders.items(), key=lambda item: "/_" not in item[0])
            for o in objects.values()
            if path not in self._folders
        )
        strangers = {
            id(o): (o, path) for o, path in at_places if self._places.get(o) is None and o not in self.left_out
        }
        entries = self._entries(list(strangers.values()), everywhere=True)
        new = (e for e in entries if not is_owner(e.value) and self._received.get(e.value) is None)
        return [e for e in new if e.path not in self._contents]

    def _difference(self, owner: Any, path: str) -> str | None:
        """Returns why an object cannot have the values that the checkpoint has under its name. None if it can."""
        before, kind = self.stored.notes["optimizers"].get(path), kind_of_optimizer(owner)
        if owner in self.left_out:
            return None
        if before is not None and kind is not None and before != kind:
            if self.left_out.has_optimizers:
                self.left_out.add(owner)
                return None
            return f"{path} is the optimizer {kind}, and {before} in the checkpoint"
        if (other := self._other_name(owner, path)) is not None:
            return f"{path} is the layer {owner.name}, and {other} in the checkpoint"
        difference = self._naming.difference(path, owner)
        return None if difference is None else f"{path} {difference}"

    def _other_name(self, owner: object, path: str) -> str | None:
        """Returns the name of what has the numbered place of an object in the checkpoint, if users have given the two other names."""
        ours, folder = compat.chosen_name(owner), path.rpartition("/")[0]
        if ours is None or not is_numbered(path):
            return None
        chosen: dict[str, str] = self.stored.notes["chosen"]
        places = {name: place for place, name in chosen.items() if place.rpartition("/")[0] == folder}
        is_same = chosen.get(path, ours) == ours and places.get(ours, path) == path
        return None if is_same else chosen.get(path, "one that Keras has numbered")

    def _tied_later(self, holders: dict[str, dict[int, Any]]) -> Iterator[str]:
        """Yields a problem for each object without variables so far that is one in the checkpoint and two in the program, or the reverse.

        Args:
          holders: the objects of the program at each place, by their identity.
        """
        first: dict[int, str] = {}
        for path, holding in holders.items():
            # A loss scale has the name of the optimizer in it.
            objects = [o for o in holding.values() if not isinstance(o, keras.optimizers.LossScaleOptimizer)]
            growing = [o for o in objects if not (getattr(o, "built", True) or o in self.left_out)]
            if not growing or path not in self._folders:
                continue
            if len(objects) > 1:
                yield f"{path} is one object in the checkpoint, and two in this program"
            for other in (first.setdefault(id(owner), path) for owner in growing):
                if other != path and not _are_equal(self.stored, self._contents, other, path):
                    yield _two_values(other, path)

    def _one_for_several(self, matches: list[_Match]) -> list[str]:
        """Returns a problem for each object of the program that has several paths with different values in the checkpoint."""
        first: dict[int, str] = {}
        problems = []
        for part, path, *_ in matches:
            before = self._received.get(part.changes) if isinstance(part.changes, Variable) else None
            other = path if part.changes is None else first.setdefault(id(part.changes), before or path)
            if other != path and _contents_of(self.stored, other) != _contents_of(self.stored, path):
                problems.append(_two_values(other, path))
        return problems

    def _renamed(self, lacking: list[NamedValue]) -> list[str]:
        """Returns a problem for each part of a layer that the checkpoint has under another name, it seems."""
        layers = [path for owner, path in self._places.items() if isinstance(owner, keras.layers.Layer)]
        ours = [(e.path, tuple(e.value.shape)) for e in lacking if isinstance(e.owner, keras.layers.Layer)]
        if not (layers and ours):
            return []
        unknown = self.stored.names.intersection(self.unused()) - self._met
        theirs = [(path, self.stored.spec(path)[0]) for path in sorted(unknown)]
        here, there = _by_root(ours, self._folders), _by_root(theirs, self._met)
        problems = []
        for root, shapes in here.items():
            folder = root.rpartition("/")[0]
            # A layer without a similar one in the checkpoint is new, and begins with its own values.
            similar = [r for r, s in there.items() if s == shapes and r.rpartition("/")[0] == folder]
            if similar and any(f"{folder}/".startswith(f"{layer}/") for layer in layers):
                problems.append(
                    f"it does not contain {with_nearest([root], similar)}, and this program lacks {similar[0]}"
                )
        return problems

    def _carry_out(self, matches: list[_Match]) -> None:
        """Restores the values of a plan: first those that may be refused by their objects, which is undone then."""
        states = [m for m in matches if isinstance(m.part, StatePart)]
        undo: list[Callable[[], object]] = []
        self._is_busy = True
        try:
            for match in states:
                if isinstance(match.part, StatePart):
                    with contextlib.suppress(Exception):
                        undo.append(match.part.undo())
                self._put(match)
        except BaseException:
            for function in reversed(undo):
                with contextlib.suppress(BaseException):
                    function()
            self._used -= {m.path for m in states}.union(*(m.names for m in states))
            raise
        else:
            # Last, because none of these refuses a value that the plan has read. Ctrl-C would leave half of them.
            with deferred():
                for match in matches:
                    if not isinstance(match.part, StatePart):
                        self._put(match)
        finally:
            self._is_busy = False

    def _put(self, match: _Match) -> None:
        part, path, names, replace, value = match
        value = part.read(path, self.stored) if value is None else value
        try:
            is_done, value = part.put(value)
        except InputError as e:  # The position of an iterator over other data.
            raise _refuse_state(
                self.stored.file, path, e.found, "use the data and the batch size of the program that saved it"
            ) from e
        except (PhalanxError, MemoryError):
            raise
        except Exception as e:
            problem = f"it refuses its state ({type(e).__name__}: {e})"
            raise _refuse_state(
                self.stored.file, path, problem, "create the object as in the program that saved it"
            ) from e
        if is_done:
            self._used |= {path, *names}
            if replace is not None:
                replace(value)

    def resume(self) -> None:
        """Restores what became possible since the last call."""
        self._carry_out(self._match(self._places.items()))

    def hear(self, owner: Any, new: object = None) -> None:
        """Restores the new variables of a Keras object. See `Hears`."""
        if self._is_busy:
            return
        place = self._places.get(owner)
        if new is not None and place is not None:
            self.left_out.add(new)  # The values belong to the object before it.
        try:
            # An object without a place may be a new part of a known one, for example a layer that a model has made in `build`.
            self._carry_out(self._match(self._places.items() if place is None else [(owner, place)]))
        except PhalanxError:
            # It would fail again whenever another object gets a variable. After Ctrl-C it may still succeed.
            self._close()
            raise
        if not (self._places.items() and self.unused()):
            self._close()

    def _close(self) -> None:
        """Stops waiting for new variables. `hear` may have been called within `hear`, and have done it already."""
        if self in OPEN:
            OPEN.remove(self)

    def unused(self) -> list[str]:
        """Returns the values of the checkpoint that no object has received."""
        return sorted(self._contents - self._used)

    def missing(self) -> list[str]:
        """Returns the paths of values in this program that were not restored."""
        return [
            entry.path
            for entry in self._entries([(self._objects(), "")], everywhere=True)
            if entry.path not in self._used and not is_owner(entry.value)
        ]

    def _entries(self, start: Sequence[tuple[Any, str]], *, everywhere: bool = False) -> Iterator[NamedValue]:
        """Yields the values below some objects, with their paths in the checkpoint, and notes the places of the objects.

        Args:
          start: objects and their paths in the checkpoint.
          everywhere: also the values below objects that the checkpoint does not contain.
        """
        seen: set[tuple[int, str]] = {(id(owner), place) for owner, place in start}
        ids = {id(owner) for owner, _ in start}

        def enter(owner: Any, place: str) -> bool:
            is_stored = place in self._folders
            is_new = (id(owner), place) not in seen if is_stored else everywhere and id(owner) not in ids
            if not is_new or owner in self.left_out:
                return False
            seen.add((id(owner), place))
            ids.add(id(owner))
            if is_stored and self._places.get(owner) is None:  # The first place, which is the shortest.
                self._places[owner] = place
            return True

        names = Names(self._naming, self.stored.notes["aliases"], self._slots.keys_of)
        return names.below(start, enter)

    @property
    def matched(self) -> bool:
        """Whether anything was restored."""
        return bool(self._used)

    def differences(self) -> tuple[list[str], list[str]]:
        """Returns the names that only the checkpoint or only the program has, as far as is known before objects get variables."""
        growing = {path for owner, path in self._places.items() if not getattr(owner, "built", True)}
        left = [path for path in self.unused() if not growing.intersection(_folders([path]))]
        lacking = [path for path in self._lacking if path not in self._used]
        pairs = (left, self._met), (lacking, self._folders)
        # The metrics of an epoch come and go.
        surplus, lacking = (
            list(dict.fromkeys(_first_unknown(p, known) for p in paths if "/metrics/" not in p))
            for paths, known in pairs
        )
        return surplus, lacking


def _other_weights(
    places: IdentityMap[str], lacking: list[NamedValue], stored: set[str], met: set[str], checked: set[str]
) -> Iterator[str]:
    """Yields a problem for each layer of which the checkpoint has some weights and the program others, as of one with tied weights.

    Args:
      places: the objects of the program and their paths.
      lacking: the values that the checkpoint does not have.
      stored: the paths of the checkpoint.
      met: the paths of the program.
      checked: the layers that were looked at before.
    """
    # The own weights of a model are those that a user adds to it.
    objects = ((o, path) for o, path in places.items() if not isinstance(o, keras.Model))
    layers = {p: o for o, p in objects if isinstance(o, keras.layers.Layer) and o.built and p not in checked}
    if not layers:  # As each time that an object gets variables, once all layers are there.
        return
    checked.update(layers)
    ours = [entry.path for entry in lacking if isinstance(entry.owner, keras.layers.Layer)]
    both = {path.rpartition("/")[0] for path in stored & met}
    for path in sorted([*ours, *stored - met]):
        place, _, name = path.rpartition("/")
        if place in layers and place in both and not (name.startswith(_LORA) and path in met):
            where = "this program" if path in met else "the checkpoint"
            yield f"only {where} has {path}, and both have the layer {layers[place].name}"


def _contents_of(stored: CheckpointFile, path: str) -> tuple[str, list[bytes]]:
    """Returns everything that a checkpoint contains for one value, for comparison."""
    names = [n for n in stored.names if n == path or n.startswith((path + REPLICAS, f"{path}#"))]
    value = json.dumps(stored.notes["values"].get(path))
    # References to arrays contain the path. Without it, equal states at two paths have equal texts.
    return value.replace(json.dumps(path)[1:-1] + "#", "#"), [stored.array(n).tobytes() for n in sorted(names)]


def _are_equal(stored: CheckpointFile, contents: set[str], one: str, other: str) -> bool:
    """Returns whether what two folders of a checkpoint both contain has equal values."""
    below = (path.removeprefix(one) for path in contents if path.startswith(f"{one}/"))
    pairs = [(one + rest, other + rest) for rest in below if other + rest in contents]
    return all(_contents_of(stored, a) == _contents_of(stored, b) for a, b in pairs)


def _two_values(path: str, other: str) -> str:
    return f"{path} and {other} are one object, and have different values in the checkpoint"


def _by_root(values: list[tuple[str, Any]], known: set[str]) -> dict[str, set[tuple[str, Any]]]:
    """Groups names and shapes by the first folder on the way to them that is not among some known ones."""
    roots: dict[str, set[tuple[str, Any]]] = {}
    for path, shape in values:
        root = _first_unknown(path, known)
        roots.setdefault(root, set()).add((path.removeprefix(root), shape))
    return roots


def _refuse_state(file: Path, path: str, problem: str, hint: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the checkpoint {file}",
        f"{path} does not fit this program: {problem}",
        f"{hint}; or delete the checkpoint, to begin again",
    )


def _refuse(file: Path, problems: list[str]) -> CheckpointMismatchError:
    hint = "create the objects as in the program that saved the checkpoint"
    if any(" is the optimizer " in problem for problem in problems):
        hint += "; or Checkpoint(model=model).restore(path).expect_partial() before model.compile"
    return CheckpointMismatchError(
        f"the checkpoint {file}",
        f"it does not fit the objects of this program: {_listed(problems)}. Nothing was restored.",
        hint,
    )


def _folders(paths: Iterable[str]) -> set[str]:
    """Returns the names of all folders in which some values are."""
    return {path.rsplit("/", i)[0] for path in paths for i in range(1, path.count("/") + 1)}


def _first_unknown(path: str, known: set[str]) -> str:
    """Returns the first folder on the way to a value, or the value itself, that is not known."""
    steps = path.split("/")
    return next((r for r in ("/".join(steps[: i + 1]) for i in range(len(steps))) if r not in known), path)


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
def _hear(owner: object) -> None:
    for restoration in list(OPEN):
        restoration.hear(owner)
