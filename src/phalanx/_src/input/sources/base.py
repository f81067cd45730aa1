# SPDX-License-Identifier: Apache-2.0
"""The interface of sources and readers, and helpers that check and stack rows."""

import enum
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx._src.input.shard import InputWorker
from phalanx._src.mesh import arrays
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InputError, arguments, shown
from phalanx.typing import PyTree

# The numbers that `tf.data.Dataset.cardinality` returns.
INFINITE = -1
UNKNOWN = -2

State = Mapping[str, Any]
"""A position in a source: a dict of numbers, strings, bytes, lists and dicts, so that it can be saved as text."""


class Piece(NamedTuple):
    """One worker's rows for one step.

    Args:
      parts: batches on the host: either one for all local replicas, or one per local replica. If this worker has no rows,
        the part holds one row of another worker, used as padding.
      counts: number of rows per local replica.
      rows: number of rows of the global batch. None if each worker knows only its own.
    """

    parts: Sequence[Any]
    counts: Sequence[int]
    rows: int | None


class Owner(enum.Enum):
    """Who owns the memory of the batches that a source reads, and until when."""

    # The caller, forever: arrays and lists, to which the caller's code may write between two batches.
    CALLER = "caller"
    # The caller, or a library, until the next read: a generator may write the next batch into the same arrays.
    UNTIL_READ = "until read"
    # Nobody writes to it again: the reader has made it for this batch, or it cannot be written to.
    NOBODY = "nobody"


class AbstractReader(ABC):
    """One pass of one worker over a source. Used by one thread at a time."""

    @abstractmethod
    def read(self) -> Piece | None:
        """Returns the next piece, or None at the end and on every later call."""

    @abstractmethod
    def get_state(self) -> State:
        """Returns the position after the last piece."""


@dataclass(frozen=True)
class Facts:
    """What is known about a source before reading.

    Args:
      batch_size: rows of a full global batch. None if it is unknown before the first batch.
      is_full: whether all batches have that size.
      num_batches: number of global batches, INFINITE or UNKNOWN.
      num_records: number of rows. None if it is unknown.
      files: paths of the files that the source reads.
      has_random_access: whether a worker can read its own rows only.
      is_in_memory: whether the rows are in memory, so that reading is cheap and cannot fail.
      owner: who owns the memory of the batches.
      is_begun: whether the caller's thread has begun to read, or makes what is read, as for Keras's adapters. What belongs to that
        thread, such as the connection of a database, works in no other.
      whole: the facts about the source whose batches these are parts of. None if they are whole.
    """

    batch_size: int | None = None
    is_full: bool = False
    num_batches: int = UNKNOWN
    num_records: int | None = None
    files: tuple[str, ...] = field(default=(), repr=False)
    has_random_access: bool = False
    is_in_memory: bool = False
    owner: Owner = Owner.UNTIL_READ
    is_begun: bool = False
    whole: "Facts | None" = None


class AbstractSource(ABC):
    """A dataset that can be read several times, from any position."""

    _notes_first = False

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """What is known about the source before reading."""

    @abstractmethod
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        """Starts a pass.

        Args:
          worker: the worker that reads.
          policy: FILE or DATA.
          state: position to start from. None for the beginning.

        Returns:
          A reader of this worker's rows.

        Raises:
          InputError: `state` is not a position of this source.
        """

    @abstractmethod
    def start(self, state: State | None) -> PyTree:
        """Returns the contents of a position, in the form that this source needs. Reads nothing.

        Args:
          state: a position. None for the beginning.

        Raises:
          InputError: `state` is not a position of this source.
        """

    def note_first(self) -> None:
        """Makes later passes note a digest of their first batch, if their order may not follow from the position."""
        self._notes_first = True

    @property
    def first(self) -> bytes:
        """8 bytes: the digest of the first batch of the pass that was opened last. Zeros if it was not noted."""
        return bytes(8)

    def resized(self, batch_size: int) -> "AbstractSource | None":
        """Returns the same rows in batches of another size, with the same positions. None if positions count batches."""
        return None


class AbstractRows(ABC):
    """A dataset of single rows, which becomes a source once the global batch size is known."""

    @abstractmethod
    def batch(self, batch_size: int, *, drop_remainder: bool = False) -> AbstractSource:
        """Returns a dataset of global batches with the same rows."""


