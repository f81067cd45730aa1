# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sharding: which worker reads which files and records, and which replica gets which rows. Imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub

import numpy as np


@dataclass(frozen=True)
class InputWorker:
    """The position of one worker among all workers.

    Args:
      index: rank of this worker, from 0.
      count: number of workers.
      replicas: number of replicas per worker.
      is_first: whether no process with a lower rank runs the same replicas.
      weights: for all replicas, numbers to which their shares of a batch are proportional. Empty if the shares are equal.

    Example:
      >>> [InputWorker(i, 2, 2).rows(7) for i in range(2)]
      [range(0, 4), range(4, 7)]
      >>> [InputWorker(i, 2, 1, weights=(2.0, 1.0)).rows(6) for i in range(2)]
      [range(0, 4), range(4, 6)]
    """

    index: int = 0
    count: int = 1
    replicas: int = 1
    weights: tuple[float, ...] = ()
    is_first: bool = True

    @cached_property
    def num_replicas(self) -> int:
        """The number of replicas of all workers."""
        return self.count * self.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process logs and writes files for all workers."""
        return self.index == 0 and self.is_first

    def shares(self, rows: int) -> list[int]:
        """Returns the number of rows that each replica of this worker gets from a global batch of `rows` rows."""
        first = self.index * self.replicas
        starts = self._starts(rows, range(first, first + self.replicas + 1))
        return list(map(sub, starts[1:], starts))

    def rows(self, rows: int, worker: int | None = None) -> range:
        """Returns a worker's rows of a global batch of `rows` rows: a contiguous range, in the order of the ranks.

        Args:
          rows: number of rows of the batch.
          worker: rank of the worker; this one by default.
        """
        first = (self.index if worker is None else worker) * self.replicas
        return range(*self._starts(rows, (first, first + self.replicas)))

    def all_shares(self, rows: int) -> list[int]:
        """Returns the number of rows that each replica of all workers gets from a global batch of `rows` rows."""
        starts = self._starts(rows, range(self.num_replicas + 1))
        return list(map(sub, starts[1:], starts))

    @cached_property
    def _ends(self) -> np.ndarray:
        """The bounds of the parts of all replicas, from 0 to 1."""
        return np.cumsum([0.0, *self.weights]) / sum(self.weights)

    def _starts(self, rows: int, replicas: Sequence[int]) -> list[int]:
        """Returns the first row of each of `replicas`. The shares of a batch are less than one row away from the weights."""
        if self.weights:
            return [int(np.rint(self._ends[replica] * rows)) for replica in replicas]
        each, longer = divmod(rows, self.num_replicas)
        return [replica * each + min(replica, longer) for replica in replicas]

    def files(self, num_files: int) -> range:
        """Returns this worker's files under AutoShardPolicy.FILE: `index`, `index + count`, ..."""
        return range(self.index, num_files, self.count)


def shares(rows: int, num_replicas: int) -> list[int]:
    """Returns the number of rows per replica. The numbers differ by at most one.

    Example:
      >>> shares(7, 3)
      [3, 2, 2]
    """
    return [rows // num_replicas + (replica < rows % num_replicas) for replica in range(num_replicas)]


def split(counts: Sequence[int], places: int, steps: int = 1, room: int | None = None) -> np.ndarray:
    """Returns which row lies in each place of a batch of consecutive rows: an array (replicas, places).

    Args:
      counts: number of rows per replica.
      places: number of rows that each replica has room for, at least the largest of `counts`.
      steps: number of such batches that follow each other.
      room: number of steps that a stack of them has room for, for an array (replicas, room, places). The last step fills the rest.

    Example:
      >>> split([2, 1], places=2).tolist()
      [[0, 1], [2, 2]]
      >>> split([1, 1], places=1, steps=2, room=3).tolist()
      [[[0], [2], [2]], [[1], [3], [3]]]
    """
    ends = np.cumsum(counts)[:, None]
    # Pad with a real row instead of zeros: a function that is finite on the data, such as a logarithm, is then also finite
    # on the padding, and its gradient has no NaN.
    rows = ends - np.asarray(counts)[:, None] + np.arange(places)
    index: np.ndarray = np.where(rows < ends, rows, max(0, sum(counts) - 1))
    if room is not None:
        index = index[:, None] + np.minimum(np.arange(room), steps - 1)[:, None] * sum(counts)
    return index
