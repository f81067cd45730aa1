# SPDX-License-Identifier: Apache-2.0
"""What all sources have in common: readers of one worker's rows, and the arrays they hand out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx.errors import InputError, InvalidArgumentError
from phalanx.input.shard import Worker
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


def state_entry(state: State | None, key: str, default: Any) -> Any:
    """Returns one entry of a position.

    Raises:
      InputError: it is the position of another kind of source.
    """
    if state is None:
        return default
    if not isinstance(state, Mapping) or key not in state:
        raise InputError(
            f"set_state({state!r})",
            f"this source keeps its position as {key!r}.",
            "a state that get_state of the same kind of dataset returned",
        )
    return state[key]


def check_batch_size(batch_size: Any) -> int:
    """Returns `batch_size`.

    Raises:
      InvalidArgumentError: it is no positive integer.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise InvalidArgumentError(f"batch_size={batch_size!r}", "must be an integer of at least 1.", "batch_size=64")
    return int(batch_size)


def to_host(batch: Any, *, copy: bool = False) -> Any:
    """Returns a batch with NumPy arrays for leaves; arrays of JAX stay as they are.

    Args:
      batch: a pytree of arrays, or of tensors of another library on the CPU.
      copy: whether its maker may write into the same arrays again.
    """
    as_array = np.array if copy else np.asarray
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else as_array(x), batch)


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
        _check_dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
    if any(shape[0] != shapes[0][0] for shape in shapes):
        counts = sorted({shape[0] for shape in shapes})
        raise InputError(
            f"a batch of shapes {shapes}", f"its leaves have {counts} rows.", "one number of rows for all leaves"
        )
    return int(shapes[0][0])


def stack(records: Sequence[Any]) -> Any:
    """Makes one batch of records.

    Raises:
      InputError: their structures or shapes differ.
    """
    flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(record) for record in records]
    tree = flat[0][1]
    for _, other in flat:
        if other != tree:
            raise InputError(
                "records of one batch", f"they have the structures {tree} and {other}.", "one structure for all records"
            )
    return tree.unflatten([stack_leaf(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)])


def stack_leaf(column: Sequence[Any]) -> np.ndarray:
    """Makes one array of the rows of one column.

    Raises:
      InputError: their shapes differ, or they are text.
    """
    arrays = [np.asarray(x) for x in column]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        raise InputError(
            f"records of shapes {sorted(shapes)[:3]}",
            "the rows of one batch must have one shape.",
            "pad them to one length, and keep the lengths in another leaf",
        )
    _check_dtype(arrays[0].dtype)
    return np.stack(arrays)


def _check_dtype(dtype: Any) -> None:
    if getattr(dtype, "kind", "f") in "OSUMm":
        raise InputError(
            f"a batch of dtype {dtype}", "only numbers and bools can be placed on devices.", "encode the text first"
        )


def rows_of(batch: Any, rows: range, total: int) -> Any:
    """Returns some rows of a batch; the batch itself where they are all; the first row, as padding, where they are none."""
    if len(rows) == total:
        return batch
    start, stop = (rows.start, rows.stop) if rows else (0, 1)
    return jax.tree.map(lambda x: x[start:stop], batch)
