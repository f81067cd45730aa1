# SPDX-License-Identifier: Apache-2.0
"""Copies of all variables in the memory of the host, from which a training run continues after the loss of a process."""

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx._src import compat
from phalanx._src.checkpoint.shards import Box, Division, box_of, shards_here, whole_box
from phalanx._src.compat import Variable
from phalanx._src.mesh.arrays import spans_processes
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.values import Share, put_share, share_of, to_host

EVERYONE = -1
"""Stands for the rank of the process that has a piece, if each process has it."""
_DIGITS = 7  # Hexadecimal ones, that an int32 has.

_variables: IdentityMap[bool] = IdentityMap()
"""All Keras variables of this process."""


class _UserChanges:
    """Counts new variables, and assignments outside programs. Code of the user that has made them is not called again."""

    def __init__(self) -> None:
        self.count = 0

    def create(self, variable: Variable) -> None:
        """Counts a new variable, and remembers it."""
        _variables[variable] = True
        self.count += 1

    def assign(self, variable: Variable) -> None:
        """Counts an assignment."""
        self.count += 1


_changes = _UserChanges()
compat.on_variable(_changes.create)
compat.on_assign(_changes.assign)


class Kind(NamedTuple):
    """What identifies a variable in another process, which has run the same program.

    Args:
      path: its path.
      number: how many variables with this path were created before.
      shape: its shape.
      dtype: its dtype.
    """

    path: str
    number: int
    shape: tuple[int, ...]
    dtype: str


def kinds_here() -> list[tuple[Variable, Kind]]:
    """Returns all variables of this process and their kinds, in the order in which the variables were created."""
    seen: dict[str, int] = {}
    kinds = []
    for variable, _ in _variables.items():
        number = seen[variable.path] = seen.get(variable.path, -1) + 1
        dtype = np.dtype(compat.dtype_of(variable)).name
        kinds.append((variable, Kind(variable.path, number, tuple(variable.shape), dtype)))
    return kinds


def fingerprint(values: Sequence[object]) -> str:
    """Returns a text that is equal for equal values, in any order."""
    return hashlib.sha256(repr(sorted(map(repr, values))).encode()).hexdigest()


class Holding(NamedTuple):
    """What a process has of a variable.

    Args:
      division: how the variable is divided over the group. One that each process has whole is a single piece of `EVERYONE`.
      pieces: the pieces that the process has, by their places.
    """

    division: Division
    pieces: Mapping[Box, np.ndarray]

    @classmethod
    def whole(cls, value: np.ndarray) -> "Holding":
        """Returns the whole of a variable."""
        box = whole_box(value.shape)
        return cls(Division(value.shape, value.dtype.name, ((EVERYONE, box),)), {box: value})

    @property
    def is_whole(self) -> bool:
        """Whether the process has all pieces."""
        return all(box in self.pieces for _, box in self.division.pieces)

    @property
    def value(self) -> np.ndarray:
        """A copy of the whole value, of which this process has all pieces."""
        # Of each piece, because a step may consume the value, and another loss needs the pieces.
        return self.division.assemble(whole_box(self.division.shape), lambda _, box: self.pieces[box].copy())


@dataclass(frozen=True)
class Copy:
    """The values of all variables at one moment, as far as this process has them.

    Args:
      step: number of steps that the training had made.
      stage: what was done after these steps. See `Progress`.
      position: how far the training had come, apart from the variables.
      values: what this process has of the variables.
      shares: what this process has of variables that are combined over the replicas later.
    """

    step: int
    stage: list[int]
    position: dict[str, Any]
    values: "IdentityMap[Holding]"
    shares: "IdentityMap[Share]" = field(default_factory=IdentityMap)

    @property
    def progress(self) -> list[int]:
        """How far the training had come, as numbers that increase."""
        return [self.step, *self.stage]

    def holdings(self) -> list[tuple[Kind, Holding]]:
        """Returns the kinds of the variables, and the pieces that this process has."""
        pairs = ((kind, self.values.get(variable)) for variable, kind in kinds_here())
        return [(kind, holding) for kind, holding in pairs if holding is not None]

    def completed(self, uncopied: "IdentityMap[Holding]") -> "Copy":
        """Returns a copy that also has the values of variables that this one lacks."""
        values = IdentityMap[Holding]()
        for variable, holding in [*uncopied.items(), *self.values.items()]:
            values[variable] = holding
        return replace(self, values=values)


