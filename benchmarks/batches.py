# SPDX-License-Identifier: Apache-2.0
"""The arrays that all input pipelines read. It needs NumPy only."""

from typing import Any

import numpy as np

WIDTH = 1024
ROW_BYTES = 4 * WIDTH
_ALIGNMENT = 64
_TOTAL_BYTES, _MOST_BATCHES = 128 << 20, 512


def rows_of(batch_bytes: int) -> int:
    """Returns how many rows a batch of about so many bytes has."""
    return batch_bytes // ROW_BYTES


def count_of(batch_bytes: int) -> int:
    """Returns of how many such batches a pass is."""
    return min(_MOST_BATCHES, _TOTAL_BYTES // batch_bytes)


def arrays(batch_bytes: int, *, aligned: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples and labels for one pass.

    Args:
      batch_bytes: the size of a batch.
      aligned: whether they begin at a multiple of 64 bytes: then `jax.device_put` makes no copy on the CPU. What NumPy
        allocates begins 16 bytes after one, if it is large.
    """
    rows = count_of(batch_bytes) * rows_of(batch_bytes)
    x = _empty((rows, WIDTH), "float32", 0 if aligned else 16)
    y = _empty((rows,), "int32", 0 if aligned else 16)
    x[:] = np.random.default_rng(0).random((1, WIDTH), dtype="float32")
    y[:] = np.arange(rows)
    return x, y


def _empty(shape: tuple[int, ...], dtype: str, offset: int) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 2 * _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT + offset
    return buffer[start : start + size].view(dtype).reshape(shape)
