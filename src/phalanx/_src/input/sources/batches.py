# SPDX-License-Identifier: Apache-2.0
"""Sources of global batches. Every worker reads whole batches and keeps its own rows."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from typing_extensions import override

from phalanx._src.input.order import digest_of
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import (
    UNKNOWN,
    AbstractReader,
    AbstractSource,
    Batching,
    Facts,
    Owner,
    Piece,
    State,
    check_count,
    num_rows,
    rows_of,
    stack,
    state_entry,
    to_host,
)
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InputError, shown
from phalanx.typing import PyTree


class _AbstractBatchSource(AbstractSource):
    """Batches, of whose passes the first batch may be noted."""

    _is_ready = False
    _digest = bytes(8)

    @property
    @override
    def first(self) -> bytes:
        return self._digest

    def _note(self, batch: PyTree) -> None:
        self._digest = digest_of(batch if self._is_ready else to_host(batch))

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches of a pass. Nothing more of Python runs for those after the first."""

        def first() -> Iterator[Any]:
            for batch in itertools.islice(batches, 1):
                self._note(batch)
                yield batch

        return itertools.chain(first(), batches)


@final
class BatchSequence(_AbstractBatchSource):
    """Batches that can be read in any order.

    Args:
      batches: an object with `len` and `[]`, for example a list or a Keras `PyDataset`.
      facts: what is known about the batches.
      drop_remainder: whether to drop batches that are shorter than an earlier one.
      at_begin: called before the first batch of a pass is read.
      at_end: called at the end of a pass.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        facts: Facts,
        *,
        drop_remainder: bool = False,
        at_begin: Callable[[], object] = lambda: None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._batches, self._drop = batches, drop_remainder
        self._at_begin, self._at_end = at_begin, at_end
        self._facts = facts

    @property
    @override
    def facts(self) -> Facts:
        return self._facts

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        start = self.start(state)
        skips = self._notes_first and start > 0
        at_begin = self._begin_and_note if skips else self._at_begin
        batches: Iterator[Any] = _Counted(self._batches, at_begin, self._at_end, start)
        if self._notes_first and not skips:
            batches = self._noting(batches)
        return _BatchReader(batches, worker, start, drop_remainder=self._drop)

    def _begin_and_note(self) -> None:
        """Begins a pass that skips batches. They are not read, so the first is read for its digest."""
        self._at_begin()
        self._note(self._batches[0])

    @override
    def start(self, state: State | None) -> int:
        return check_count(state_entry(state, "batches", 0), "batch", len(self._batches))


class _Counted(Iterator[Any]):
    """Iterates over the batches from `start`. Calls `at_begin` before the first one is read, and `at_end` after the last."""

    def __init__(
        self, batches: Sequence[Any], at_begin: Callable[[], object], at_end: Callable[[], object], start: int
    ) -> None:
        self._batches, self._at_begin, self._at_end, self._next = batches, at_begin, at_end, start

    @override
    def __next__(self) -> PyTree:
        # Not when the pass is opened, because `set_state` opens another, and only one of them is read.
        at_begin, self._at_begin = self._at_begin, lambda: None
        at_begin()
        if self._next >= len(self._batches):
            at_end, self._at_end = self._at_end, lambda: None
            at_end()
            raise StopIteration
        batch = self._batches[self._next]
        self._next += 1
        return batch


@final
class BatchStream(_AbstractBatchSource):
    """Batches that can be read only in order.

    Args:
      make: opens an iterator at the first batch.
      facts: what is known about the batches.
      drop_remainder: whether to drop batches that are shorter than an earlier one.
      is_ready: whether the leaves of the batches are arrays that JAX can hold, so that they need not be converted.
      get_state: returns the position of such an iterator. None if iterators have no position.
      set_state: moves a new iterator to such a position. None to skip batches by reading them.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        facts: Facts,
        *,
        drop_remainder: bool = False,
        is_ready: bool = False,
        get_state: Callable[[Any], Any] | None = None,
        set_state: Callable[[Any, Any], object] | None = None,
    ) -> None:
        self._make, self._facts, self._drop, self._is_ready = make, facts, drop_remainder, is_ready
        self._get_state, self._set_state = get_state, set_state

    @property
    @override
    def facts(self) -> Facts:
        return self._facts

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        start = self.start(state)
        iterator = batches = iter(self._make())
        if self._notes_first and self._set_state is None:
            batches = self._noting(iterator)
        # A new iterator is at the beginning already.
        if start and self._set_state is not None:
            self._restore(iterator, state_entry(state, "source", None, beside=("batches",)))
        else:
            skipped = sum(1 for _ in itertools.islice(batches, start))
            check_count(start, "batch", skipped)  # Data with fewer batches is not the data of the position.
        get_state = None if self._get_state is None else lambda: self._get_state(iterator)  # type: ignore[misc]
        return _BatchReader(
            batches, worker, start, drop_remainder=self._drop, is_ready=self._is_ready, get_state=get_state
        )

    @override
    def start(self, state: State | None) -> int:
        most = self._facts.num_batches if self._facts.num_batches >= 0 else sys.maxsize
        beside = () if self._set_state is None else ("source",)
        return check_count(state_entry(state, "batches", 0, beside=beside), "batch", most)

    def _restore(self, batches: PyTree, position: object) -> None:
        assert self._set_state is not None
        try:
            self._set_state(batches, position)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise InputError(
                f"set_state({shown(position, 100)})",
                f"the dataset rejected the position: {e}",
                "a state that get_state of the same data returned; of Grain's DataLoader, a source with a __repr__ that is always the same",
            ) from e