class Copier:
    """Copies variables to the host. An array that is still the one of the last copy is not copied again."""

    def __init__(self) -> None:
        self._known = 0
        self._last: IdentityMap[tuple[Callable[[], Any], Holding]] = IdentityMap()

    @property
    def has_missed(self) -> bool:
        """Whether variables were created, or assigned outside programs, since the last copy."""
        return _changes.count != self._known

    def copy(
        self, step: int, stage: list[int], position: dict[str, Any], topology: Topology, *, is_lenient: bool = False
    ) -> Copy | None:
        """Returns a copy of all variables of this process. None if a variable has no value that this process knows alone.

        If a layout shards variables over the processes, all must call it, and the copy includes the shards of the process before.

        Args:
          step: see `Copy`.
          stage: see `Copy`.
          position: see `Copy`.
          topology: the devices of the training.
          is_lenient: whether a variable that a failed program has consumed gets an old value.
        """
        # Before the values are read, so that an assignment by another thread in between makes the next copy due.
        self._known = _changes.count
        copy = self._of_process(step, stage, position, topology, is_lenient=is_lenient)
        if topology.divides_over_workers and not self._add_divided(copy, topology):
            return None
        return copy

    def _of_process(
        self, step: int, stage: list[int], position: dict[str, Any], topology: Topology, *, is_lenient: bool
    ) -> Copy | None:
        """Returns a copy of the variables that this process has whole. None if one has no value that this process knows alone."""
        values: IdentityMap[Holding] = IdentityMap()
        shares: IdentityMap[Share] = IdentityMap()
        for variable, _ in _variables.items():
            array = compat.raw_value(variable)
            if _is_on_demand(variable):
                share = share_of(variable, topology)
                if share is None:
                    return None
                is_mean = variable.aggregation == "mean"
                # Accumulated gradients must not be lost with another process.
                if share.value.any() and not (share.is_whole or is_mean or compat.is_unsent(variable)):
                    return None
                shares[variable] = share
                if is_mean:  # A process that joins begins with this one's value.
                    mean = share.value if share.is_whole else share.value.mean(0).astype(share.value.dtype)
                    values[variable] = Holding.whole(mean)
            elif isinstance(array, jax.Array):
                if not array.is_deleted():
                    if not spans_processes(array):
                        values[variable] = self._of(variable, array)
                elif is_lenient:
                    last = self._last.get(variable)
                    zeros = np.zeros(variable.shape, compat.dtype_of(variable))
                    values[variable] = last[1] if last else Holding.whole(zeros)
                else:
                    return None
        return Copy(step, stage, position, values, shares)

    def _of(self, variable: Variable, array: jax.Array) -> Holding:
        last = self._last.get(variable)
        if last is not None and last[0]() is array:
            return last[1]
        return self._note(variable, array, Holding.whole(to_host(array)))

    def _note(self, variable: Variable, array: jax.Array, holding: Holding) -> Holding:
        # Weak, so that a copy on the host does not keep the memory of the device.
        self._last[variable] = weakref.ref(array), holding
        return holding

    def _add_divided(self, copy: Copy | None, topology: Topology) -> bool:
        """Adds the shards of this process and of the one before. Returns whether all processes have made a copy."""
        arrays = {kind: (variable, compat.raw_value(variable)) for variable, kind in kinds_here()}
        divided = {kind: pair for kind, pair in sorted(arrays.items()) if spans_processes(pair[1])}
        lasts = {kind: self._last.get(variable) for kind, (variable, _) in divided.items()}
        changed = [
            kind for kind, (_, array) in divided.items() if (last := lasts[kind]) is None or last[0]() is not array
        ]
        # All have the same changes, unless the code of the user is wrong, for example assigns a variable in one process.
        text = fingerprint(changed)[:_DIGITS]
        answers = topology.exchange(np.array([-1 if copy is None else int(text, 16), len(divided)], np.int32))
        if (answers[:, 0] < 0).any() or copy is None:
            return False
        if len(np.unique(answers, axis=0)) > 1:
            changed = list(divided)
        moved = topology.from_neighbours([divided[kind][1] for kind in changed]) if changed else []
        for kind, array_moved in zip(changed, moved, strict=True):
            variable, array = divided[kind]
            self._note(variable, array, _with_neighbour(array, array_moved, topology))
        for variable, _ in divided.values():
            last = self._last.get(variable)
            assert last is not None
            copy.values[variable] = last[1]
        return True


def _with_neighbour(array: jax.Array, moved: jax.Array, topology: Topology) -> Holding:
    """Returns the shards of this process in an array, and those that it has got from the process before."""
    division = Division.of(array)
    boxes = {box for _, box in division.pieces}
    places = {d: box_of(index, array.shape) for d, index in array.sharding.devices_indices_map(array.shape).items()}
    got = {places[topology.neighbours[shard.device]]: shard.data for shard in moved.addressable_shards}
    pieces = shards_here(array, boxes)
    return Holding(
        division, pieces | {box: np.array(data, order="C") for box, data in got.items() if box not in pieces}
    )


def present(copies: Sequence[Copy]) -> "IdentityMap[Holding]":
    """Returns the present values of variables that a copy lacks, as far as this process has them whole."""
    values = IdentityMap[Holding]()
    for variable, _ in variables_to_move():
        array = compat.raw_value(variable)
        is_copied = all(copy.values.get(variable) is not None for copy in copies)
        if is_copied or not isinstance(array, jax.Array) or array.is_deleted() or spans_processes(array):
            continue
        values[variable] = Holding.whole(np.array(array))
    return values


def variables_to_move() -> list[tuple[Variable, Kind]]:
    """Returns the variables of this process that have a value, or are to get one, in a new group, and their kinds."""
    # A process that joins has run no step, so its copy has no weights that replicas train alone.
    return [
        (variable, kind)
        for variable, kind in kinds_here()
        if (isinstance(compat.raw_value(variable), jax.Array) or compat.is_hollow(variable) or _is_on_demand(variable))
        and not (_is_on_demand(variable) and variable.aggregation != "mean")
    ]


def put_shares(copy: Copy, topology: Topology) -> None:
    """Gives this process what it had of the variables that are combined later, and what it begins with if it had nothing."""
    for variable, _ in _variables.items():
        if _is_on_demand(variable):
            put_share(variable, copy.shares.get(variable), topology)


def _is_on_demand(variable: Variable) -> bool:
    return bool(variable.synchronization == "on_demand")
