# SPDX-License-Identifier: Apache-2.0
"""Processes that a script leaves to its next start: its parameter servers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

from phalanx._src.cluster.processes.owned import SERVERS_FOLDER, OwnedProcesses
from phalanx._src.launch.plan import ProcessSpec


@final
class KeptProcesses:
    """A context manager for processes that outlive the start that has made them, and end with the launch.

    Args:
      is_wanted: whether there may be another start.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._owned: OwnedProcesses | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned is not None:
            self._owned.close()

    def announce_to(self, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """Returns the processes to start. A process that trains alone gets the folder of the kept processes in its environment."""
        # Several processes train together, and none of them coordinates parameter servers.
        if not self._is_wanted or len(specs) != 1:
            return list(specs)
        # One folder for all starts: a script finds the processes of the start before it by their folder.
        self._owned = self._owned or OwnedProcesses()
        variables = {SERVERS_FOLDER: self._owned.marked.folder}
        return [replace(spec, environment={**spec.environment, **variables}) for spec in specs]
