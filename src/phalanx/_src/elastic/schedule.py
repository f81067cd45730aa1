# SPDX-License-Identifier: Apache-2.0
"""When a training run in an elastic group copies its variables."""

import math
import time
from collections.abc import Callable
from typing import final

import numpy as np

_SHARE = 0.01
"""The share of the time that copies may take."""
_FIRST_EVERY = 8
_AGREED_EVERY = 16
_MOST_EVERY = 4096
_AGREE_AFTER = 3
"""Binary digits of the number of steps after which processes first agree on how often to copy: 8 steps."""


@final
class CopySchedule:
    """The steps before which all processes copy, so that after a loss they continue from a copy of the same step.

    Args:
      every: number of steps from one copy to the next. None to measure what copies cost.

    Attributes:
      every: the present number of steps from one copy to the next.
    """

    def __init__(self, every: int | None) -> None:
        self._is_measured = every is None
        self.every = every or _FIRST_EVERY
        # How often to copy according to the measurements of this process, and the binary digits of the step of the last agreement.
        self._wanted, self._digits = self.every, 0
        self._due, self._began_s, self._step_s = 0, 0.0, float("inf")

    def begin_steps(self) -> None:
        """Notes the time at which one or more steps begin."""
        self._began_s = time.perf_counter()

    def end_steps(self, count: int) -> None:
        """Notes the time at which they have ended."""
        # The shortest step counts: others have waited for a compilation, or for another process.
        self._step_s = min(self._step_s, (time.perf_counter() - self._began_s) / count)

    def end_copy(self, step: int, cost_s: float, *, is_made: bool) -> None:
        """Chooses the next step to copy at.

        Args:
          step: the present step.
          cost_s: how long the copy has taken, in seconds.
          is_made: whether there was a copy. Otherwise the next step tries again.
        """
        if self._step_s < float("inf"):
            self._wanted = math.ceil(min(_MOST_EVERY, max(1.0, cost_s / (_SHARE * self._step_s))))
        # Multiples of the interval, so that all processes copy before the same steps whenever they joined.
        self._due = self._next_due(step) if is_made else step + 1

    def agree(self, step: int, exchange: Callable[[np.ndarray], np.ndarray], *, is_agreed: bool) -> None:
        """Decides with the others how often to copy. All processes call it before the same step.

        They measure different times. Each time the number of steps has doubled, they take the longest interval.

        Args:
          step: the present step.
          exchange: returns the arrays of all processes.
          is_agreed: whether all processes must ask for the position of the data at the same time.
        """
        if is_agreed:
            self.every = _AGREED_EVERY
        elif self._is_measured and self._digits < step.bit_length() > _AGREE_AFTER:
            # The longest, because with a shorter one the process with the slowest copies would exceed its share.
            self.every = int(exchange(np.array([self._wanted])).max())
            self._due = min(self._due, self._next_due(step))
        self._digits = step.bit_length()

    def is_due(
        self, step: int, exchange: Callable[[np.ndarray], np.ndarray], *, is_agreed: bool, has_missed: bool
    ) -> bool:
        """Returns whether to copy now.

        Args:
          step: the present step.
          exchange: returns the arrays of all processes.
          is_agreed: see `agree`. The processes then decide on each copy together.
          has_missed: whether the last copy is out of date, because a variable was assigned outside the steps.
        """
        is_due = step >= self._due or has_missed
        if not is_agreed:
            return is_due
        # One process alone may have assigned a variable, for example the chief one of a metric that it prints.
        return bool(exchange(np.array([is_due])).any())

    def continue_at(self, step: int, every: int) -> None:
        """Continues as the process from which this one has taken the variables. The first thing to do is a copy."""
        self.every, self._due, self._digits = every, step, step.bit_length()

    def _next_due(self, step: int) -> int:
        return (step // self.every + 1) * self.every
