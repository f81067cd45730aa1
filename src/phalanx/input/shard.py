# SPDX-License-Identifier: Apache-2.0
"""Which replica gets which rows: arithmetic only."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Split:
    """How the rows of one global batch are laid out on the replicas.

    Args:
      index: `(num_replicas, per_replica_batch)`; the row of the global batch at each place, any row where it is padded.
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


def split(rows: int, num_replicas: int) -> Split:
    """Lays out the rows of a batch in order, padded to equal shares of at least one place.

    Example:
      >>> split(3, 2).mask.tolist()
      [[True, True], [True, False]]
    """
    counts = np.array(shares(rows, num_replicas))
    place = np.arange(max(1, counts.max()))
    starts = np.cumsum(counts) - counts
    mask = place[None, :] < counts[:, None]
    # A real row pads better than zeros: no function that is finite on the data becomes infinite on the padding.
    index = np.where(mask, starts[:, None] + place[None, :], max(0, rows - 1))
    return Split(index, mask)
