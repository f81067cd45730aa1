# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that is used again from batch to batch."""

import math
import threading
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

from phalanx._src.mesh.arrays import ALIGNMENT, aligned_bytes

# A smaller array costs less than to look for a block.
_SMALLEST_BYTES = 1 << 14
# After so many loans, a block that was not needed is given back to the system.
_IDLE_LOANS = 256


class Pool:
    """Lends memory for arrays, and lends it again when nobody refers to the array any more.

    Fresh memory makes a copy slow: the system fills each page with zeros when it is first written. A JAX array that shares the
    memory, or whose transfer reads it, refers to it, so nothing is lent twice.

    Any thread may call `empty`, and memory may come back in any thread.

    Example:
      >>> pool = Pool()
      >>> pool.empty((3, 5, 1000), np.float32).shape
      (3, 5, 1000)
    """

    def __init__(self) -> None:
        self._loans, self._lock = 0, threading.Lock()
        # Blocks that came back, with the number of loans before. The last are the first to be lent: caches may still hold them.
        self._free: deque[tuple[int, np.ndarray]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns an array whose entries along dim 0 are each contiguous, and aligned so that a CPU device can use them.

        Args:
          shape: shape of the array, of at least one dim.
          dtype: a dtype of numbers or bools.
        """
        dtype = np.dtype(dtype)
        entry_bytes = math.prod(shape[1:]) * dtype.itemsize
        if shape[0] * entry_bytes < _SMALLEST_BYTES:
            return np.empty(shape, dtype)
        stride = -(-entry_bytes // ALIGNMENT) * ALIGNMENT
        memory = np.asarray(_Loan(self._take(shape[0] * stride), self._free, self._loans))
        rows = memory[: shape[0] * stride].reshape(shape[0], stride)[:, :entry_bytes]
        return rows.view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> np.ndarray:
        """Returns a block of at least `num_bytes`, whose first byte is aligned."""
        # A block that comes back takes no lock: the garbage collector may give it back while this thread holds the lock.
        with self._lock:
            block = self._reused(num_bytes)
        return aligned_bytes(num_bytes) if block is None else block

    def _reused(self, num_bytes: int) -> np.ndarray | None:
        free = self._free
        self._loans += 1
        while free and free[0][0] < self._loans - _IDLE_LOANS:
            free.popleft()
        # Only this method removes blocks. One that comes back meanwhile is added at the end, so the indices stay right.
        for i in range(len(free) - 1, -1, -1):
            block = free[i][1]
            # At most half of a block may be unused.
            if num_bytes <= block.nbytes <= 2 * num_bytes:
                del free[i]
                return block
        return None


class _Loan:
    """The base of an array in a block of a pool. The block comes back when the last reference to the array has gone."""

    def __init__(self, block: np.ndarray, home: "deque[tuple[int, np.ndarray]]", number: int) -> None:
        self._block, self._home, self._number = block, home, number
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._home.append((self._number, self._block))
