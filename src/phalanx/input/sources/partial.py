# SPDX-License-Identifier: Apache-2.0
"""Batches with a part of the rows of a dataset's batches, for an elastic group that has fewer processes than it could have."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, final

import jax
import numpy as np
from typing_extensions import override

from phalanx.input.shard import InputWorker
from phalanx.input.sources.base import (
    UNKNOWN,
    AbstractReader,
    AbstractSource,
    Facts,
    Piece,
    State,
    check_count,
    num_rows,
    rows_of,
    state_entry,
)
from phalanx.options import AutoShardPolicy
from phalanx.typing import PyTree


def partial(
    make: Callable[[int | None], AbstractSource], batch_size: int | None, part: Fraction | None, *, drop_remainder: bool
) -> AbstractSource:
    """Returns a source whose batches have a part of the rows, and whose positions do not depend on that part.

    Args:
      make: returns the source of the dataset for a batch size, which is None for a dataset of batches.
      batch_size: the size of whole batches.
      part: the part, of at most 1. None for the source as it is.
      drop_remainder: whether to drop a short batch.
    """
    source = make(batch_size)
    if part is None:
        return source
    if batch_size is not None and (source.facts.has_random_access or source.facts.files):
        return make(_rows_in(batch_size, part))  # Its positions count rows.
    return PartialBatches(source, part, drop_remainder=drop_remainder)


def _rows_in(batch_size: int, part: Fraction) -> int:
    return max(1, round(batch_size * part))


@final
class PartialBatches(AbstractSource):
    """Batches that consist of consecutive rows of the batches of another source.

    Args:
      source: source of whole batches, which each worker reads completely.
      part: the number of rows, relative to that of a whole batch.
      drop_remainder: whether to drop a short batch.
    """

    def __init__(self, source: AbstractSource, part: Fraction, *, drop_remainder: bool) -> None:
        self._source, self._part, self._drop = source, part, drop_remainder

    @property
    @override
    def facts(self) -> Facts:
        whole = self._source.facts
        size = whole.batch_size and _rows_in(whole.batch_size, self._part)
        return dataclasses.replace(whole, batch_size=size, is_full=self._drop, num_batches=UNKNOWN)

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        inner = self._source.open(InputWorker(), policy, state_entry(state, "whole", None, beside=("used",)))
        used = check_count(state_entry(state, "used", 0, beside=("whole",)), "row")
        reader = _PartialReader(inner, worker, self._part, self.facts.batch_size, drop_remainder=self._drop)
        reader.skip(used)
        return reader


@final
class _PartialReader(AbstractReader):
    """Reads consecutive rows of whole batches.

    Args:
      reader: reads whole batches.
      worker: this worker.
      part: see `PartialBatches`.
      size: number of rows to read. None for the part of the batch in which they begin.
      drop_remainder: whether to leave out fewer rows.
    """

    def __init__(
        self, reader: AbstractReader, worker: InputWorker, part: Fraction, size: int | None, *, drop_remainder: bool
    ) -> None:
        self._reader, self._worker, self._part, self._size, self._drop = reader, worker, part, size, drop_remainder
        # The present batch, the position before it, its rows, and how many of them were read.
        self._batch: PyTree = None
        self._before = reader.get_state()
        self._rows = self._used = 0

    def skip(self, rows: int) -> None:
        """Leaves out the first rows of the first batch."""
        if rows:
            self._load()
            self._used = check_count(rows, "row of a batch", self._rows)

    @override
    def read(self) -> Piece | None:
        while self._used < self._rows or self._load():
            wanted = self._size or _rows_in(self._rows, self._part)
            batch = self._rows_to_come(wanted)
            rows = num_rows(batch)
            if rows == wanted or not self._drop:
                return Piece([rows_of(batch, self._worker.rows(rows), rows)], self._worker.shares(rows), rows)
        return None

    def _rows_to_come(self, wanted: int) -> PyTree:
        """Returns the next rows: fewer at the end, and before rows of other shapes."""
        found = [self._take(wanted)]
        rows = num_rows(found[0])
        while rows < wanted and self._load() and _row(self._batch) == _row(found[0]):
            found.append(self._take(wanted - rows))
            rows += num_rows(found[-1])
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found) if len(found) > 1 else found[0]

    def _load(self) -> bool:
        """Reads the next batch that has rows. Returns whether there is one."""
        self._used = self._rows = 0
        while not self._rows:
            self._before = self._reader.get_state()
            if (piece := self._reader.read()) is None:
                return False
            self._batch, self._rows = piece.parts[0], sum(piece.counts)
        return True

    def _take(self, most: int) -> PyTree:
        first, self._used = self._used, min(self._used + most, self._rows)
        return rows_of(self._batch, range(first, self._used), self._rows)

    @override
    def get_state(self) -> State:
        if self._used == self._rows:
            return {"whole": self._reader.get_state(), "used": 0}
        return {"whole": self._before, "used": self._used}


def _row(batch: PyTree) -> Any:
    """Returns what batches must have in common so that rows of both can form one."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, [(x.shape[1:], x.dtype) for x in leaves]
