# SPDX-License-Identifier: Apache-2.0
"""Finds the slots that a checkpoint has for the variables that an optimizer trains, and converts those of an optimizer with other options."""

import re
from collections.abc import Callable, Iterable
from typing import final

import jax
import keras
import numpy as np
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.checkpoint.names import NamedValue, keys_outside, quoted_path
from phalanx._src.checkpoint.objects import VariablePart
from phalanx._src.checkpoint.store import CheckpointFile
from phalanx._src.compat import Variable
from phalanx._src.programs.identity import IdentityMap
from phalanx.typing import PyTree

# Keras's names.
_COUNT, _AVERAGE, _ACCUMULATOR = "iteration", "average", "gradient_accumulator"


class StoredSlots:
    """The slots in a checkpoint.

    The slots of a variable that is in the checkpoint itself have its name there. Slots of other variables have the name of Keras, whose numbers
    depend on what a program has made before: the others with equal names but for the numbers must be as many as in the checkpoint.

    Args:
      stored: the checkpoint.
      received: the variables of the program that are in the checkpoint, and their names there.

    Attributes:
      problems: what cannot be decided.
    """

    def __init__(self, stored: CheckpointFile, received: IdentityMap[str]) -> None:
        self._received = received
        self._keras_names: dict[str, str] = stored.notes["names"]
        self._accumulation: dict[str, int] = stored.notes["accumulation"]
        self._keys: dict[str, dict[str, None]] = {}
        for name in self._keras_names:
            head, is_slot, key = name.partition(":")
            if is_slot:
                self._keys.setdefault(head.rpartition("/")[0], {})[key] = None
        self.problems: list[str] = []

    def keys_of(self, place: str, variables: list[Variable], paths: IdentityMap[str]) -> list[str]:
        """Returns the ends of the names of the slots of some variables, after the kind.

        Args:
          place: the name of the optimizer.
          variables: the variables that it trains.
          paths: the names of the variables of the program.
        """
        keys_by_id = dict(zip(map(id, variables), map(self._received.get, variables), strict=True))
        outside = [v for v in variables if keys_by_id[id(v)] is None]
        # What has a name in both is not in the checkpoint under another name.
        taken = {path for _, path in self._received.items()}
        left = [key for key in self._keys.get(place, ()) if key not in taken]
        # First the variables without a name in this program, which any key may fit. Those with a name were not saved objects.
        for is_named in (False, True):
            ours = [v for v in outside if (paths.get(v) is not None) == is_named]
            theirs = [key for key in left if key.startswith(":")] if is_named else left
            keys = self._matched(place, dict(zip(keys_outside(ours), ours, strict=True)), theirs)
            keys_by_id |= {id(v): key for key, v in keys}
            left = [key for key in left if key not in {key for key, _ in keys}]
        return [keys_by_id[id(v)] or "" for v in variables]

    def _matched(self, place: str, ours: dict[str, Variable], theirs: list[str]) -> Iterable[tuple[str, Variable]]:
        """Returns variables with their keys in the checkpoint, or with others if the checkpoint has none for them."""
        here, there = _groups((key, key) for key in ours), _groups((self._outside(key), key) for key in theirs)
        pairs: list[tuple[str, Variable]] = []
        for group, names in here.items():
            stored = there.get(group, {})
            if stored and len(stored) != len(names):  # None stored: the slots are new.
                self.problems.append(
                    f"{place or 'the optimizer'} trains {len(names)} variables {group[1:]!r}, and {len(stored)} in the checkpoint, "
                    "and it does not say which, because it does not contain the layers"
                )
            # Keras's numbers depend on the layers that were made before. If they differ, the order of the variables decides.
            is_same = names.keys() == stored.keys()
            keys = [stored[name] for name in names] if is_same else list(stored.values()) or list(names)
            pairs += zip(keys, [ours[name] for name in names], strict=False)
            pairs += [(name, ours[name]) for name in list(names)[len(keys) :]]
        return pairs

    def _outside(self, key: str) -> str:
        """Returns the key that a variable would have if it were not in the checkpoint."""
        return key if key.startswith(":") else ":" + quoted_path(self._keras_names.get(key, key))

    def part(self, entry: NamedValue, place: str | None) -> VariablePart:
        """Returns how a slot is restored.

        Args:
          entry: the slot in the program.
          place: the name of its optimizer in the checkpoint.
        """
        optimizer, slot = entry.owner, entry.slot
        assert slot is not None
        if slot.kind == _AVERAGE and slot.trained is not None:
            place_there = self._received.get(slot.trained)
            # In this order: to ask for all variables at each of them would take the square of their number.
            has_weights = place_there is not None or any(
                self._received.get(v) is not None for v in compat.trained_by(optimizer, None)
            )
            return _AveragePart(slot.variable, slot.trained, place_there, has_weights=has_weights)
        is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        ours, theirs = compat.accumulation_steps(optimizer) or 1, self._accumulation.get(place or "")
        if theirs not in (None, ours) and not is_scaling:
            if slot.kind == _COUNT:
                return _ConvertedPart(slot.variable, lambda calls: calls // theirs * ours)
            if slot.kind == _ACCUMULATOR:
                return _ConvertedPart(slot.variable, _zeros)
        return VariablePart(slot.variable)


@final
class _ConvertedPart(VariablePart):
    """A variable whose value is computed from that in the checkpoint."""

    def __init__(self, variable: Variable, convert: Callable[[PyTree], PyTree]) -> None:
        super().__init__(variable)
        self._convert = convert

    @override
    def read(self, path: str, stored: CheckpointFile) -> PyTree:
        whole, _ = super().read(path, stored)
        return self._convert(whole), None


def _zeros(array: PyTree) -> PyTree:
    # `full_like` keeps the devices of an array that is divided.
    return jax.lax.full_like(array, 0) if isinstance(array, jax.Array) else np.zeros_like(array)


@final
class _AveragePart(VariablePart):
    """The average of a variable. If the checkpoint lacks it, it begins as the variable, because Keras begins with it only at the first step.

    Args:
      average: the variable that holds the average.
      trained: the variable whose values are averaged.
      place: its name in the checkpoint. None if it is not there, as a new layer.
      has_weights: whether the checkpoint has any variable that the optimizer trains.
    """

    def __init__(self, average: Variable, trained: Variable, place: str | None, *, has_weights: bool) -> None:
        super().__init__(average)
        self._trained, self._place, self._has_weights = trained, place, has_weights

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        if names := super().find(path, stored):
            return names
        if not self._has_weights:
            raise ValueError(
                "the optimizer averages the weights (use_ema=True), and the checkpoint has neither averages nor weights"
            )
        return super().find(self._place, stored) if self._place is not None else {path}

    @override
    def read(self, path: str, stored: CheckpointFile) -> PyTree:
        if path in stored.names:
            return super().read(path, stored)
        if self._place is None:
            return compat.raw_value(self._trained), None
        whole, _ = super().read(self._place, stored)
        return whole, None


def _groups(names: Iterable[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Groups pairs by their first item without numbers."""
    groups: dict[str, dict[str, str]] = {}
    for name, key in names:
        groups.setdefault(re.sub(r"(_\d+|~\d+)(?=/|$|~)", "", name), {})[name] = key
    return groups
