# SPDX-License-Identifier: Apache-2.0
"""Which worker reads which files and records, and which replica gets which rows: arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Worker:
    """One worker's place among all.

    Args:
      index: which worker it is, from 0.
      count: how many workers there are.
      replicas: how many replicas each of them has.

    Example:
      >>> [Worker(i, 2, 2).rows(7) for i in range(2)]
      [range(0, 4), range(4, 7)]
    """

    index: int = 0
    count: int = 1
    replicas: int = 1

    @cached_property
    def num_replicas(self) -> int:
        """How many replicas all workers have together."""
        return self.count * self.replicas

    @property
    def is_chief(self) -> bool:
        """Whether it speaks for all."""
        return self.index == 0

    def shares(self, rows: int) -> list[int]:
        """Returns how many rows of a global batch each of its replicas gets."""
        return shares(rows, self.num_replicas)[self._own]

    def rows(self, rows: int) -> range:
        """Returns its rows of a global batch of `rows` rows; the workers' ranges follow each other."""
        start = sum(shares(rows, self.num_replicas)[: self._own.start])
        return range(start, start + sum(self.shares(rows)))

    def files(self, num_files: int) -> range:
        """Returns its files under FILE: `index`, `index + count`, ..."""
        return range(self.index, num_files, self.count)

    @property
    def _own(self) -> slice:
        first = self.index * self.replicas
        return slice(first, first + self.replicas)


@dataclass(frozen=True)
class Split:
    """How rows are laid out on replicas.

    Args:
      index: `(num_replicas, places)`; the row at each place, any row where it is padded.
      mask: the same shape; whether the place holds a real row.
    """

    index: np.ndarray
    mask: np.ndarray


def shares(rows: int, num_replicas: int) -> list[int]:
    """Returns how many rows each replica gets; they differ by at most one.

    Example:
      >>> shares(7, 3)
      [3, 2, 2]
    """
    return [rows // num_replicas + (replica < rows % num_replicas) for replica in range(num_replicas)]


def split(counts: Sequence[int], places: int) -> Split:
    """Lays out consecutive rows, `counts` for each replica, in `places` places each.

    Example:
      >>> split([2, 1], places=2).mask.tolist()
      [[True, True], [True, False]]
      >>> split([2, 1], places=2).index.tolist()
      [[0, 1], [2, 2]]
    """
    counts_of = np.asarray(counts)[:, None]
    place = np.arange(places)[None, :]
    starts = np.cumsum(counts_of, axis=0) - counts_of
    mask = place < counts_of
    # A real row pads better than zeros: no function that is finite on the data becomes infinite on the padding.
    index = np.where(mask, starts + place, max(0, sum(counts) - 1))
    return Split(index, mask)


def places(batch_size: int, num_replicas: int) -> int:
    """Returns how many rows one replica needs room for, at least one.

    Example:
      >>> places(7, 3)
      3
    """
    return max(1, -(-batch_size // num_replicas))
