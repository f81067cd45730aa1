# SPDX-License-Identifier: Apache-2.0
"""Turns the steps that a reader yields into batches: single ones, or several steps stacked.

    AbstractReader ── Feed ── ReadAhead ── DistributedIterator
                      (background thread)  (thread of the user)

Several workers that read different rows use `Lockstep` instead of `ReadAhead`. The consumer may change its request from
batch to batch, so everything that was read ahead in another form goes back to the `Feed` as steps and is never lost.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from typing_extensions import override

from phalanx._src.input.landing import Landing, bytes_on_host
from phalanx._src.input.prefetch import AbstractReadings, readings
from phalanx._src.input.sources.base import AbstractReader, Facts, Owner, Piece, State

# From this size of a batch on, a thread that reads ahead saves more than it costs.
_LARGE_BYTES = 1 << 20
# A stack of more steps is not allocated before it is known how many there are.
_MOST_STEPS_AHEAD = 256


@dataclass(frozen=True)
class Form:
    """The form in which the consumer wants its next batch.

    Args:
      steps: number of steps to stack. None for single batches.
      places: number of steps that the stack has room for, so that a short stack keeps the shape of a full one. None for
        the number of steps it holds.
    """

    steps: int | None = None
    places: int | None = None

    def room(self, count: int) -> int | None:
        """Returns the number of steps that a stack of `count` steps has room for; None for a single batch."""
        return None if self.steps is None else self.places or count

    @property
    def room_ahead(self) -> int | None:
        """The room of a stack whose number of steps is not known yet. None if it would be too large."""
        most = self.places or self.steps
        return most if most is None or self.places or most <= _MOST_STEPS_AHEAD else None


class Step(NamedTuple):
    """One worker's rows for one step.

    Args:
      piece: rows of this worker.
      rows: rows of the global batch, that is, of all workers together.
      counts: rows of each replica: of all workers if they had to agree on them, else of this worker.
      state: position of the reader after this step. None if the position has not moved.
    """

    piece: Piece
    rows: int
    counts: Sequence[int]
    state: State | None


def split(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """Returns the steps that make the next batch, and the remaining steps. A stack ends before a step with other numbers of rows."""
    # One program runs all steps of a stack, and it depends on the numbers of rows.
    first = (steps[0].rows, *steps[0].counts) if steps else ()
    end = next((i for i, step in enumerate(steps) if (step.rows, *step.counts) != first), len(steps))
    return steps[:end], steps[end:]


class Batch(NamedTuple):
    """A placed batch: one step, or several steps stacked.

    Args:
      value: pytree that the user gets.
      steps: steps that the batch consists of, which `put_back` returns to the feed.
    """

    value: Any
    steps: Sequence[Step]

    @property
    def state(self) -> State | None:
        """The position of the reader after this batch; None if it has not moved."""
        for step in reversed(self.steps):
            if step.state is not None:
                state: State = step.state
                return state
        return None


Place = Callable[[Sequence[Step], int | None], Any]
"""Makes the value of a batch from its steps and the room of the stack, which is None for a single step."""


class AbstractBatches(ABC):
    """The batches of one iteration over a dataset."""

    @abstractmethod
    def get(self, form: Form, most: int | None = None) -> Batch | None:
        """Returns the next batch, or None at the end.

        Args:
          form: the form of the batch.
          most: number of steps that will still be taken, with those of this batch, so that no others are read. None if it is unknown.
        """

    @abstractmethod
    def put_back(self, batch: Batch) -> None:
        """Takes back the batch that `get` returned last, so that the next `get` reads its steps again."""

    @abstractmethod
    def stop(self) -> None:
        """Stops reading ahead. Steps that were read are kept for the next `get`."""


class Feed:
    """Reads steps, usually in the background thread.

    It holds no reference to the iterator, so that an iterator that the user drops is collected while the thread reads.
    One thread uses it at a time: the consumer calls `put_back` only after it has stopped the thread.

    Args:
      reader: reads pieces.
      landing: takes over each piece before the next one is read. None if the pieces are given away as they are.
    """

    def __init__(self, reader: AbstractReader, landing: Landing | None = None) -> None:
        self._reader, self._landing = reader, landing
        self._first: deque[Step] = deque()
        self._failure: BaseException | None = None

    def put_back(self, steps: Sequence[Step], failure: BaseException | None = None) -> None:
        """Makes `steps` the next steps to read, and `failure` the error to raise after them."""
        self._first.extendleft(reversed(steps))
        self._failure = failure or self._failure

    def read(self, count: int, room: int | None = None) -> list[Step]:
        """Returns the next `count` steps. Returns fewer at the end or before a failure, which the next call raises.

        Args:
          count: number of steps.
          room: number of steps for which a stack has room, into which the rows are written. None for no stack.
        """
        steps: list[Step] = []
        last: Piece | None = None
        while len(steps) < count:
            try:
                step, last = self._read(len(steps), room, last)
            except Exception as e:
                # The steps before the failure are good. The user gets them first, in the order of the data.
                if not steps:
                    raise
                self._failure = e
                break
            if step is None:
                break
            steps.append(step)
        return steps

    def _read(self, index: int, room: int | None, last: Piece | None) -> tuple[Step | None, Piece | None]:
        """Returns a step, and its piece if it has just landed: the stack of a step that was put back may be in use."""
        if self._first:
            return self._first.popleft(), None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        piece = self._reader.read()
        if piece is None:
            return None, None
        if self._landing is not None:
            place, before = (0, None) if room is None else (index, last)
            piece = self._landing.land(piece, place, room, before)
        return Step(piece, piece.rows or 0, piece.counts, self._reader.get_state()), piece


@final
class ReadAhead(AbstractBatches):
    """Batches that are read and placed on the devices before the user asks for them.

    Args:
      feed: reads steps.
      place: makes the value of a batch.
      ahead: number of batches to read in advance.
      facts: what is known about the dataset.
      waits: whether the consumer waits for each step, so that only another thread can read meanwhile.
    """

    def __init__(self, feed: Feed, place: Place, ahead: int, facts: Facts, *, waits: bool) -> None:
        self._feed, self._place, self._ahead, self._is_begun = feed, place, ahead, facts.is_begun
        # Handing a small batch from thread to thread takes longer than reading it. None: the first batch shows how large they are.
        self._if_large = True if waits else None
        # The caller's code, which may write to arrays of the caller, runs between two requests, so they are read during a request.
        is_of_caller = facts.is_in_memory or facts.owner is Owner.CALLER
        self._in_thread = False if is_of_caller else self._if_large if self._is_begun else True
        self._form: Form | None = None
        self._readings: AbstractReadings[Batch] | None = None

    @override
    def get(self, form: Form, most: int | None = None) -> Batch | None:
        # A last stack that is shorter has another form.
        batches = None if most is None else max(1, most // (form.steps or 1))
        if self._readings is None or (form is not self._form and form != self._form):
            # What was read ahead has the wrong form. `stop` returns its steps to the feed.
            self.stop()
            self._form = form
            read = _reads(self._feed, self._place, form)
            first = None
            if self._in_thread is None:
                first = read()
                self._in_thread = first is not None and bytes_on_host(first.steps[0].piece) >= _LARGE_BYTES
                batches = batches and batches - 1
            # Between two requests, the caller's code may change what the data yield next, or end the loop.
            ahead = 0 if self._is_begun and not self._in_thread else self._ahead
            self._readings = readings(read, ahead, in_thread=self._in_thread, most=batches)
            if first is not None:
                return first
        return self._readings.get(batches)

    def read_beside(self) -> None:
        """Allows a thread to read data in memory alongside the consumer. The consumer promises that nobody writes to the data during that time."""
        if self._in_thread is False:
            self.stop()
            self._in_thread = self._if_large

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
    room = form.room_ahead

    def read() -> Batch | None:
        steps = feed.read(form.steps or 1, room)
        if len(steps) > 1:
            steps, left = split(steps)
            feed.put_back(left)
        if not steps:
            return None
        return Batch(place(steps, None if form.steps is None else form.room(len(steps))), steps)

    return read
