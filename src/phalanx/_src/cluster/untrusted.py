# SPDX-License-Identifier: Apache-2.0
"""Files that another user may have made, and folders that another user may write to."""

import json
import os
import stat
from io import FileIO
from pathlib import Path

from phalanx.typing import PyTree

_LARGE, _MOST_HOLES = 200_000_000, 100
"""From which size on a file must have been written, and at least which part of it: file systems that compress store less than all."""

_COSTS = {b"[": 200, b"{": 300, b",": 80, b":": 110, b"\\u": 100}
"""The most memory that Python needs for what follows each of these bytes in JSON, and for a copy. An escape may stand for any of the others."""


class SparseFileError(ValueError):
    """Most of a large file was never written. Its zeros would fill the memory."""


def open_data(file: Path) -> FileIO:
    """Opens a file that can be read to its end. Later reads are of this file, even if another one takes its name.

    Raises:
      OSError: it cannot be opened.
      SparseFileError: most of it was never written.
      ValueError: it is a device or a pipe, which may have no end.
    """
    # The opening of a pipe would wait for its other end.
    opened = FileIO(file, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    status = os.fstat(opened.fileno())
    # The rest of its size are holes, which read as zeros.
    stored = 512 * status.st_blocks
    if not stat.S_ISREG(status.st_mode):
        opened.close()
        raise ValueError("it is a device or a pipe")
    if status.st_size > _LARGE and stored * _MOST_HOLES < status.st_size:
        opened.close()
        raise SparseFileError(f"of its {status.st_size} bytes, only {stored} were ever written")
    return opened


def read_data(file: Path) -> bytes:
    """Returns the contents of a file.

    Raises:
      OSError, ValueError: see `open_data`.
    """
    with open_data(file) as opened:
        return opened.readall()


def require_memory(data: bytes, size: int) -> None:
    """Checks that the values in JSON need at most three times the memory of their file, and 200 MB. `[],[]` needs 26 times its bytes.

    Args:
      data: the text, which is not parsed.
      size: the size of the file that contains it.

    Raises:
      ValueError: they need more.
    """
    # A character outside ASCII makes all characters of a text take four bytes each.
    needed = len(data) * (4 if data.isascii() else 10) + sum(cost * data.count(mark) for mark, cost in _COSTS.items())
    if needed > 3 * size + _LARGE:
        raise ValueError(f"the values in its {len(data)} bytes of JSON would fill {needed / 1e9:.1f} GB of memory")


def parse_json(data: bytes, size: int = 0) -> PyTree:
    """Returns the values in JSON. See `require_memory`; without a `size`, the text is the whole file.

    Raises:
      RecursionError, ValueError: it is not JSON, or its values would fill the memory.
    """
    require_memory(data, max(size, len(data)))
    return json.loads(data)
