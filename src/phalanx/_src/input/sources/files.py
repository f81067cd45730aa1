# SPDX-License-Identifier: Apache-2.0
"""Sources of records in files. A worker reads whole files (FILE), or its own rows of all files (DATA)."""

import functools
import glob
import gzip
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import jax
from typing_extensions import override

from phalanx._src.input.shard import InputWorker, shares
from phalanx._src.input.sources.base import (
    AbstractReader,
    AbstractRows,
    AbstractSource,
    Facts,
    Owner,
    Piece,
    State,
    check_batch_size,
    check_count,
    num_rows,
    stack,
    state_entry,
)
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InputError, arguments, shown

Reader = Callable[[str], Any]
"""Maps the path of a file to its records: an object with `len` and `[]`, or an iterable."""


@final
class Files(AbstractRows):
    """A dataset of the records in files, not yet batched. `phalanx.data.from_files` creates it.

    May be used in any context.

    Args:
      paths: paths of the files, in the order in which they are read.
      reader: maps a path to the records of that file.
      interleave: number of files that are read at a time, one record from each in turn.
    """

    def __init__(self, paths: Sequence[str], reader: Reader, interleave: int) -> None:
        self.paths, self.reader, self.interleave = tuple(paths), reader, interleave

    @override
    def batch(self, batch_size: int, *, drop_remainder: bool = False) -> "FileRecords":
        return FileRecords(self, batch_size, drop_remainder=drop_remainder)

    def __repr__(self) -> str:
        return f"{len(self.paths)} files"


def from_files(
    pattern: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], reader: Reader, *, interleave: int = 1
) -> Files:
    """Creates a dataset of the records in files, which several workers can share file by file. May be called in any context.

    Under `AutoShardPolicy.FILE`, and under AUTO if there are at least as many files as workers, worker w of W reads the files
    w, w + W, ... Pass the dataset to `Strategy.experimental_distribute_dataset` with a `batch_size`.

    Args:
      pattern: a glob pattern, whose matches are sorted by name, or a list of paths.
      reader: maps a path to the records of that file. Records are pytrees of arrays or numbers with equal shapes. If the
        result has `len` and `[]` (a Grain `ArrayRecordDataSource` or `MapDataset`, a NumPy array), a worker reads only the
        records it needs. If it is another iterable (a generator, a Grain `IterDataset`), a worker reads all records and
        skips those of other workers. The reader must return the same records at each call.
      interleave: number of files that are read at a time, one record from each in turn.

    Returns:
      The dataset.

    Raises:
      InputError: no file matches, or a path is listed twice.
      InvalidArgumentError: `interleave` is less than 1, or another argument has the wrong type.

    Example:
      >>> import os, phalanx
      >>> folder = os.path.dirname(phalanx.__file__)
      >>> phalanx.data.from_files(folder + "/dat*.py", lambda path: open(path).readlines())
      1 files
    """
    paths = _paths(pattern)
    arguments.function("reader", reader, "phalanx.data.from_files(pattern, lambda path: open(path).readlines())")
    if not paths:
        raise InputError(
            f"from_files({shown(pattern)})",
            f"no file matches. The current directory is {os.getcwd()}.",
            "a pattern such as 'data/*.tfrecord'",
        )
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise InputError(f"from_files of {len(paths)} paths", f"{twice} is listed twice.", "sorted(set(paths))")
    arguments.integer("interleave", interleave)
    return Files(paths, reader, interleave)


def _paths(pattern: object) -> list[str]:
    """Returns the paths that a pattern matches, or the listed paths."""
    if isinstance(pattern, (str, os.PathLike)):
        # `glob` keeps the order of the file system, which may differ between workers.
        return sorted(glob.glob(arguments.path("pattern", pattern)))
    # An array without dims is an Iterable, too.
    if not isinstance(pattern, Iterable) or isinstance(pattern, jax.Array) or getattr(pattern, "shape", None) == ():
        return [arguments.path("pattern", pattern)]
    # Check path by path instead of building a list first, because an iterable that is not of paths may be infinite.
    return [arguments.path("a path of pattern", path) for path in pattern]


