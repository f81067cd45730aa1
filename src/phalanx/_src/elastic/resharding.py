# SPDX-License-Identifier: Apache-2.0
"""From which copy a new group continues, and how the pieces of the variables come to the processes that need them.

Each process has copied its pieces and those of the one before, so the others have together what a lost process had. A variable that each
process has whole is a single piece.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx._src import compat
from phalanx._src.checkpoint.shards import Box, Division, box_of, cut, whole_box
from phalanx._src.compat import Variable
from phalanx._src.elastic.copies import Copy, Kind, fingerprint
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.values import PartOf
from phalanx._src.tracing.update_sharding import sharding_of
from phalanx.errors import StateLostError, listed


class Offer(NamedTuple):
    """What the other processes of a new group must know of a copy, to choose one.

    Args:
      key: how far the training had come, and how variables were divided. Copies with the same key are of one moment.
      owners: the ranks, in the group of the copy, of the processes whose pieces make up all variables, or `EVERYONE`.
      held: those of them whose pieces are in this copy.
    """

    key: tuple[Any, ...]
    owners: frozenset[int]
    held: frozenset[int]

    def notes(self) -> list[list[Any]]:
        """Returns the offer in lists."""
        return [list(self.key), sorted(self.owners), sorted(self.held)]

    @classmethod
    def of_notes(cls, notes: Sequence[Sequence[Any]]) -> "Offer":
        """Returns the offer that `notes` has put into lists."""
        key, owners, held = notes
        return cls(tuple(key), frozenset(owners), frozenset(held))


def offer_of(copy: Copy) -> Offer:
    """Returns a summary of a copy for the other processes."""
    holdings = copy.holdings()
    missing = {r for _, (division, pieces) in holdings for r, box in division.pieces if box not in pieces}
    owners = frozenset(rank for _, (division, _) in holdings for rank in division.ranks)
    divided = [(kind, division.pieces) for kind, (division, _) in holdings if len(division.pieces) > 1]
    return Offer((*copy.progress, fingerprint(divided)), owners, owners - missing)


class Choice(NamedTuple):
    """The copy with which a new group continues.

    Args:
      key: see `Offer`.
      source: the first process that has the copy.
      senders: the first process that has the pieces of each owner, unless all processes have them.
    """

    key: tuple[Any, ...]
    source: int
    senders: Mapping[int, int]


def choose(offers: Sequence[Sequence[Offer]]) -> Choice | None:
    """Returns the newest copy whose pieces the processes have together. None if there is none.

    What each process has whole comes from the first one, because others may lack one of these variables.

    Args:
      offers: for each process, its copies.
    """
    for key in sorted({offer.key for of_process in offers for offer in of_process if offer.owners}, reverse=True):
        same = [next((offer for offer in of_process if offer.key == key), None) for of_process in offers]
        ranks = [rank for rank, offer in enumerate(same) if offer]
        owners = {owner for offer in same if offer for owner in offer.owners}
        holders = {owner: [r for r, offer in enumerate(same) if offer and owner in offer.held] for owner in owners}
        if all(holders.values()):
            senders = {owner: has_it[0] for owner, has_it in holders.items() if len(has_it) < len(offers)}
            return Choice(key, ranks[0], senders)
    return None


def notes_of_divisions(copy: Copy) -> list[list[Any]]:
    """Returns how the variables of a copy are divided, in lists."""
    return [
        [
            kind.path,
            kind.number,
            list(kind.shape),
            kind.dtype,
            [[r, list(map(list, box))] for r, box in division.pieces],
        ]
        for kind, (division, _) in copy.holdings()
    ]


def divisions_of_notes(notes: Sequence[Sequence[Any]]) -> dict[Kind, Division]:
    """Returns the divisions that `notes_of_divisions` has put into lists.

    Raises:
      ValueError: the pieces of a variable do not make up the variable.
    """
    return {
        Kind(path, number, tuple(shape), dtype): Division.of_notes([shape, dtype, pieces])
        for path, number, shape, dtype, pieces in notes
    }


Parts = Mapping[Box, np.ndarray]
"""Parts of a variable, by their places."""


def places_here(topology: Topology, variables: Sequence[tuple[Variable, Kind]]) -> dict[Kind, set[Box]]:
    """Returns the places of what the devices of this process need of the variables."""
    places = {}
    for variable, kind in variables:
        indices: Mapping[Any, Any] = sharding_of(topology, variable).devices_indices_map(kind.shape)
        places[kind] = {box_of(indices[device], kind.shape) for device in topology.devices_here}
    return places


def move_pieces(
    pieces: Mapping[Kind, Parts],
    divisions: Mapping[Kind, Division],
    places: Mapping[Kind, Collection[Box]],
    senders: Mapping[int, int],
    broadcast: Callable[[list[np.ndarray], int], list[np.ndarray]],
) -> dict[Kind, dict[Box, np.ndarray]]:
    """Returns the parts of all pieces that the devices of this process need. All processes must call it.

    Pieces of one owner travel at a time, so that no process has a whole variable of which its devices need a part.

    Args:
      pieces: what this process has of the chosen copy.
      divisions: how the variables were divided when they were copied. All processes have the same, in the same order.
      places: see `places_here`.
      senders: see `Choice`.
      broadcast: broadcasts arrays from a process to all. They all call it with equal shapes.
    """
    parts: dict[Kind, dict[Box, np.ndarray]] = {kind: {} for kind in divisions}
    for owner in sorted({rank for division in divisions.values() for rank in division.ranks}):
        here = [(kind, box) for kind, division in divisions.items() for rank, box in division.pieces if rank == owner]
        values = [pieces.get(kind, {}).get(box, _zeros(kind, box)) for kind, box in here]
        if owner in senders:
            values = broadcast(values, senders[owner])
        for (kind, box), value in zip(here, values, strict=True):
            parts[kind] |= cut(value, box, places.get(kind, ()))
    return parts


def _zeros(kind: Kind, box: Box) -> np.ndarray:
    # A view of one number: the others only tell their shape.
    zeros: np.ndarray = np.broadcast_to(np.zeros((), kind.dtype), [end - begin for begin, end in box])
    return zeros


def values_of(
    variables: Sequence[tuple[Variable, Kind]],
    parts: Mapping[Kind, Parts],
    places: Mapping[Kind, Collection[Box]],
    copy: Copy,
) -> list[tuple[Variable, np.ndarray | PartOf]]:
    """Returns the values that variables get in a new group: whole ones, and functions that return parts of those that are sharded.

    A variable that the other processes do not have keeps its value.

    Args:
      variables: the variables of this process.
      parts: see `move_pieces`.
      places: see `places_here`.
      copy: what this process has.

    Raises:
      StateLostError: no process has the value of a variable.
    """
    values: list[tuple[Variable, np.ndarray | PartOf]] = []
    lost = []
    for variable, kind in variables:
        holding = copy.values.get(variable)
        if kind in parts:
            part_of, everything = _part_of(kind, parts[kind]), (slice(None),) * len(kind.shape)
            is_whole = places[kind] == {whole_box(kind.shape)}
            values.append((variable, part_of(everything) if is_whole else part_of))
        elif holding is not None and holding.is_whole:
            values.append((variable, holding.value))
        elif compat.raw_value(variable) is not None or compat.is_hollow(variable):
            lost.append(variable.path)
    if lost:
        raise StateLostError(
            f"a training run of {len(variables)} variables whose group has lost a process",
            f"the values of {listed(sorted(lost)[:3])} were made in the step that failed, and are lost.",
            "create all variables before the first step: optimizer.build(model.trainable_variables)",
        )
    return values


def _part_of(kind: Kind, parts: Parts) -> PartOf:
    division = Division(kind.shape, kind.dtype, tuple((0, box) for box in parts))

    def part_of(index: Sequence[slice]) -> np.ndarray:
        return division.assemble(box_of(index, kind.shape), lambda _, box: parts[box])

    return part_of
