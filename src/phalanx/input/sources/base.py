# SPDX-License-Identifier: Apache-2.0
"""What all sources have in common: readers of one worker's rows, and the arrays they hand out."""

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx.errors import InputError, arguments, shown
from phalanx.input.shard import Worker
from phalanx.mesh import arrays
from phalanx.options import AutoShardPolicy

INFINITE = -1
UNKNOWN = -2

State = Mapping[str, Any]
"""A position in a source: numbers, strings, bytes, lists and dicts of them."""


class Piece(NamedTuple):
    """What one worker reads for one step.

    Args:
      parts: batches on the host: one, whose rows its replicas share, or one for each replica. Where no row is its, the one
        has a row of somebody else's, to pad with.
      counts: how many rows each of its replicas gets.
      rows: how many rows all workers have together; None where each knows only its own.
    """

    parts: Sequence[Any]
    counts: Sequence[int]
    rows: int | None


class AbstractReader(ABC):
    """One pass of one worker over a source. It is used by one thread at a time."""

    @abstractmethod
    def read(self) -> Piece | None:
        """Returns the next piece; None at the end, again and again."""

    @abstractmethod
    def get_state(self) -> State:
        """Returns the position after the last piece."""


@dataclass(frozen=True)
class Facts:
    """What is known of a source before it is read.

    Args:
      batch_size: the rows of a full global batch; None where the first batch tells.
      is_full: whether no batch has fewer.
      num_batches: how many global batches there are, INFINITE or UNKNOWN.
      num_records: how many rows there are, if that is known.
      files: the files it reads.
      has_random_access: whether a worker reads no rows but its own.
      is_in_memory: whether reading cannot fail.
      is_borrowed: whether others may change the arrays of a batch after it was read.
      one_layout: whether all batches are padded to one layout, so that one program takes them all; else each is padded no
        further than the replicas need, and a shorter one has a program of its own.
    """

    batch_size: int | None = None
    is_full: bool = False
    num_batches: int = UNKNOWN
    num_records: int | None = None
    files: tuple[str, ...] = field(default=(), repr=False)
    has_random_access: bool = False
    is_in_memory: bool = False
    is_borrowed: bool = False
    one_layout: bool = True


