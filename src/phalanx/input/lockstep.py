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
from phalanx.input.prefetch import readings
from phalanx.input.shard import Worker
from phalanx.input.sources.base import AbstractReader, Piece
from phalanx.input.state import exchange_bytes

AHEAD = 8
"""How many steps are agreed on at once: the workers communicate once for so many."""

_FAILED = -1


@final
class Lockstep(AbstractBatches):
    """The batches of one pass. Every worker asks for each of them, on its main thread, in the same form.

    A worker whose data has ended goes on with batches without rows until all have ended.

    Args:
      reader: reads this worker's pieces.
      place: makes batches of them.
      ahead: whether a thread reads in advance.
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
    ) -> None:
        feed = Feed(reader)
        self._readings = readings(lambda: next(iter(feed.read(1)), None), AHEAD if ahead else 0, in_thread=True)
        self._place, self._worker, self._exchange = place, worker, exchange
        self._own: deque[Step] = deque()
        self._agreed: deque[tuple[bool, int, int]] = deque()
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
        self._readings.stop()

    def _step(self) -> Step | None:
        if self._returned:
            return self._returned.popleft()
        if not self._agreed:
            self._agree()
        goes_on, rows, widest = self._agreed[0]
        if not goes_on:
            return None
        self._agreed.popleft()
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
        plans, failure = np.zeros((AHEAD, 3), np.int32), None
        try:
            while len(self._own) < AHEAD and (step := self._readings.get()) is not None:
                self._own.append(step)
        except Exception as e:  # The others are told before it is raised, or they would wait for this worker.
            failure = e
        for plan, step in zip(plans, self._own, strict=False):
            plan[:] = 1, sum(step.piece.counts), step.widest
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
        for step_plans in all_plans.transpose(1, 2, 0):
            goes_on, rows, widest = step_plans
            self._agreed.append((bool(goes_on.any()), int(rows.sum()), int(widest.max())))

    def _share_padding(self, *, is_needed: bool) -> None:
        """Keeps a row for batches without rows of this worker's own; one without any gets it from another."""
        if self._own:
            self._padding = jax.tree.map(lambda x: np.asarray(x[:1]), self._own[-1].piece.parts[0])
        if is_needed and not self._has_shared:
            self._has_shared = True
            rows = exchange_bytes(b"" if self._padding is None else pickle.dumps(self._padding), self._exchange)
            known = [row for row in rows if row]
            self._padding = pickle.loads(known[0]) if known and self._padding is None else self._padding
