# SPDX-License-Identifier: Apache-2.0
"""How many steps of `fit` one program runs, with `compile(steps_per_execution="auto")`."""

from collections.abc import Sequence
from time import perf_counter
from typing import final

import keras
import numpy as np

from phalanx._src.mesh.topology import Topology
from phalanx._src.runtime.notes import note
from phalanx._src.strategies.base import Strategy
from phalanx._src.typed_jax import block_until_ready
from phalanx.keras.data import EpochData
from phalanx.keras.handover import Run
from phalanx.keras.programs import AUTO, runs_one_by_one
from phalanx.typing import PyTree

_MANY = 16
"""Number of steps per execution that is tried."""
_WARM = 3
"""Number of first executions that are not timed: the first one is compiled, and the others fill what runs ahead of the devices."""
_LEAST = 48
"""Number of steps that are timed."""
_LONG_S = 0.02
"""Time of a step, in seconds, from which on the time in Python no longer counts."""
_GAIN = 0.95
"""Largest ratio of the times of a step at which many steps per execution are chosen, because callbacks then hear of fewer batches."""


@final
class Pace:
    """Times steps of `fit`, first one by one and then many per execution, and keeps the faster number.

    Args:
      model: the model, whose `steps_per_execution` it sets.
      data: what a call of `fit` reads: the data to train on, and for validation.
      topology: the devices of all processes, which train with the same number.
    """

    def __init__(self, model: keras.Model, data: Sequence[EpochData], topology: Topology) -> None:
        self._model, self._data, self._topology = model, data, topology
        self._single_s: float | None = None
        self._is_over = False
        self._set(1)

    def _set(self, number: int) -> None:
        self._model.steps_per_execution = number
        for data in self._data:
            data.group = data.stacked = number
        self._executions = self._steps = 0
        self._spent_s = 0.0

    def begin(self) -> None:
        """Begins an epoch: the time between two epochs does not count."""
        self._since_s = perf_counter()

    def add(self, steps: int, logs: PyTree) -> bool:
        """Counts an execution with its steps and its logs. All processes must call it after each one.

        Returns:
          Whether the next execution has another number of steps.
        """
        if self._is_over:
            return False
        self._executions += 1
        is_timed = self._executions > _WARM
        if is_timed:
            self._steps += steps
        is_enough = self._steps >= _LEAST
        if is_enough or self._executions == _WARM:
            block_until_ready(logs)  # JAX returns before a step has ended.
        now_s = perf_counter()
        if is_timed:
            self._spent_s += now_s - self._since_s
        self._since_s = now_s
        return is_enough and self._decide(self._spent_s / self._steps)

    def _decide(self, step_s: float) -> bool:
        """Tries many steps per execution, or ends with the better number. Returns whether the number changes."""
        single_s, before = self._single_s, self._model.steps_per_execution
        is_many = step_s < (_LONG_S if single_s is None else _GAIN * single_s)
        # The processes have measured different times.
        number = _MANY if self._topology.from_chief([np.array(is_many)])[0] else 1
        self._is_over = number == 1 or single_s is not None
        if self._is_over:
            many = "" if single_s is None else f", {step_s * 1e3:.3g} ms with {_MANY}"
            note(f"steps_per_execution={number}, because a step takes {(single_s or step_s) * 1e3:.3g} ms{many}")
        self._single_s = step_s
        self._set(number)
        return bool(number != before)

    def end(self) -> None:
        """Ends `fit`. If it had too few steps, the next one begins again."""
        if not self._is_over:
            self._model.steps_per_execution = AUTO


def pace_of(model: keras.Model, strategy: Strategy, run: Run) -> Pace | None:
    """Returns the pace of a call of `fit`. None if the user has chosen a number, or if a program can run one step only."""
    # A process that joins an elastic group does not know what the others have measured.
    is_given = model.steps_per_execution != AUTO or run.training is not None
    if is_given or runs_one_by_one(model, strategy):
        return None
    return Pace(model, [data for data in (run.data, run.validation) if data is not None], strategy.topology)