class _BatchReader(AbstractReader):
    """Reads global batches and keeps the rows of one worker. See `BatchStream` for the arguments."""

    def __init__(
        self,
        batches: Iterator[Any],
        worker: InputWorker,
        position: int,
        *,
        drop_remainder: bool,
        is_ready: bool = False,
        get_state: Callable[[], Any] | None = None,
    ) -> None:
        self._batches, self._worker, self._position = batches, worker, position
        self._drop, self._is_ready, self._get_state = drop_remainder, is_ready, get_state
        self._longest = 0

    @override
    def read(self) -> Piece | None:
        for batch in self._batches:
            self._position += 1
            host = batch if self._is_ready else to_host(batch)
            rows = num_rows(host)
            self._longest = max(rows, self._longest)
            # The size of a full batch may be unknown, so the longest one so far counts as full.
            if self._drop and rows < self._longest:
                continue
            part = host if self._worker.count == 1 else rows_of(host, self._worker.rows(rows), rows)
            return Piece([part], self._worker.shares(rows), rows)
        return None

    @override
    def get_state(self) -> State:
        state = {"batches": self._position}
        return state if self._get_state is None else {**state, "source": self._get_state()}


class OneShot:
    """Returns an iterator once. A second call raises, because a second pass would silently be empty.

    Args:
      iterator: for example a generator.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Iterator[Any] | None = iterator

    def __call__(self) -> Iterator[Any]:
        """Returns the iterator.

        Raises:
          InputError: the iterator was returned before.
        """
        if self._iterator is None:
            raise InputError(
                "a second pass over an iterator",
                "an iterator can be read only once.",
                "pass the generator function instead of its result: function, not function()",
            )
        iterator, self._iterator = self._iterator, None
        return iterator


def stream_of_records(dataset: Any, batching: Batching) -> BatchStream:
    """Returns the source of single rows that can be read only in order.

    Args:
      dataset: an iterable of records, an iterator, or a function that returns an iterator.
      batching: the batch size, and whether to drop a short last batch.

    Raises:
      InputError: `batching` has no batch size.
    """
    size, opens = batching.require_size(dataset), opener(dataset)
    # Nobody writes to a batch again, because `stack` copies each record.
    facts = Facts(batch_size=size, is_full=batching.drop_remainder, owner=Owner.NOBODY)
    return BatchStream(lambda: batched(opens(), size), facts, drop_remainder=batching.drop_remainder)


def opener(dataset: Any) -> Callable[[], Iterator[Any]]:
    """Returns a function that opens an iterator over `dataset` from its beginning."""
    if isinstance(dataset, Iterator):
        return OneShot(dataset)
    return lambda: iter(dataset if isinstance(dataset, Iterable) else dataset())


def length_of(dataset: Any) -> int:
    """Returns the number of batches of `dataset`, or UNKNOWN."""
    try:
        return len(dataset)
    except TypeError:  # As from a torch `DataLoader` of an `IterableDataset`.
        return UNKNOWN


def batched(records: Iterable[Any], batch_size: int) -> Iterator[Any]:
    """Yields batches of `batch_size` records. The last one may be shorter."""
    iterator = iter(records)
    while (batch := stack(iterator, batch_size)) is not None:
        yield batch


def sizes(batches: Sequence[Any]) -> Facts:
    """Returns the facts about batches in memory, whose sizes are all known."""
    host = list(map(to_host, batches))
    rows = list(map(num_rows, host))
    largest = max(rows, default=None)
    return Facts(
        batch_size=largest,
        is_full=len(set(rows)) <= 1,
        num_batches=len(rows),
        num_records=sum(rows),
        owner=Owner.CALLER,
    )