class AbstractSource(ABC):
    """A dataset that can be read again and again, from any position."""

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """What is known before it is read."""

    @abstractmethod
    def open(self, worker: Worker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        """Starts a pass.

        Args:
          worker: who reads.
          policy: FILE or DATA.
          state: where to start; None is the beginning.
        """


def state_entry(state: State | None, key: str, default: Any, *, beside: tuple[str, ...] = ()) -> Any:
    """Returns one entry of a position.

    Args:
      state: the position; None is the beginning.
      key: the name of the entry.
      default: the entry of the beginning.
      beside: the names of the other entries.

    Raises:
      InputError: it is the position of another kind of source.
    """
    if state is None:
        return default
    if not isinstance(state, Mapping) or key not in state or set(state) - {key, *beside}:
        raise InputError(
            f"set_state({shown(state, 200)})",
            f"this source keeps its position as {' and '.join(map(repr, (key, *beside)))}.",
            "a state that get_state of the same kind of dataset returned",
        )
    return state[key]


def check_count(value: Any, name: str, most: int = sys.maxsize) -> int:
    """Returns a number in a position.

    Args:
      value: what the position holds.
      name: what it counts.
      most: the largest that there can be, if that is known.

    Raises:
      InputError: it is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= most:
        found = "a position counts from 0." if most == sys.maxsize else f"this dataset has {most}."
        raise InputError(
            f"set_state of {name} {shown(value, 50)}", found, "a state that get_state of the same data returned"
        )
    return int(value)


def check_batch_size(batch_size: Any) -> int:
    """Returns `batch_size`.

    Raises:
      InvalidArgumentError: it is no positive integer.
    """
    kind = "an integer of at least 1, and less than 2**31"
    return arguments.integer("batch_size", batch_size, most=2**31 - 1, kind=kind, hint="batch_size=64")


def to_host(batch: Any, *, copy: bool = False) -> Any:
    """Returns a batch with NumPy arrays for leaves; arrays of JAX stay as they are.

    Args:
      batch: a pytree of arrays, or of tensors of another library.
      copy: whether somebody else may write into the same arrays again.

    Raises:
      InputError: a leaf is no array that JAX can hold.
    """
    host = arrays.to_host(batch, "a batch")
    return jax.tree.map(arrays.copied, host) if copy else host


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
      InputError: it has no arrays, scalars, text, or arrays with different numbers of rows.
    """
    leaves = jax.tree.leaves(batch)
    shapes = [np.shape(leaf) for leaf in leaves]
    if not shapes or () in shapes:
        raise InputError(
            f"a batch of shapes {shapes}",
            "every leaf must be an array (global_batch, ...).",
            "group the rows into batches first, or give batch_size=64 for a dataset of single rows",
        )
    for leaf in leaves:
        _check_numbers(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
    if any(shape[0] != shapes[0][0] for shape in shapes):
        counts = sorted({shape[0] for shape in shapes})
        raise InputError(
            f"a batch of shapes {shapes}", f"its leaves have {counts} rows.", "one number of rows for all leaves"
        )
    return int(shapes[0][0])


def stack(records: Iterable[Any], size: int) -> Any | None:
    """Makes one batch of up to `size` records; None if there is none.

    Each is copied before the next one is asked for: whoever makes them may write all of them into the same arrays.

    Raises:
      InputError: their structures or shapes differ, or a leaf is no array that JAX can hold.
    """
    tree, columns = None, []
    for record in itertools.islice(records, size):
        leaves, other = jax.tree.flatten(record, is_leaf=arrays.is_sparse)
        if tree is None:
            tree, columns = other, [_Column(size) for _ in leaves]
        elif other != tree:
            raise InputError(
                "records of one batch", f"they have the structures {tree} and {other}.", "one structure for all records"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.add(leaf)
    return None if tree is None else to_host(tree.unflatten([column.rows for column in columns]))


def stack_leaf(column: Sequence[Any]) -> np.ndarray:
    """Makes one array of the rows of one column.

    Raises:
      InputError: their shapes differ, they are text, or numbers that do not fit.
    """
    rows = _Column(len(column))
    for row in column:
        rows.add(row)
    return to_host(rows.rows)  # type: ignore[no-any-return]


class _Column:
    """The rows of one leaf of a batch.

    Args:
      size: how many there are at most.
    """

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0
        self._rows: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The array of all rows."""
        return np.empty(0) if self._rows is None else self._rows[: self._count]

    def add(self, row: Any) -> None:
        """Copies one row."""
        row = row if isinstance(row, (np.ndarray, np.generic)) else arrays.to_host(row, "a record")
        row = arrays.to_numpy(row, "a record")
        if self._rows is None:
            _check_numbers(row)
            room = max(_FIRST_ROWS, _FIRST_BYTES // max(row.nbytes, 1))
            self._rows = arrays.empty((min(self._size, room), *row.shape), row.dtype)
        if row.shape != self._rows.shape[1:]:
            raise InputError(
                f"records of shapes {sorted({self._rows.shape[1:], row.shape})}",
                "the rows of one batch must have one shape.",
                "pad them to one length, and keep the lengths in another leaf",
            )
        dtype = row.dtype if row.dtype == self._rows.dtype else np.result_type(self._rows, row)
        if dtype != self._rows.dtype or self._count == len(self._rows):
            self._grow(dtype)
        self._rows[self._count] = row
        self._count += 1

    def _grow(self, dtype: Any) -> None:
        """Makes room for more rows, or for another dtype."""
        assert self._rows is not None
        size = min(self._size, max(len(self._rows), 2 * self._count))
        larger = arrays.empty((size, *self._rows.shape[1:]), dtype)
        larger[: self._count] = self._rows[: self._count]
        self._rows = larger


_FIRST_ROWS, _FIRST_BYTES = 16, 1 << 26


def _check_numbers(array: Any) -> None:
    """Raises InputError for text, dates and objects."""
    if getattr(array.dtype, "kind", "f") not in "OSUMm":
        return
    first = array.flat[0] if array.size else None
    if isinstance(first, (np.ndarray, list)):
        raise InputError(
            "a batch of rows of different lengths",
            "the rows of an array have one length.",
            "pad them to one length (x.to_tensor() of a tf.RaggedTensor), and keep the lengths in another leaf",
        )
    raise InputError(
        f"a batch of dtype {array.dtype}",
        "only numbers and bools can be placed on devices.",
        "encode the text first, for example dataset.map(vectorize)",
    )


def rows_of(batch: Any, rows: range, total: int) -> Any:
    """Returns some rows of a batch; the batch itself where they are all; the first row, as padding, where they are none."""
    if len(rows) == total:
        return batch
    start, stop = (rows.start, rows.stop) if rows else (0, 1)
    return jax.tree.map(lambda x: x[start:stop], batch)
