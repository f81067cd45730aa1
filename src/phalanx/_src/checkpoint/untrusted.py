# SPDX-License-Identifier: Apache-2.0
"""Files that another user may have made: whether it is safe to read all of one."""

import stat
from pathlib import Path

_LARGE, _MOST_HOLES = 200_000_000, 100
"""From which size on a file must have been written, and at least which part of it: file systems that compress store less than all."""


def is_data(file: Path) -> bool:
    """Returns whether a file can be read to its end: no device or pipe, which may have none, and not made of holes."""
    try:
        return stat.S_ISREG(file.stat().st_mode) and not is_of_holes(file)
    except OSError:
        return False


def is_of_holes(file: Path) -> bool:
    """Returns whether most of a large file was never written. Its zeros would fill the memory."""
    size = file.stat().st_size
    return size > _LARGE and bytes_on_disk(file) * _MOST_HOLES < size


def bytes_on_disk(file: Path) -> int:
    """Returns how many bytes of a file are stored. The rest are holes, which read as zeros."""
    return 512 * file.stat().st_blocks
