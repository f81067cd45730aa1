# SPDX-License-Identifier: Apache-2.0
"""Keeps workers that read different rows at the same number of steps.

A step contains collectives, so a worker that ends early would leave the others waiting. Workers therefore exchange what they
have for the next `AHEAD` steps, and a worker without rows takes part with padding until all workers have ended. A worker whose source raises
says so in this exchange, and all raise an error that names it.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np
from typing_extensions import override

from phalanx._src.input.feed import AbstractBatches, Batch, Feed, Form, Place, Step, split
from phalanx._src.input.prefetch import AbstractReadings, readings
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import UNKNOWN, Facts, Piece
from phalanx._src.input.sources.rows import read
from phalanx._src.input.wire import exchange_bytes, packed, unpacked
from phalanx.errors import InputError

AHEAD = 8
"""Number of steps that the workers agree on in one exchange, so that the cost of an exchange is shared by as many steps."""

_FAILED = -1
_SAME_DATA = (
    "the same data and batch_size on all workers; or, if each has its own data, strategy.distribute_datasets_from_function, or "
    "phalanx.keras.DatasetCreator in fit"
)


@final
class Lockstep(AbstractBatches):
    """The batches of one iteration, in the same number on every worker.

    Every worker requests each batch in the same form, on its main thread, because a request may be a collective call.

    Args:
      feed: reads this worker's steps.
      place: makes the value of a batch.
      worker: this worker.
      exchange: see `Topology.exchange`.
      ahead: whether a thread reads in advance.
    """

    def __init__(
        self,
        feed: Feed,
        place: Place,
        worker: InputWorker,
        exchange: Callable[[np.ndarray], np.ndarray],
        *,
        ahead: bool,
    ) -> None:
        self._feed, self._ahead = feed, AHEAD if ahead else 0
        self._readings: AbstractReadings[Step] | None = None
        self._place, self._worker, self._exchange = place, worker, exchange
        # Steps of this worker that were read for an exchange and not yet used.
        self._own: deque[Step] = deque()
        # Per agreed step, an int32 array (workers, 2 + replicas): see `_agree`.
        self._agreed: deque[np.ndarray] = deque()
        self._returned: deque[Step] = deque()
        # One row of any worker's data, to pad batches for which this worker has no rows.
        self._padding: Any = None
        self._has_shared = False

    @override
    def get(self, form: Form, most: int | None = None) -> Batch | None:
        steps: list[Step] = []
        while len(steps) < (form.steps or 1) and (step := self._step(most and most - len(steps))) is not None:
            steps.append(step)
        steps, left = split(steps)
        self._returned.extendleft(reversed(left))
        return Batch(self._place(steps, form.room(len(steps))), steps) if steps else None

    @override
    def put_back(self, batch: Batch) -> None:
        self._returned.extendleft(reversed(batch.steps))

    @override
    def stop(self) -> None:
        # The steps in `_own` stay, because the workers have already agreed on them.
        if self._readings is not None:
            self._feed.put_back(*self._readings.stop())
            self._readings = None

    def _start(self, most: int | None) -> AbstractReadings[Step]:
        feed = self._feed
        return readings(lambda: next(iter(feed.read(1)), None), self._ahead, in_thread=True, most=most)

    def _step(self, most: int | None) -> Step | None:
        if self._returned:
            return self._returned.popleft()
        if not self._agreed:
            self._agree(most)
        # At the end of the data the entry is not removed, so that later calls return None without another exchange.
        plans = self._agreed[0]
        if not plans[:, 0].any():
            return None
        _require_same_batch(plans[:, 1])
        self._agreed.popleft()
        counts: list[int] = plans[:, 2:].ravel().tolist()
        if self._own:
            step = self._own.popleft()
            return Step(step.piece, sum(counts), counts, step.state)
        # This worker has no rows left, but must take part in the collectives of the step.
        return Step(Piece([self._padding], [0] * self._worker.replicas, sum(counts)), sum(counts), counts, None)

    def _agree(self, most: int | None) -> None:
        """Exchanges with the other workers what each has for the next `AHEAD` steps, or `most` if it is less. A collective call.

        The columns of a plan are: whether there is a step, the rows of the global batch if this worker knows them, and the rows of
        each of its replicas.

        Raises:
          InputError: the data of another worker failed.
          Exception: the data of this worker raised it.
        """
        # All workers expect the same number of steps, so the exchanged plans have equal shapes.
        count = AHEAD if most is None else min(AHEAD, most)
        plans, failure = np.zeros((count, 2 + self._worker.replicas), np.int32), None
        try:
            self._readings = reading = self._readings or self._start(most)
            while (num_own := len(self._own)) < count and (step := reading.get(most and most - num_own)) is not None:
                self._own.append(step)
        except Exception as e:  # Tell the others before raising it, because they wait for this worker in the exchange.
            failure = e
        for plan, step in zip(plans, self._own, strict=False):
            plan[:] = 1, step.rows, *step.counts
        all_plans = self._exchange(np.full_like(plans, _FAILED) if failure else plans)
        if failure is not None:
            raise failure
        failed = np.flatnonzero((all_plans == _FAILED).any(axis=(1, 2)))
        if len(failed):
            raise InputError(
                f"the next batch of worker {self._worker.index}",
                f"the data of worker {failed[0]} failed. Worker {failed[0]} raised the error.",
                f"look at the log of worker {failed[0]}",
            )
        self._share_padding(is_needed=bool((all_plans[:, :, 0].sum(axis=1) < count).any()))
        self._agreed.extend(all_plans.swapaxes(0, 1))

    def _share_padding(self, *, is_needed: bool) -> None:
        """Keeps one row as padding for later batches. A worker that never had a row gets one from another worker.

        Args:
          is_needed: whether some worker has no more steps than these. All workers compute the same value.
        """
        if self._own:
            self._padding = jax.tree.map(lambda x: np.array(read(x[:1])), self._own[-1].piece.parts[0])
        # One exchange is enough: afterwards every worker has a row, unless no worker has any.
        if is_needed and not self._has_shared:
            self._has_shared = True
            rows = exchange_bytes(b"" if self._padding is None else packed(self._padding), self._exchange)
            known = [row for row in rows if row]
            if len(known) not in (0, len(rows)):
                shared = unpacked(known[0])  # Every worker does, so that all raise the same error.
                self._padding = shared if self._padding is None else self._padding


def _require_same_batch(rows: np.ndarray) -> None:
    """Checks that the workers split the same global batch.

    Args:
      rows: int array (workers,). Rows of the global batch as each worker sees it; 0 if the worker reads its own rows, or
        has no batch left.

    Raises:
      InputError: the numbers differ.
    """
    if (rows != rows[0]).any():
        counts = ", ".join(f"{count} rows on worker {worker}" for worker, count in enumerate(rows))
        raise InputError(
            "the next batch", f"it has {counts}, but each worker takes its part of one global batch.", _SAME_DATA
        )


def require_same_data(facts: Facts, exchange: Callable[[np.ndarray], np.ndarray]) -> None:
    """Checks that the workers have the same data, as far as that is known before reading. A collective call.

    Args:
      facts: what this worker knows about its data.
      exchange: see `Topology.exchange`.

    Raises:
      InputError: the workers differ in their numbers of rows, batches, or rows per batch.
    """
    known = {"rows": facts.num_records, "batches": facts.num_batches, "rows in a batch": facts.batch_size}
    numbers = np.array([UNKNOWN if x is None else x for x in known.values()], np.int64)
    # Sent as pairs of int32, because JAX has no int64 unless `jax_enable_x64` is set.
    table = np.ascontiguousarray(exchange(numbers.view(np.int32))).view(np.int64)
    if (table != table[0]).any():
        of_workers = [", ".join(f"{n} {name}" for n, name in zip(row, known, strict=True) if n >= 0) for row in table]
        description = "; ".join(
            f"worker {worker} has {text or 'an unknown number of rows'}" for worker, text in enumerate(of_workers)
        )
        raise InputError("one dataset that is split over all workers", f"{description}.", _SAME_DATA)
