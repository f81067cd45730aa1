# SPDX-License-Identifier: Apache-2.0
"""Batches with a part of the rows of a dataset's batches, for an elastic group that has fewer processes than it could have. Not short batches."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import (
    INFINITE,
    UNKNOWN,
    AbstractReader,
    AbstractSource,
    Facts,
    Piece,
    State,
    check_count,
    num_rows,
    rows_of,
)
from phalanx._src.input.sources.rows import owned, read
from phalanx._src.mesh.memory import Pool
from phalanx._src.options import AutoShardPolicy
from phalanx.typing import PyTree

USED = "used"
"""The entry of a position within a batch: how many of its rows were read."""


def partial_source(
    make: Callable[[bool], AbstractSource], part: Fraction | None, *, drop_remainder: bool
) -> AbstractSource:
    """Returns a source whose batches have a part of the rows, and whose positions do not depend on that part.

    Args:
      make: returns the source of whole batches, given whether to drop a short one.
      part: the part, of at most 1. None for whole batches.
      drop_remainder: whether to drop a short batch.
    """
    source = make(drop_remainder)
    if part is None:
        return source
    size = source.facts.batch_size
    smaller = None if size is None else source.resized(rows_in(size, part))
    # No whole batch is dropped, because a full part may end in a short one.
    return smaller or PartialBatches(make(False), part, drop_remainder=drop_remainder)


def rows_in(batch_size: int, part: Fraction) -> int:
    """Returns the number of rows in a part of a batch.

    Example:
      >>> rows_in(64, Fraction(3, 4))
      48
    """
    return max(1, round(batch_size * part))


@final
class PartialBatches(AbstractSource):
    """Batches that consist of consecutive rows of the batches of another source.

    Positions between two batches of that source are its own.

    Args:
      source: source of whole batches, which each worker reads completely.
      part: the number of rows, relative to that of the batch in which they begin.
      drop_remainder: whether to drop a batch that is shorter than an earlier one.
    """

    def __init__(self, source: AbstractSource, part: Fraction, *, drop_remainder: bool = False) -> None:
        self._source, self._part, self._drop = source, part, drop_remainder

    @property
    @override
    def facts(self) -> Facts:
        whole = self._source.facts
        return dataclasses.replace(
            whole,
            batch_size=whole.batch_size and rows_in(whole.batch_size, self._part),
            is_full=False,
            num_batches=INFINITE if whole.num_batches == INFINITE else UNKNOWN,
            # Each worker reads whole batches, and neither files nor rows of its own.
            files=(),
            has_random_access=False,
            whole=whole,
        )

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        before, used = self.start(state)
        # As the only worker: which rows of a batch are its own depends on the part.
        inner = self._source.open(InputWorker(), policy, before)
        reader = _PartialReader(inner, worker, self._part, drop_remainder=self._drop)
        reader.skip(used)
        return reader

    @override
    def start(self, state: State | None) -> tuple[State | None, int]:
        before = None if state is None else {name: entry for name, entry in state.items() if name != USED}
        self._source.start(before)
        return before, check_count(0 if state is None else state.get(USED, 0), "row")

    @override
    def note_first(self) -> None:
        self._source.note_first()

    @property
    @override
    def first(self) -> bytes:
        return self._source.first


@final
class _PartialReader(AbstractReader):
    """Reads consecutive rows of whole batches. See `PartialBatches` for the other arguments.

    Args:
      reader: reads whole batches.
      worker: this worker.
    """

    def __init__(self, reader: AbstractReader, worker: InputWorker, part: Fraction, *, drop_remainder: bool) -> None:
        self._reader, self._worker, self._part, self._drop = reader, worker, part, drop_remainder
        # The present batch, the position before it, its rows, and how many of them were read.
        self._batch: PyTree = None
        self._before = reader.get_state()
        self._rows = self._used = 0
        self._longest = 0
        self._pool = Pool()

    def skip(self, rows: int) -> None:
        """Leaves out the first rows of the first batch."""
        if rows:
            self._load()
            self._used = check_count(rows, "row of a batch", self._rows)

    @override
    def read(self) -> Piece | None:
        while self._used < self._rows or self._load():
            batch = self._take(rows_in(self._rows, self._part))
            rows = num_rows(batch)
            self._longest = max(rows, self._longest)
            if rows == self._longest or not self._drop:
                return Piece([rows_of(batch, self._worker.rows(rows), rows)], self._worker.shares(rows), rows)
        return None

    def _take(self, count: int) -> PyTree:
        """Returns the next rows: fewer at the end, and before rows of other shapes."""
        batch = self._rest(count)
        while (rows := num_rows(batch)) < count:
            # The next batch may be written into the same arrays.
            batch = jax.tree.map(lambda leaf: owned(leaf, self._pool), batch)
            if not self._load() or _row(self._batch) != _row(batch):
                break  # What was loaded is for the next part.
            batch = jax.tree.map(_joined, batch, jax.tree.map(read, self._rest(count - rows)))
        return batch

    def _rest(self, most: int) -> PyTree:
        """Returns rows of the present batch that were not read."""
        first, self._used = self._used, min(self._used + most, self._rows)
        return rows_of(self._batch, range(first, self._used), self._rows)

    def _load(self) -> bool:
        """Reads the next batch that has rows. Returns whether there is one."""
        self._used = self._rows = 0
        while not self._rows:
            self._before = self._reader.get_state()
            if (piece := self._reader.read()) is None:
                return False
            self._batch, self._rows = piece.parts[0], sum(piece.counts)
        return True

    @override
    def get_state(self) -> State:
        return {**self._before, USED: self._used} if self._used < self._rows else self._reader.get_state()


def _joined(first: Any, second: Any) -> Any:
    # NumPy does not know the keys of JAX.
    join = jnp.concatenate if isinstance(first, jax.Array) else np.concatenate
    return join((first, second))


def _row(batch: PyTree) -> Any:
    """Returns the structure of the rows of a batch. Rows of two batches can form one if it is equal."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, [(x.shape[1:], x.dtype) for x in leaves]
