# SPDX-License-Identifier: Apache-2.0
"""Workers that read different rows take the same number of steps."""

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np
from typing_extensions import override

from phalanx.errors import InputError
from phalanx.input.feed import AbstractBatches, Batch, Feed, Form, Place, Step, split
from phalanx.input.prefetch import AbstractReadings, readings
from phalanx.input.shard import Worker
from phalanx.input.sources.base import UNKNOWN, AbstractReader, Facts, Piece
from phalanx.input.state import exchange_bytes

AHEAD = 8
"""How many steps are agreed on at once: the workers communicate once for so many."""

_FAILED = -1
_SAME_DATA = (
    "the same data on all workers; where each has its own, strategy.distribute_datasets_from_function, or "
    "phalanx.keras.DatasetCreator in fit"
)


@final
class Lockstep(AbstractBatches):
    """The batches of one pass. Every worker asks for each of them, on its main thread, in the same form.

    A worker whose data has ended goes on with batches without rows until all have ended.

    Args:
      reader: reads this worker's pieces.
      place: makes batches of them.
      ahead: whether a thread reads in advance.
      copies: whether others may change the arrays of a piece after it was read.
      worker: this worker.
      exchange: see `Topology.exchange`.
    """

    def __init__(
        self,
        reader: AbstractReader,
        place: Place,
        worker: Worker,
        exchange: Callable[[np.ndarray], np.ndarray],
        *,
        ahead: bool,
        copies: bool = False,
    ) -> None:
        self._feed, self._ahead = Feed(reader, copies=copies), AHEAD if ahead else 0
        self._readings: AbstractReadings[Step] | None = self._start()
        self._place, self._worker, self._exchange = place, worker, exchange
        self._own: deque[Step] = deque()
        self._agreed: deque[np.ndarray] = deque()
        self._returned: deque[Step] = deque()
        self._padding: Any = None
        self._has_shared = False

    @override
    def get(self, form: Form) -> Batch | None:
        steps: list[Step] = []
        while len(steps) < form.size and (step := self._step()) is not None:
            steps.append(step)
        steps, left = split(steps, form)
        self._returned.extendleft(reversed(left))
        return Batch(self._place(steps, form.room(len(steps))), steps) if steps else None

    @override
    def put_back(self, batch: Batch) -> None:
        self._returned.extendleft(reversed(batch.steps))

    @override
    def stop(self) -> None:
        if self._readings is not None:
            self._feed.put_back(*self._readings.stop())
            self._readings = None

    def _start(self) -> AbstractReadings[Step]:
        feed = self._feed
        return readings(lambda: next(iter(feed.read(1)), None), self._ahead, in_thread=True)

    def _step(self) -> Step | None:
        if self._returned:
            return self._returned.popleft()
        if not self._agreed:
            self._agree()
        goes_on, all_rows, all_widest, wholes = self._agreed[0].T
        if not goes_on.any():
            return None
        _require_same_batch(wholes)
        self._agreed.popleft()
        rows, widest = int(all_rows.sum()), int(all_widest.max())
        if self._own:
            own = self._own.popleft()
            return Step(own.piece, rows, widest, own.state)
        return Step(Piece([self._padding], [0] * self._worker.replicas, rows), rows, widest, None)

    def _agree(self) -> None:
        """Tells the others what this worker has for the next steps, and hears the same of them.

        Raises:
          InputError: the data of another worker failed.
          Exception: what this worker's data raised.
        """
        plans, failure = np.zeros((AHEAD, 4), np.int32), None
        try:
            self._readings = reading = self._readings or self._start()
            while len(self._own) < AHEAD and (step := reading.get()) is not None:
                self._own.append(step)
        except Exception as e:  # The others are told before it is raised, or they would wait for this worker.
            failure = e
        for plan, step in zip(plans, self._own, strict=False):
            plan[:] = 1, sum(step.piece.counts), step.widest, step.rows
        all_plans = self._exchange(np.full_like(plans, _FAILED) if failure else plans)
        if failure is not None:
            raise failure
        failed = np.flatnonzero((all_plans == _FAILED).any(axis=(1, 2)))
        if len(failed):
            raise InputError(
                f"the next batch of worker {self._worker.index}",
                f"the data of worker {failed[0]} failed; its own error says why.",
                f"look at the log of worker {failed[0]}",
            )
        self._share_padding(is_needed=bool((all_plans[:, :, 0].sum(axis=1) < AHEAD).any()))
        self._agreed.extend(all_plans.swapaxes(0, 1))

    def _share_padding(self, *, is_needed: bool) -> None:
        """Keeps a row for batches without rows of this worker's own; one without any gets it from another."""
        if self._own:
            self._padding = jax.tree.map(lambda x: np.asarray(x[:1]), self._own[-1].piece.parts[0])
        if is_needed and not self._has_shared:
            self._has_shared = True
            rows = exchange_bytes(b"" if self._padding is None else pickle.dumps(self._padding), self._exchange)
            known = [row for row in rows if row]
            self._padding = pickle.loads(known[0]) if known and self._padding is None else self._padding


def _require_same_batch(rows: np.ndarray) -> None:
    """Raises if the workers do not divide the same batch.

    Args:
      rows: how many rows the batch has that each of them divides; 0 where it reads rows of its own, or has no batch left.

    Raises:
      InputError: the numbers differ.
    """
    if (rows != rows[0]).any():
        found = ", ".join(f"{count} rows on worker {worker}" for worker, count in enumerate(rows))
        raise InputError("the next batch", f"it has {found}, and each takes its part of it.", _SAME_DATA)


def require_same_data(facts: Facts, exchange: Callable[[np.ndarray], np.ndarray]) -> None:
    """Makes sure that workers which divide all batches have the same data, as far as that is known; all must call it.

    Args:
      facts: what this worker knows of its data.
      exchange: see `Topology.exchange`.

    Raises:
      InputError: the numbers of rows, of batches or of rows in a batch differ.
    """
    known = {"rows": facts.num_records, "batches": facts.num_batches, "rows in a batch": facts.batch_size}
    numbers = np.array([UNKNOWN if x is None else x for x in known.values()], np.int64)
    # As halves: JAX has no numbers of 64 bits unless it is told to.
    found = np.ascontiguousarray(exchange(numbers.view(np.int32))).view(np.int64)
    if (found != found[0]).any():
        of_workers = [", ".join(f"{n} {name}" for n, name in zip(own, known, strict=True) if n >= 0) for own in found]
        told = "; ".join(
            f"worker {worker} has {own or 'some, nobody knows how many'}" for worker, own in enumerate(of_workers)
        )
        raise InputError("one dataset that all workers divide", f"{told}.", _SAME_DATA)