@dataclass(frozen=True)
class Batching:
    """What a user asked for besides the dataset.

    Args:
      batch_size: global batch size in rows, for a dataset of single rows. None for a dataset of global batches.
      drop_remainder: whether to drop a short last batch.

    Raises:
      InvalidArgumentError: `batch_size` is not a positive integer below 2**31.
    """

    batch_size: int | None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_batch_size(self.batch_size)

    def require_size(self, dataset: object) -> int:
        """Returns the batch size, which `dataset` needs.

        Raises:
          InputError: there is none.
        """
        if self.batch_size is None:
            raise InputError(
                f"dataset={type(dataset).__name__}",
                "a dataset of single rows needs a global batch size.",
                "pass batch_size=64",
            )
        return self.batch_size

    def refuse_size(self, dataset: object) -> None:
        """Rejects a batch size, because `dataset` yields batches already.

        Raises:
          InputError: there is one.
        """
        if self.batch_size is not None:
            raise InputError(
                f"batch_size={self.batch_size} for a {type(dataset).__name__}",
                "the dataset already yields batches, which are the global batches.",
                "omit batch_size",
            )


def state_entry(state: State | None, key: str, default: Any, *, beside: tuple[str, ...] = ()) -> PyTree:
    """Returns one entry of a position.

    Args:
      state: the position. None for the beginning.
      key: name of the entry.
      default: value of the entry at the beginning.
      beside: names of the other entries of such a position.

    Raises:
      InputError: `state` is a position of another kind of source.
    """
    if state is None:
        return default
    if not isinstance(state, Mapping) or key not in state or set(state) - {key, *beside}:
        raise InputError(
            f"set_state({shown(state, 200)})",
            f"a position of this dataset has the entries {' and '.join(map(repr, (key, *beside)))}.",
            "a state that get_state of the same kind of dataset returned",
        )
    return state[key]


def check_count(value: object, name: str, most: int = sys.maxsize) -> int:
    """Returns `value`, a count in a position, as an int.

    Args:
      value: entry of the position.
      name: what is counted, for the message.
      most: largest count that the data allows.

    Raises:
      InputError: `value` is not an integer from 0 to `most`.
    """
    if not arguments.is_integer(value, 0, most):
        problem = "must be an integer of at least 0." if most == sys.maxsize else f"this dataset has only {most}."
        raise InputError(
            f"set_state of {name} {shown(value, 50)}", problem, "a state that get_state of the same data returned"
        )
    return int(value)


def check_batch_size(batch_size: object) -> int:
    """Returns `batch_size`.

    Raises:
      InvalidArgumentError: `batch_size` is not a positive integer below 2**31.
    """
    kind = "an integer of at least 1, and less than 2**31"
    return arguments.integer("batch_size", batch_size, most=2**31 - 1, kind=kind, hint="batch_size=64")


def to_host(batch: PyTree) -> PyTree:
    """Returns a batch with NumPy arrays as leaves. JAX arrays are not converted.

    Args:
      batch: a pytree of arrays, or of tensors of another library.

    Raises:
      InputError: a leaf is not an array that JAX can hold.
    """
    return arrays.to_host(batch, "a batch")


_NUM_ROWS = itemgetter(0)
# Kinds of dtypes that need no further look. `num_rows` runs for every batch.
_NUMBERS, _OBJECT = "fiub", np.dtype(object)


