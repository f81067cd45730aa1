# SPDX-License-Identifier: Apache-2.0
"""Files that another user may have made: opens those that can be read to their end."""

import os
import stat
from io import FileIO
from pathlib import Path

_LARGE, _MOST_HOLES = 200_000_000, 100
"""From which size on a file must have been written, and at least which part of it: file systems that compress store less than all."""


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
