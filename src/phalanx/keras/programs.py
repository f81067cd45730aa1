# SPDX-License-Identifier: Apache-2.0
"""The programs of `fit`, `evaluate` and `predict`: a step of a model on all replicas, or several."""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx._src.options import RunOptions
from phalanx._src.programs.function import Function
from phalanx._src.programs.replicas import trace_run
from phalanx._src.programs.values import to_host
from phalanx._src.strategies.base import Strategy
from phalanx._src.tracing.scope import innermost
from phalanx._src.tracing.strategy import Updates
from phalanx._src.typed_jax import block_until_ready
from phalanx.errors import arguments
from phalanx.keras import predictions, steps
from phalanx.typing import PyTree

AUTO = "auto"
"""The value of `steps_per_execution` in `compile` with which `fit` chooses the number."""

# A step holds its batch until it ends. JAX limits the number of steps that wait on a CPU to 32, and not their bytes.
_MOST_WAITING = 32
_MOST_WAITING_BYTES = 16 << 20

ReplicaStep = Callable[[keras.Model, Any], Any]


def steps_per_execution(model: keras.Model) -> int:
    """Returns how many steps one program of a model runs now.

    Raises:
      InvalidArgumentError: `compile` was called with something else than a number or "auto".
    """
    if model.steps_per_execution == AUTO:
        return 1
    hint = 'steps_per_execution=16, or "auto"'
    return arguments.integer("steps_per_execution", model.steps_per_execution, hint=hint)


def runs_one_by_one(model: keras.Model, strategy: Strategy) -> bool:
    """Whether a program of a model runs one step, however many an execution has."""
    return strategy.updates is not Updates.IN_REPLICAS or model.run_eagerly


def is_single(model: keras.Model, strategy: Strategy) -> bool:
    """Whether a program of a model runs one step."""
    return model.steps_per_execution in (1, AUTO) or runs_one_by_one(model, strategy)


@final
class StepProgram:
    """Runs one kind of step of a model on all replicas.

    The steps are compiled into one program, unless the model has `run_eagerly`.

    Args:
      reference: the model.
      strategy: the strategy that the model belongs to.
      step: the step of one replica.
    """

    def __init__(self, reference: "weakref.ref[keras.Model]", strategy: Strategy, step: ReplicaStep) -> None:
        self._reference, self._strategy, self._step = reference, strategy, step

        # Its own function, because the name is the heading of its text in TensorBoard.
        def run(batches: PyTree, count: jax.Array | None = None) -> PyTree:
            outputs = trace_run(strategy, self._replica_step, (batches,), {}, steps=count)
            if self._is_prediction:
                return strategy.on_all_workers(predictions.apart(outputs))
            return self._logs(outputs, count)

        run.__qualname__ = f"{self._model.name}.{step.__name__}"
        self._compiled = Function(run)

    @property
    def _model(self) -> keras.Model:
        model = self._reference()
        assert model is not None
        return model

    @property
    def _is_prediction(self) -> bool:
        return self._step is steps.predict

    def _replica_step(self, batch: PyTree) -> PyTree:
        return self._step(self._model, batch)

    def __call__(self, batches: PyTree, count: int | None, *, runs: bool = True) -> PyTree:
        """Runs a step, or `count` steps on a stack of batches. With `runs=False`, only traces them.

        Returns:
          The logs of the last step, or the outputs of `predict`.
        """
        model = self._model
        if model.run_eagerly:
            outputs = self._strategy.run(self._replica_step, args=(batches,), options=RunOptions(eager=True))
            if not self._is_prediction:
                return self._logs(outputs, None)
            # `on_all_workers` works in a program only. `to_host` communicates if other processes have some of the rows.
            return jax.tree.map(to_host, predictions.apart(outputs))
        program = self._compiled if runs else self._compiled.prepare
        return program(batches) if count is None or is_single(model, self._strategy) else program(batches, count)

    def _logs(self, outputs: PyTree, count: int | jax.Array | None) -> PyTree:
        """Returns the logs of the last step: the metrics, and the averaged outputs of a custom step.

        Args:
          outputs: outputs of the steps, which is a dict only for a custom step.
          count: number of steps stacked in the outputs. None for a single step.
        """
        model = self._model
        results = model.get_metrics_result()
        if not isinstance(outputs, dict):
            return results
        outputs = _flat(outputs)
        # If a metric has the same name as an output, report the metric's result, unless the step did not update it.
        still = {m.name for m in model.metrics if not _is_updated(m)}
        custom_outputs = {name: value for name, value in outputs.items() if name not in results or name in still}
        # Python numbers are constants of the trace: equal on all replicas and in all steps.
        averaged = {name: value for name, value in custom_outputs.items() if isinstance(value, (int, float))}
        arrays = {name: value for name, value in custom_outputs.items() if name not in averaged}
        if arrays:
            averaged |= self._strategy.reduce("MEAN", arrays, axis=None)
        # A stack may have room for more steps than were run. Python numbers were not stacked.
        last = jax.tree.map(lambda x: x if count is None or not jnp.ndim(x) else x[count - 1], averaged)
        return {name: last[name] if name in custom_outputs else results[name] for name in outputs}


@final
class WaitingSteps:
    """The steps that have been dispatched and may not have ended. If their batches are large, a few of them keep the devices busy.

    Args:
      batches: the first batch. The others have the same size, or are shorter.
    """

    def __init__(self, batches: PyTree) -> None:
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(batches) if isinstance(x, (jax.Array, np.ndarray)))
        most = max(2, _MOST_WAITING_BYTES // max(1, num_bytes))
        self._most = most if most < _MOST_WAITING else None
        self._logs: deque[PyTree] = deque()

    def add(self, logs: PyTree) -> None:
        """Adds a step with its logs, and waits for the first one if there are too many."""
        if self._most is not None:
            self._logs.append(logs)
            if len(self._logs) > self._most:
                block_until_ready(self._logs.popleft())


def _is_updated(metric: keras.metrics.Metric) -> bool:
    """Whether the step that is being traced has updated a metric. True outside a trace, where it is unknown."""
    scope = innermost()
    entries = [scope and scope.entries.get(id(v)) for v in metric.variables]
    return scope is None or any(entry is not None and entry.written for entry in entries)


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs in which nested dicts, such as those of `CompileMetrics`, are merged into the outer dict, as in Keras."""
    parts = (item if isinstance(item, dict) else {name: item} for name, item in logs.items())
    return {name: value for part in parts for name, value in part.items()}
