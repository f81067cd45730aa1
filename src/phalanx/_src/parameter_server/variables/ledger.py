# SPDX-License-Identifier: Apache-2.0
"""The parts of variables that each parameter server holds, and their bytes."""

from collections.abc import Collection, Iterable, Mapping
from typing import final

from phalanx._src.parameter_server.remote.plans import Placement, ServerPart


@final
class Ledger:
    """The parts of variables on the servers, by their keys.

    Args:
      num_servers: number of servers.

    Attributes:
      loads: bytes of all parts on each server.

    Example:
      >>> ledger = Ledger(2)
      >>> ledger.add(ServerPart(1, 7, 0, None), "dense/kernel", 96)
      >>> ledger.holders(7), ledger.loads, ledger.names_on([1])
      ((1,), [0, 96], ['dense/kernel'])
    """

    def __init__(self, num_servers: int) -> None:
        self.loads = [0] * num_servers
        self._names: dict[int, str] = {}
        self._holders: dict[int, tuple[int, ...]] = {}
        self._sizes: dict[int, int] = {}
        # Pairs of a server and a key that no variable of this process needs any more.
        self._unneeded: list[tuple[int, int]] = []

    def add(self, part: ServerPart, name: str, size: int) -> None:
        """Records a part with the path of its variable and its size in bytes."""
        self._sizes[part.key] = size
        self.loads[part.server] += size
        self._names[part.key], self._holders[part.key] = name, (part.server,)

    def add_holders(self, holders: Mapping[int, tuple[int, ...]]) -> None:
        """Records the servers of parts that several servers hold."""
        self._holders |= holders

    def holders(self, key: int) -> tuple[int, ...]:
        """Returns the servers that hold a part."""
        return self._holders[key]

    def size(self, key: int) -> int:
        """Returns the size of a part in bytes."""
        return self._sizes[key]

    def copies(self, placements: Iterable[Placement]) -> dict[int, tuple[int, ...]]:
        """Returns, by key, the servers of those parts that several servers hold, such as the number of updates."""
        keys = [part.key for placement in placements for part in placement]
        return {key: self._holders[key] for key in keys if len(self._holders[key]) > 1}

    def remove(self, placement: Placement) -> None:
        """Records that a variable is gone, so that no server needs to hold its parts."""
        for part in placement:
            self._names.pop(part.key, None)
            self.loads[part.server] -= self._sizes.pop(part.key)
            self._unneeded += [(server, part.key) for server in self._holders.pop(part.key, ())]

    def pop_unneeded(self) -> tuple[int, int] | None:
        """Returns the server and the key of a part that is no longer needed. None if there is none."""
        # Variables may disappear in any thread, at any time: a loop over the list could miss some.
        return self._unneeded.pop() if self._unneeded else None

    def names_on(self, servers: Collection[int]) -> list[str]:
        """Returns the names of the variables that only these servers hold."""
        return sorted({name for key, name in self._names.items() if set(self._holders[key]) <= set(servers)})
