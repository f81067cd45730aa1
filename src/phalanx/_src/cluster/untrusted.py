# SPDX-License-Identifier: Apache-2.0
"""Files that another user may have made, and folders that another user may write to."""

import contextlib
import errno
import functools
import json
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TextIO

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
    stored = 512 * status.st_blocks  # Blocks of 512 bytes, whatever those of the file system are: see stat(2).
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


@contextlib.contextmanager
def opened_folder(folder: Path, below: Path | None = None, *, is_made: bool = False) -> Iterator[int]:
    """Opens a folder, so that what follows is done there even if something else takes its name.

    Args:
      folder: the folder.
      below: the folder around it that the user has chosen, if it is another one. Others may have put links into that one, which are not followed.
      is_made: whether folders that are missing are made.
    """
    root = below or folder
    if is_made:
        root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root, os.O_DIRECTORY)
    try:
        for part in folder.relative_to(root).parts:
            if is_made:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            # Another user may have put a link there since `mkdir`, or before. Only this call decides what is used.
            outer, descriptor = descriptor, os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(file: Path, below: Path | None = None) -> Iterator[BufferedWriter]:
    """Opens a file that takes its name when it is complete, in place of an older one. Its folder is made.

    Args:
      file: the file. Nothing is written through a link of its name.
      below: see `opened_folder`.

    Raises:
      OSError: it cannot be written, or its name is that of a link, a device or a pipe.
    """
    # Other users may be able to write into the folder: nobody knows the name before, and nothing is there yet.
    part = f".{file.name}.{secrets.token_hex(8)}.part"
    with opened_folder(file.parent, below, is_made=True) as folder:
        mode = _mode_of(file, folder)
        opener = functools.partial(os.open, mode=0o666, dir_fd=folder)
        try:
            with open(part, "xb", opener=opener) as opened:
                yield opened
                opened.flush()
                if mode is not None:
                    os.fchmod(opened.fileno(), mode)
                # Before the rename, so that after a loss of power the name never stands for a file without its contents.
                os.fsync(opened.fileno())
            # Atomic within one file system: readers find the whole file or none.
            os.replace(part, file.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)  # So that it survives a loss of power.
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)


def _mode_of(file: Path, folder: int) -> int | None:
    """Returns the permissions of the file that a new one replaces. None if there is none, or if it is of another user."""
    try:
        status = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EEXIST, "It is a link, a folder, a device or a pipe", str(file))
    return stat.S_IMODE(status.st_mode) if status.st_uid == os.geteuid() else None


def open_to_append(file: Path) -> TextIO:
    """Opens a file to which lines are appended, or a new one.

    Raises:
      OSError: it cannot be written, or is a link, a device or a pipe.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "It is a device or a pipe", str(file))
    return open(descriptor, "a", buffering=1, newline="", encoding="utf-8")


def most_memory(size: int) -> int:
    """Returns how many bytes of memory the values in a file of this size may fill."""
    return 3 * size + _LARGE


def require_memory(data: bytes, size: int) -> None:
    """Checks that the values in JSON need at most `most_memory`. `[],[]` needs 26 times its bytes.

    Args:
      data: the text, which is not parsed.
      size: the size of the file that contains it.

    Raises:
      ValueError: they need more.
    """
    # A character outside ASCII makes all characters of a text take four bytes each.
    needed = len(data) * (4 if data.isascii() else 10) + sum(cost * data.count(mark) for mark, cost in _COSTS.items())
    if needed > most_memory(size):
        raise ValueError(f"the values in its {len(data)} bytes of JSON would fill {needed / 1e9:.1f} GB of memory")


def parse_json(data: bytes, size: int = 0) -> PyTree:
    """Returns the values in JSON. See `require_memory`; without a `size`, the text is the whole file.

    Raises:
      RecursionError, ValueError: it is not JSON, or its values would fill the memory.
    """
    require_memory(data, max(size, len(data)))
    return json.loads(data)