def num_rows(batch: PyTree) -> int:
    """Returns the number of rows of a batch.

    Raises:
      InputError: the batch has no arrays, or contains scalars, text, or arrays with different numbers of rows.
    """
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise no_array("a batch", batch)
    shapes = list(map(np.shape, leaves))
    if () in shapes:
        raise InputError(
            f"a batch of shapes {shapes}",
            "every leaf must be an array (global_batch, ...).",
            "group the rows into batches first, or pass batch_size=64 for a dataset of single rows",
        )
    for leaf in leaves:
        if getattr(getattr(leaf, "dtype", _OBJECT), "kind", "f") not in _NUMBERS:
            _check_numbers(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
    if len({*map(_NUM_ROWS, shapes)}) > 1:
        counts = sorted({*map(_NUM_ROWS, shapes)})
        raise InputError(
            f"a batch of shapes {shapes}",
            f"its leaves have different numbers of rows: {counts}.",
            "use the same number of rows for all leaves",
        )
    return int(shapes[0][0])


def no_array(name: str, value: object) -> InputError:
    """Returns the error of a batch or a record that contains no array."""
    hint = "at least one array in each batch or record"
    return InputError(f"{name} {shown(value)}", "it contains no array, so it has no rows.", hint)


def stack(records: Iterable[Any], size: int) -> Any | None:
    """Stacks up to `size` records into one batch.

    Each record is copied before the next one is read, because a generator may write all records into the same arrays.

    Returns:
      A pytree of arrays (rows, ...). None if there is no record.

    Raises:
      InputError: the structures or shapes of the records differ, a record contains no array, or a leaf is not an array that JAX can hold.
    """
    tree, columns = None, []
    for record in itertools.islice(records, size):
        leaves, other = arrays.flattened(record, arrays.is_one_array)
        if tree is None:
            if not leaves:
                raise no_array("a record", record)
            tree, columns = other, [_Column(size) for _ in leaves]
        elif other != tree:
            raise InputError(
                "the records of one batch",
                f"they have different structures: {tree} and {other}.",
                "use one structure for all records",
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.add(leaf)
    # Refuses numbers that JAX arrays cannot hold: one look per column, instead of one per row.
    return None if tree is None else to_host(tree.unflatten([column.rows for column in columns]))


def stack_leaf(column: Sequence[Any]) -> np.ndarray:
    """Stacks the rows of one column into one array.

    Raises:
      InputError: the shapes of the rows differ, or a row is text or a number that does not fit its dtype.
    """
    rows = _Column(len(column))
    for row in column:
        rows.add(row)
    return to_host(rows.rows)  # type: ignore[no-any-return]


class _Column:
    """A growing array with the rows of one leaf of a batch.

    The final size is unknown, so the array doubles. Allocating `size` rows at once would waste memory if the data has fewer.

    Args:
      size: largest number of rows.
    """

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0
        self._rows: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The rows so far, as one array."""
        return np.empty(0) if self._rows is None else self._rows[: self._count]

    def add(self, row: Any) -> None:
        """Copies one row."""
        # Rows of NumPy skip `to_host`, which flattens each as a pytree.
        row = row if isinstance(row, (np.ndarray, np.generic)) else arrays.to_host(row, "a record")
        row = arrays.to_numpy(row, "a record")
        if self._rows is None:
            _check_numbers(row)
            room = max(_FIRST_ROWS, _FIRST_BYTES // max(row.nbytes, 1))
            self._rows = arrays.empty((min(self._size, room), *row.shape), row.dtype)
        if row.shape != self._rows.shape[1:]:
            raise InputError(
                f"records of shapes {sorted({self._rows.shape[1:], row.shape})}",
                "the rows of one batch must have the same shape.",
                "pad the rows to one length, and keep the lengths in another leaf",
            )
        # Python numbers of one column may be ints and floats, as in [1, 2.5]. The column takes the wider dtype.
        dtype = row.dtype if row.dtype == self._rows.dtype else np.result_type(self._rows, row)
        if dtype != self._rows.dtype or self._count == len(self._rows):
            self._grow(dtype)
        self._rows[self._count] = row
        self._count += 1

    def _grow(self, dtype: np.dtype) -> None:
        """Reallocates the array with more rows, or with another dtype."""
        assert self._rows is not None
        size = min(self._size, max(len(self._rows), 2 * self._count))
        larger = arrays.empty((size, *self._rows.shape[1:]), dtype)
        larger[: self._count] = self._rows[: self._count]
        self._rows = larger


# A new column has room for 64 MiB, and for at least 16 rows if they are larger.
_FIRST_ROWS, _FIRST_BYTES = 16, 1 << 26


def _check_numbers(array: Any) -> None:
    """Checks that an array holds numbers or bools.

    Raises:
      InputError: it holds text, dates or objects.
    """
    # The dtype of JAX's random keys has no kind.
    if getattr(array.dtype, "kind", "f") not in "OSUMm":
        return
    first = array.flat[0] if array.size else None
    if isinstance(first, (np.ndarray, list)):
        raise InputError(
            "a batch with rows of different lengths",
            "the rows of an array must have the same length.",
            "pad the rows to one length (x.to_tensor() of a tf.RaggedTensor), and keep the lengths in another leaf",
        )
    raise InputError(
        f"a batch of dtype {array.dtype}",
        "only numbers and bools can be placed on devices.",
        "encode the text first, for example dataset.map(vectorize)",
    )


def rows_of(batch: PyTree, rows: range, total: int) -> PyTree:
    """Returns the given rows of a batch, or its first row as padding if `rows` is empty.

    Args:
      batch: pytree of arrays (total, ...).
      rows: the rows to return.
      total: number of rows of the batch. If `rows` has as many, the batch is returned without slicing.
    """
    if len(rows) == total:
        return batch
    start, stop = (rows.start, rows.stop) if rows else (0, 1)
    return jax.tree.map(lambda x: x[start:stop], batch)
