# SPDX-License-Identifier: Apache-2.0
"""One pass over a source as batches in the form that is asked for."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
from typing_extensions import override

from phalanx.input.prefetch import AbstractReadings, readings
from phalanx.input.sources.base import AbstractReader, Facts, Piece, State
from phalanx.mesh.arrays import copied


@dataclass(frozen=True)
class Form:
    """How batches are handed out.

    Args:
      steps: how many are stacked into one; None for single batches.
      places: for how many steps a stack has room; None for as many as there are.
      alike: whether only batches of one size are stacked into one.
    """

    steps: int | None = None
    places: int | None = None
    alike: bool = False

    @property
    def size(self) -> int:
        """How many batches make one."""
        return self.steps or 1

    def room(self, count: int) -> int | None:
        """Returns for how many steps a stack of `count` has room; None for a single batch."""
        return None if self.steps is None else self.places or count


class Step(NamedTuple):
    """One worker's part in one step.

    Args:
      piece: its rows.
      rows: how many rows all workers have together.
      widest: how many rows the replica with the most of them has, of all workers.
      state: the position after it; None where it has not moved.
    """

    piece: Piece
    rows: int
    widest: int
    state: State | None


def split(steps: list[Step], form: Form) -> tuple[list[Step], list[Step]]:
    """Returns the steps that make the next batch, and those that are left for the ones after it."""
    others = (i for i, step in enumerate(steps) if step.rows != steps[0].rows or step.widest != steps[0].widest)
    end = next(others, len(steps)) if form.alike else len(steps)
    return steps[:end], steps[end:]


class Batch(NamedTuple):
    """What is handed out at once: one step's batch, or that of several, stacked.

    Args:
      value: a pytree.
      steps: what it was made of.
    """

    value: Any
    steps: Sequence[Step]

    @property
    def state(self) -> State | None:
        """The position after it; None where it has not moved."""
        return next((step.state for step in reversed(self.steps) if step.state is not None), None)


Place = Callable[[Sequence[Step], int | None], Any]
"""Makes the value of a batch of some steps, with room for a number of them; None for a single one."""


class AbstractBatches(ABC):
    """The batches of one pass."""

    @abstractmethod
    def get(self, form: Form) -> Batch | None:
        """Returns the next batch; None at the end."""

    @abstractmethod
    def put_back(self, batch: Batch) -> None:
        """Takes back the batch that was handed out last."""

    @abstractmethod
    def stop(self) -> None:
        """Ends reading."""


class Feed:
    """Reads steps: the work of the background thread. It does not know the iterator, which may be dropped meanwhile.

    Args:
      reader: reads pieces.
      copies: whether others may change the arrays of a piece after it was read.
    """

    def __init__(self, reader: AbstractReader, *, copies: bool = False) -> None:
        self._reader, self._copies = reader, copies
        self._first: deque[Step] = deque()
        self._failure: BaseException | None = None

    def put_back(self, steps: Sequence[Step], failure: BaseException | None = None) -> None:
        """Makes these the next steps, and this the failure after them."""
        self._first.extendleft(reversed(steps))
        self._failure = failure or self._failure

    def read(self, count: int) -> list[Step]:
        """Returns the next steps; fewer at the end, or before a failure, which is raised by the next call."""
        steps: list[Step] = []
        while len(steps) < count:
            try:
                step = self._read()
            except Exception as e:
                if not steps:
                    raise
                self._failure = e
                break
            if step is None:
                break
            steps.append(step)
        return steps

    def _read(self) -> Step | None:
        if self._first:
            return self._first.popleft()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        piece = self._reader.read()
        if piece is None:
            return None
        if self._copies:
            piece = piece._replace(parts=jax.tree.map(copied, list(piece.parts)))
        return Step(piece, piece.rows or 0, max(piece.counts, default=0), self._reader.get_state())


@final
class ReadAhead(AbstractBatches):
    """Batches that are read, and put in place, before they are asked for.

    Args:
      reader: reads pieces.
      place: makes batches of them.
      ahead: how many batches in advance.
      facts: what is known of the data.
    """

    def __init__(self, reader: AbstractReader, place: Place, ahead: int, facts: Facts) -> None:
        # A thread reads them; but handing over what takes no time to read takes longer than to read it.
        self._in_thread = not facts.is_in_memory
        self._feed = Feed(reader, copies=facts.is_borrowed and self._in_thread)
        self._place, self._ahead, self._waits = place, ahead, facts.is_borrowed and not self._in_thread
        self._form: Form | None = None
        self._readings: AbstractReadings[Batch] | None = None

    @override
    def get(self, form: Form) -> Batch | None:
        if self._readings is None or (form is not self._form and form != self._form):
            self.stop()
            self._form = form
            self._readings = readings(_reads(self._feed, self._place, form), self._ahead, in_thread=self._in_thread)
        batch = self._readings.get()
        if self._waits and batch is not None:
            # The devices are done with the user's arrays, which may be changed from now on.
            jax.block_until_ready(batch.value)
        return batch

    @override
    def put_back(self, batch: Batch) -> None:
        self.stop()
        self._feed.put_back(batch.steps)

    @override
    def stop(self) -> None:
        if self._readings is None:
            return
        unused, failure = self._readings.stop()
        self._readings = None
        self._feed.put_back([step for batch in unused for step in batch.steps], failure)


def _reads(feed: Feed, place: Place, form: Form) -> Callable[[], Batch | None]:
    def read() -> Batch | None:
        steps, left = split(feed.read(form.size), form)
        feed.put_back(left)
        return Batch(place(steps, form.room(len(steps))), steps) if steps else None

    return read
