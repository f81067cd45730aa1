# SPDX-License-Identifier: Apache-2.0
"""The shares that replicas of different speed have of a global batch."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import final

import numpy as np
from typing_extensions import override

from phalanx._src.runtime.observers import Observer

_KEPT = 64  # Only the last steps of a replica count.
_LEAST = 8  # After fewer steps, all shares stay as they are.
_STEPS = 16  # The weight of the fastest replica.
_WORTHWHILE = 0.1  # Another share needs another program, which a smaller change does not repay.


@final
class Shares(Observer):
    """The shares of the replicas of a global batch.

    Attributes:
      weights: one number per replica. Its share is proportional to it. Empty if all shares are equal.
      is_measured: whether the shares follow the speed of the replicas.
      part: the number of rows of a step, relative to that of a batch of the dataset. None if each step takes one batch.
    """

    def __init__(self, weights: Sequence[float] = (), *, is_measured: bool = False) -> None:
        self.weights, self.is_measured = list(weights), is_measured
        self.part: Fraction | None = None
        self._ended_s: dict[int, float] = {}
        self._seconds_per_row: dict[int, deque[float]] = {}

    def __repr__(self) -> str:
        return f"Shares({self.weights}, is_measured={self.is_measured})"

    @override
    def after_own_part(self, replica: int, rows: int) -> None:
        """Notes that a replica of this process has computed all that it can without the others. Called while a program runs."""
        # It began when the step before had ended, so that waiting for input counts, and waiting for others does not.
        began_s = self._ended_s.pop(replica, None)
        if began_s is not None and rows:
            seconds = self._seconds_per_row.setdefault(replica, deque(maxlen=_KEPT))
            seconds.append((time.monotonic() - began_s) / rows)

    @override
    def after_replica_step(self, replica: int) -> None:
        """Notes that a step of a replica of this process has ended. Called while a program runs."""
        self._ended_s[replica] = time.monotonic()

    def adapt(self, replicas: range, exchange: Callable[[np.ndarray], np.ndarray]) -> None:
        """Makes the shares follow the measured speeds. All processes must call it, before they divide batches.

        Args:
          replicas: the replicas of this process.
          exchange: returns the arrays of all processes, (num_workers, ...).
        """
        if not self.is_measured:
            return
        row_times = [self._seconds_per_row.get(replica, ()) for replica in replicas]
        local_medians = [statistics.median(seconds) if len(seconds) >= _LEAST else 0.0 for seconds in row_times]
        self._seconds_per_row.clear()
        # JAX exchanges no float64 unless x64 is on.
        everyone = exchange(np.asarray(local_medians, np.float32)).ravel()
        # 0 stands for too few measurements. All processes see the same numbers, so all keep their shares.
        if not everyone.all():
            return
        speeds = everyone.min() / everyone
        # Few distinct shares, because each one needs a separate program.
        weights = np.maximum(np.rint(speeds * _STEPS), 1)
        before = np.asarray(self.weights or np.ones_like(weights))
        change = weights / weights.sum() * before.sum() / before
        if np.abs(change - 1).max() > _WORTHWHILE:
            self.weights = weights.tolist()
