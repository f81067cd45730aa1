# SPDX-License-Identifier: Apache-2.0
"""Names for the values on parameter servers, by which the next start of a script finds them again."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.parameter_server.remote.plans import Inventory, Label, Placement, ServerPart, VariableId
from phalanx._src.programs.identity import IdentityMap


class ServedVariable(NamedTuple):
    """A variable that servers hold.

    Args:
      placement: its placement.
      holders: by key of a part, the servers that hold the part.
    """

    placement: Placement
    holders: dict[int, tuple[int, ...]]


def id_of(variable: Variable) -> VariableId:
    """Returns the identifier of a variable."""
    number = _numbers.get(variable) or 0
    return VariableId(variable.path, number, tuple(variable.shape), compat.dtype_of(variable))


def labels_of(variable: Variable, part: ServerPart) -> dict[int, Label]:
    """Returns the label of a part by its key. Metrics have none, because they begin again with each start."""
    return {} if compat.is_of_metric(variable) else {part.key: Label(id_of(variable), part.start, part.stop)}


def stored_in(inventories: Sequence[Inventory]) -> dict[VariableId, ServedVariable]:
    """Returns the variables that servers hold completely.

    Args:
      inventories: what each server holds.

    Example:
      >>> v = VariableId("dense/kernel", 0, (3, 2), "float32")
      >>> stored_in([Inventory({}, {4: Label(v, 0, 2)}), Inventory({}, {5: Label(v, 2, 3)})])[v].placement
      (ServerPart(server=0, key=4, start=0, stop=2), ServerPart(server=1, key=5, start=2, stop=3))
      >>> stored_in([Inventory({}, {4: Label(v, 0, 2)}), Inventory({}, {})])
      {}
    """
    holders: dict[int, tuple[int, ...]] = {}
    parts: dict[VariableId, list[ServerPart]] = defaultdict(list)
    for server, inventory in enumerate(inventories):
        for key, label in inventory.labels.items():
            if key not in holders:
                parts[label.variable].append(ServerPart(server, key, label.start, label.stop))
            holders[key] = (*holders.get(key, ()), server)
    placements = {variable: tuple(sorted(pieces, key=lambda p: p.start)) for variable, pieces in parts.items()}
    return {
        variable: ServedVariable(placement, {part.key: holders[part.key] for part in placement})
        for variable, placement in placements.items()
        if _is_complete(variable, placement)
    }


def _is_complete(variable: VariableId, placement: Placement) -> bool:
    if placement[0].stop is None:
        return len(placement) == 1
    ends = [0, *(part.stop for part in placement)]
    return [part.start for part in placement] == ends[:-1] and ends[-1] == variable.shape[0]


# How many variables with each path were created, and how many of them before each variable.
_created: Counter[str] = Counter()
_numbers: IdentityMap[int] = IdentityMap()


def _count(variable: Variable) -> None:
    """Numbers a new variable among those with its path."""
    _numbers[variable] = _created[variable.path]
    _created[variable.path] += 1


compat.on_variable(_count)
