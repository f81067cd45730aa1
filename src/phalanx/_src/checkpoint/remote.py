# SPDX-License-Identifier: Apache-2.0
"""Files in folders of object stores, such as `gs://bucket/run`, where some operations differ from those on a disk.

Paths of such folders are those of universal_pathlib, which act as paths of `pathlib`. Stores have no locks, no links, and no unfinished
files: an object is there completely or not at all.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple, cast

from phalanx.errors import CheckpointError, InvalidArgumentError, MissingDependencyError

_PROBE = ".phalanx-may-write"


class FileStatus(NamedTuple):
    """The status of a file of a store, with the names of `os.stat_result`.

    Args:
      st_mtime: the time of its last change, in seconds.
      st_size: its size in bytes.
    """

    st_mtime: float
    st_size: int


def path_from(name: str | os.PathLike[str] | Path) -> Path:
    """Returns the path of a file or folder on a disk, or in a store if its name begins with `scheme://`.

    Raises:
      InvalidArgumentError: nobody knows the scheme.
      CheckpointError: the store does not answer.
      MissingDependencyError: the library that reads stores, or that of this store, is not installed.
    """
    if not isinstance(name, str | os.PathLike):
        return name  # It is such a path already.
    text = os.fspath(name)
    scheme, mark, rest = text.partition("://")
    if not mark or len(scheme) < 2:  # "C" is the name of a disk.
        return Path(text)
    if scheme == "file":
        return Path(rest)
    package = _PACKAGES.get(scheme, "")
    try:
        import upath

        # Other processes write there too, so nothing that was listed before is remembered.
        path = cast(Path, upath.UPath(text, use_listings_cache=False))
        _place_of(path)
    except ImportError as e:
        raise MissingDependencyError(
            text, f"it needs a package: {e}.", f"pip install universal-pathlib {package}"
        ) from e
    except ValueError as e:
        raise InvalidArgumentError(text, f"is no folder of a store: {e}.", "gs://bucket/folder") from e
    # The libraries of some stores connect, or open an archive, and raise errors of many classes.
    except Exception as e:
        raise CheckpointError(
            text,
            f"the store cannot be opened: {type(e).__name__}: {e}.",
            "check its name, and the credentials of this machine",
        ) from e
    return path


_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs", "abfs": "adlfs"}
"""The packages with which fsspec reads some stores."""


def is_remote(path: Path) -> bool:
    """Returns whether a path is one of a store."""
    return not isinstance(path, Path)


def absolute(path: Path) -> Path:
    """Returns a path that does not depend on the working directory."""
    return path if is_remote(path) else path.absolute()


def _place_of(path: Path) -> tuple[Any, str]:
    """Returns the store of a path, and the path in it."""
    return path.fs, path.path  # type: ignore[attr-defined]


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Returns a context in which the libraries of stores raise `OSError` instead of errors of other classes."""
    try:
        yield
    except OSError:
        raise
    except Exception as e:
        raise OSError(f"{type(e).__name__}: {e}") from e


@contextlib.contextmanager
def new_file(file: Path) -> Iterator[BufferedWriter]:
    """Opens a file that is copied to the store when it is complete.

    Raises:
      OSError: it cannot be written.
    """
    store, path = _place_of(file)
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        local = Path(folder) / file.name
        with open(local, "xb") as opened:
            yield opened
        with as_os_error():
            store.put_file(str(local), path)


def require_writable(folder: Path) -> None:
    """Checks that a file can be written into a folder, by doing so.

    Raises:
      OSError: it cannot.
    """
    store, path = _place_of(folder / _PROBE)
    with as_os_error():
        store.pipe_file(path, b"")
        store.rm_file(path)


def status_of(file: Path) -> os.stat_result | FileStatus:
    """Returns the status of a file on a disk or in a store.

    Raises:
      OSError: there is none, or the store does not answer.
    """
    if not is_remote(file):
        return file.lstat()
    store, path = _place_of(file)
    with as_os_error():
        return FileStatus(store.modified(path).timestamp(), int(store.size(path)))


def read_into(file: Path, memory: memoryview, begin: int) -> int:
    """Fills memory with the bytes of a file from `begin` on. Returns their number.

    Raises:
      OSError: the store does not answer.
    """
    store, path = _place_of(file)
    with as_os_error():
        data: bytes = store.cat_file(path, start=begin, end=begin + len(memory))
    memory[: len(data)] = data
    return len(data)
