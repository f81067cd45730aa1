# SPDX-License-Identifier: Apache-2.0
"""Sources of rows with random access: arrays, and sequences of records. A worker reads only its own rows."""

import copy
import dataclasses
import math
import sys
from abc import abstractmethod
from typing import Any, final

import jax
import numpy as np
from typing_extensions import override

from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import (
    INFINITE,
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
from phalanx._src.input.sources.rows import ChosenRows
from phalanx._src.mesh.arrays import flattened, to_host, to_numpy
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InputError, arguments
from phalanx.typing import PyTree


class AbstractRecords(AbstractSource):
    """Rows that can be read in any order.

    Args:
      num_records: number of rows. `sys.maxsize` if there are infinitely many.
      batch_size: global batch size in rows.
      drop_remainder: whether to drop a short last batch.
    """

    def __init__(self, num_records: int, batch_size: int, *, drop_remainder: bool) -> None:
        self.num_records, self.batch_size = num_records, check_batch_size(batch_size)
        self.drop_remainder = drop_remainder

    @abstractmethod
    def records(self, start: int, stop: int) -> PyTree:
        """Returns the rows from `start` to `stop` (exclusive), at least one, as one batch."""

    @property
    @override
    def facts(self) -> Facts:
        n, b = self.num_records, self.batch_size
        infinite = n == sys.maxsize
        batches = n // b if self.drop_remainder else math.ceil(n / b)
        return Facts(
            batch_size=b,
            is_full=self.drop_remainder or infinite or n % b == 0,
            num_batches=INFINITE if infinite else batches,
            num_records=None if infinite else n,
            has_random_access=True,
            owner=Owner.NOBODY,
        )

    @override
    def resized(self, batch_size: int) -> "AbstractRecords":
        other = copy.copy(self)  # Both share the rows.
        other.batch_size = batch_size
        return other

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        return _RecordsReader(self, worker, self.start(state))

    @override
    def start(self, state: State | None) -> int:
        return check_count(state_entry(state, "records", 0), "record", self.num_records)


@final
class _RecordsReader(AbstractReader):
    """Reads a worker's rows of each global batch. `_position` is the first row of the next global batch."""

    def __init__(self, source: AbstractRecords, worker: InputWorker, position: int) -> None:
        self._source, self._worker, self._position = source, worker, position
        self._full = self._own(source.batch_size)  # Of nearly all batches, so it is computed once.

    @override
    def read(self) -> Piece | None:
        source, start = self._source, self._position
        rows = min(source.batch_size, source.num_records - start)
        if rows <= 0 or (source.drop_remainder and rows < source.batch_size):
            return None
        first, stop, counts = self._full if rows == source.batch_size else self._own(rows)
        self._position = start + rows
        return Piece([source.records(start + first, start + stop)], counts, rows)

    def _own(self, rows: int) -> tuple[int, int, list[int]]:
        """Returns this worker's first and last (exclusive) row in a batch of `rows` rows, and the rows per local replica."""
        # A worker without rows reads the first one, as padding.
        local_rows = self._worker.rows(rows) or range(1)
        return local_rows.start, local_rows.stop, self._worker.shares(rows)

    @override
    def get_state(self) -> State:
        return {"records": self._position}


@final
class ArrayRecords(AbstractRecords):
    """The rows of a pytree of arrays (rows, ...) in memory. See `AbstractRecords` for the other arguments."""

    def __init__(self, arrays: Any, batch_size: int, *, drop_remainder: bool = False) -> None:
        # Flat, because `records` runs for every batch.
        self._leaves, self._tree = jax.tree.flatten(to_host(arrays, "the dataset"))
        super().__init__(num_rows(self._leaves), batch_size, drop_remainder=drop_remainder)

    @property
    @override
    def facts(self) -> Facts:
        # JAX arrays cannot change.
        owner = Owner.CALLER if any(isinstance(x, np.ndarray) for x in self._leaves) else Owner.NOBODY
        return dataclasses.replace(super().facts, is_in_memory=True, owner=owner)

    @override
    def records(self, start: int, stop: int) -> PyTree:
        tree: Any = self._tree
        rows = slice(start, stop)
        # A slice of a NumPy array is a view. A slice of a JAX array is a program, which `Landing` may run for several steps at once.
        return tree.unflatten([x[rows] if isinstance(x, np.ndarray) else ChosenRows(x, rows) for x in self._leaves])


@final
class NumpyDataset(AbstractRows):
    """A dataset of the rows of arrays, not yet batched. `Strategy.make_experimental_numpy_dataset` creates it.

    May be used in any context.

    Args:
      arrays: a pytree of arrays (rows, ...). A list becomes one array.

    Example:
      >>> import numpy as np
      >>> dataset = NumpyDataset((np.zeros((10, 3)), [1] * 10))
      >>> len(dataset), dataset.batch(4).facts.num_batches
      (10, 3)
    """

    def __init__(self, arrays: Any) -> None:
        leaves, structure = flattened(arrays, lambda x: isinstance(x, list))
        self._arrays = to_host(structure.unflatten(map(_without_lists, leaves)), "the dataset")
        self._rows = num_rows(self._arrays)

    def __len__(self) -> int:
        return self._rows

    @override
    def batch(self, batch_size: int, *, drop_remainder: bool = False) -> ArrayRecords:
        """Returns a dataset of global batches with the same rows.

        Args:
          batch_size: global batch size in rows.
          drop_remainder: whether to drop a short last batch.

        Raises:
          InvalidArgumentError: `batch_size` is not a positive integer, or `drop_remainder` is not a bool.
        """
        arguments.flag("drop_remainder", drop_remainder)
        return ArrayRecords(self._arrays, batch_size, drop_remainder=drop_remainder)


def _without_lists(leaf: object) -> object:
    """Returns a list as a NumPy array, and any other leaf unchanged."""
    return to_numpy(leaf, "the dataset") if isinstance(leaf, list) else leaf


@final
class SequenceRecords(AbstractRecords):
    """The records of an object with `len` and `[]`. Each record is a pytree.

    Args:
      sequence: for example a Grain `MapDataset` or a torch `Dataset`.
      batch_size: global batch size in rows.
      drop_remainder: whether to drop a short last batch.
    """

    def __init__(self, sequence: Any, batch_size: int, *, drop_remainder: bool = False) -> None:
        self._sequence = sequence
        super().__init__(len(sequence), batch_size, drop_remainder=drop_remainder)

    @override
    def records(self, start: int, stop: int) -> PyTree:
        return stack(map(self._record, range(start, stop)), stop - start)

    def _record(self, index: int) -> PyTree:
        name = f"record {index} of a {type(self._sequence).__name__}"
        try:
            record = self._sequence[index]
        except IndexError as e:
            raise InputError(
                name,
                f"the record does not exist ({e}), although the dataset has the `len` {self.num_records}.",
                "a `len` that counts the records",
            ) from e
        if record is None:
            raise InputError(
                name,
                "it is None, because a filter removed it, so the number of rows is unknown.",
                "dataset.to_iter_dataset(), which skips such records",
            )
        return record
