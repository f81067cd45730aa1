# SPDX-License-Identifier: Apache-2.0
"""How much of a training run the user's code has been told."""

from typing import final


@final
class ReportedProgress:
    """What was reported to the user's code of this process. Steps that are repeated after a loss are not reported again.

    Attributes:
      told: the epoch, the number of its steps, and the number of callbacks at its end.
      is_behind: whether this process had reported less than the source when they met. `catch_up` ends it.
    """

    def __init__(self) -> None:
        self.told, self.is_behind = [-1, 0, 0], False
        self._end, self._told_by_source = [-1, 0, 0], self.told

    def begin_epoch(self, epoch: int) -> bool:
        """Records that an epoch begins. Returns whether it has not been reported yet."""
        is_new = [epoch, 0, 0] > self.told
        self.told = max(self.told, [epoch, 0, 0])
        return is_new

    def begin_steps(self, epoch: int, end: int) -> bool:
        """Records that steps begin, the last of which is number `end`. Returns whether they have not been reported yet."""
        self._end = [epoch, end, 0]
        return self._end > self.told

    def end_steps(self) -> None:
        """Records that these steps are reported now."""
        self.told = max(self.told, self._end)

    def end_callbacks(self, count: int) -> None:
        """Records that so many callbacks were called at the end of the present epoch."""
        self.told = [*self.told[:2], count]

    def meet(self, told_by_source: list[int]) -> None:
        """Compares this process with the one from which it has taken the position."""
        # Only `catch_up` changes `told`, so that it always fits what the user's code of this process has been told.
        self._told_by_source, self.is_behind = told_by_source, self.told < told_by_source

    def catch_up(self) -> None:
        """Records that the user's code of this process is as far as that of the source."""
        self.told, self.is_behind = max(self.told, self._told_by_source), False