@final
class FileRecords(AbstractSource):
    """Global batches of records in files.

    Args:
      files: the files, with their reader.
      batch_size: global batch size in rows.
      drop_remainder: whether to drop a short last batch.
    """

    def __init__(self, files: Files, batch_size: int, *, drop_remainder: bool = False) -> None:
        self._files, self._batch_size, self._drop = files, check_batch_size(batch_size), drop_remainder

    @property
    @override
    def facts(self) -> Facts:
        return Facts(batch_size=self._batch_size, is_full=self._drop, files=self._files.paths, owner=Owner.NOBODY)

    @override
    def resized(self, batch_size: int) -> "FileRecords":
        return FileRecords(self._files, batch_size, drop_remainder=self._drop)

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        num_files, by_file = len(self._files.paths), policy is AutoShardPolicy.FILE
        indices = worker.files(num_files) if by_file else range(num_files)
        walk = _Walk(self._files, indices, self.start(state))
        if by_file:
            return _FileReader(walk, worker, self._batch_size, drop_remainder=self._drop)
        return _SharedReader(walk, worker, self._batch_size, drop_remainder=self._drop)

    @override
    def start(self, state: State | None) -> list[int]:
        count = len(self._files.paths)
        consumed = state_entry(state, "files", [0] * count)
        if not isinstance(consumed, list) or len(consumed) != count:
            raise InputError(
                f"set_state of {len(consumed) if isinstance(consumed, list) else repr(consumed)} files",
                f"this dataset has {count}.",
                "from_files with the same files",
            )
        # A new list, because the walk changes it, and the position belongs to the caller.
        return [check_count(n, "record") for n in consumed]


class _Walk(Iterator[Callable[[], Any]]):
    """Iterates over the records of some files. Of the open files, the one with the fewest records consumed is next.

    The order therefore depends only on `consumed`, which is the whole position. The items are functions that read a record, so
    that the records of other workers are not read if the file has random access.

    Args:
      files: the files, with their reader.
      own: indices of the files to read.
      consumed: number of records consumed, per file of the dataset.
    """

    def __init__(self, files: Files, indices: Sequence[int], consumed: list[int]) -> None:
        self._files, self.consumed = files, consumed
        self._blocks = [indices[i : i + files.interleave] for i in range(0, len(indices), files.interleave)]
        self._open: dict[int, Iterator[Callable[[], Any]]] = {}

    @override
    def __next__(self) -> Callable[[], Any]:
        while self._blocks:
            if not self._open:
                self._open = {i: self._records(i) for i in self._blocks[0]}
            while self._open:
                number = min(self._open, key=lambda i: (self.consumed[i], i))
                record = next(self._open[number], None)
                if record is not None:
                    self.consumed[number] += 1
                    return record
                del self._open[number]
            del self._blocks[0]
        raise StopIteration

    def _records(self, number: int) -> Iterator[Callable[[], Any]]:
        """Yields the records of one file that are not yet consumed."""
        path, start = self._files.paths[number], self.consumed[number]
        if not os.path.exists(path):
            raise InputError(
                f"the file {path}",
                "the file has disappeared since the dataset was created.",
                "call phalanx.data.from_files(pattern, reader) again",
            )
        try:
            records = self._files.reader(path)
            if hasattr(records, "__len__") and hasattr(records, "__getitem__"):
                yield from (functools.partial(records.__getitem__, i) for i in range(start, len(records)))
            else:
                yield from (functools.partial(_same, record) for record in itertools.islice(records, start, None))
        except (zlib.error, gzip.BadGzipFile, EOFError) as e:  # A cut file ends in EOFError.
            raise InputError(
                f"the file {path}", f"its content is damaged or truncated: {e}", "restore the file from a good copy"
            ) from e


def _same(record: Any) -> Any:
    return record


@final
class _FileReader(AbstractReader):
    """Reads a worker's share of every global batch from the worker's own files."""

    def __init__(self, walk: _Walk, worker: InputWorker, batch_size: int, *, drop_remainder: bool) -> None:
        # If the batch is so small that this worker gets no rows of it, the worker still reads one row per step. Otherwise
        # its files would never be read.
        self._walk, self._shares = (
            walk,
            worker.shares(batch_size) if worker.rows(batch_size) else shares(1, worker.replicas),
        )
        self._alone, self._drop = worker.count == 1, drop_remainder

    @override
    def read(self) -> Piece | None:
        size = sum(self._shares)
        batch = stack((record() for record in self._walk), size)
        rows = 0 if batch is None else num_rows(batch)
        if batch is None or (self._drop and rows < size):
            return None
        counts = self._shares if rows == size else shares(rows, len(self._shares))
        return Piece([batch], counts, rows if self._alone else None)

    @override
    def get_state(self) -> State:
        return {"files": list(self._walk.consumed)}


@final
class _SharedReader(AbstractReader):
    """Reads a worker's rows of every global batch, from all files."""

    def __init__(self, walk: _Walk, worker: InputWorker, batch_size: int, *, drop_remainder: bool) -> None:
        self._walk, self._worker, self._batch_size, self._drop = walk, worker, batch_size, drop_remainder

    @override
    def read(self) -> Piece | None:
        group = list(itertools.islice(self._walk, self._batch_size))
        if not group or (self._drop and len(group) < self._batch_size):
            return None
        # A worker without rows reads the first one, as padding.
        rows = self._worker.rows(len(group)) or range(1)
        return Piece([stack((group[i]() for i in rows), len(rows))], self._worker.shares(len(group)), len(group))

    @override
    def get_state(self) -> State:
        return {"files": list(self._walk.consumed)}
