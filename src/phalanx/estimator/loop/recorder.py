# SPDX-License-Identifier: Apache-2.0
"""Decides which steps record the summaries of a model function, and where to."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import final

import numpy as np

from phalanx import summary
from phalanx._src.tracing.records import defaults, restored
from phalanx.estimator.loop.graph import GLOBAL_STEP, Graph
from phalanx.summary import SummaryWriter
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")


@final
class Recorder:
    """Records the summaries of a model function at every so many steps, from the first.

    Args:
      writer: writes them. None records nothing.
      every: number of steps between two summaries. None records nothing.
      graph: the graph of the model function.
    """

    def __init__(self, writer: SummaryWriter | None, every: int | None, graph: Graph | None = None) -> None:
        self._writer, self._every, self._graph = writer if every else None, every, graph
        self._first: int | None = None

    def start(self, done: int) -> None:
        """Counts from this number of steps."""
        self._first = done

    @contextmanager
    def step(self, done: int) -> Iterator[None]:
        """Records the step inside the `with` block if it is due.

        Args:
          done: number of steps before this one.
        """
        self._first = done if self._first is None else self._first
        # Hooks and user code have their own default writers and steps, which this step must not replace for longer.
        with restored():
            # The step after this one's update, under which TensorFlow's SummarySaverHook writes, too.
            defaults.writer, defaults.step = self._writer, done + 1
            with summary.record_if(self._is_due(done)) if self._writer is not None else nullcontext():
                yield

    def _is_due(self, done: int) -> bool:
        assert self._first is not None
        assert self._every is not None
        # The program without summaries is another one, so a model function that records none keeps the first.
        is_plain = self._graph is not None and self._graph.is_traced and not self._graph.trace.has_records
        return is_plain or (done - self._first) % self._every == 0


def write_results(writer: SummaryWriter, results: Mapping[str, PyTree], path: str | None) -> None:
    """Writes the results of an evaluation to the log and as summaries.

    Args:
      writer: writes the summaries.
      results: the metrics by name, and the number of steps.
      path: the checkpoint that was evaluated. None if there was none.
    """
    step = int(results[GLOBAL_STEP])
    _log.info("Evaluation of step %d: %s", step, {key: value for key, value in results.items() if key != GLOBAL_STEP})
    with writer.as_default(step):
        for key, value in results.items():
            # The step is the x-axis. Arrays, such as a confusion matrix, have no scalar summary.
            if key != GLOBAL_STEP and np.ndim(value) == 0:
                summary.scalar(key, float(value))
        if path is not None:
            summary.text("checkpoint_path", path)
