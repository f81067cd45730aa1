# SPDX-License-Identifier: Apache-2.0
"""Hooks that end a training run early: the names of `tf.estimator.experimental`."""

import functools
import logging
import operator
import os
from collections.abc import Callable
from typing import TypeAlias, final

import numpy as np
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.hooks.timer import SecondOrStepTimer, agreed_by_chief
from phalanx.estimator.loop.session import SessionRunContext, SessionRunHook, SessionRunValues
from phalanx.summary import events

_log = logging.getLogger("phalanx")

Values: TypeAlias = list[tuple[int, float]]
"""The values of one metric, each with the training step that was evaluated, in the order of the steps."""


@final
class EarlyStoppingHook(SessionRunHook):
    """Ends a training run when a function returns True. `make_early_stopping_hook` creates it.

    Args:
      should_stop_fn: function without arguments. Returns whether to stop. With several processes, the chief decides.
      every_secs: seconds between two calls. None if `every_steps` is given.
      every_steps: number of steps between two calls, or None.
    """

    def __init__(self, should_stop_fn: Callable[[], bool], every_secs: float | None, every_steps: int | None) -> None:
        self._should_stop, self._timer = should_stop_fn, SecondOrStepTimer(every_secs, every_steps)

    @override
    def begin(self) -> None:
        """Clears the state of an earlier training run."""
        self._timer.reset()

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Calls the function if it is due."""
        # Called between two steps on all processes at the same step, so that they can agree.
        step = run_context.session.step
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            # Only the chief calls the function: it may read files that other hosts do not see.
            if agreed_by_chief(self._should_stop):
                _log.info("Early stopping at step %d.", step)
                run_context.request_stop()


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Returns a hook that ends a training run when a function returns True. May be called in any context.

    Args:
      estimator: the Estimator that trains.
      should_stop_fn: function without arguments. Returns whether to stop.
      run_every_secs: seconds between two calls of the function. None if `run_every_steps` is given.
      run_every_steps: number of steps between two calls, or None.

    Raises:
      InvalidArgumentError: both or none of the intervals are given, or an argument has the wrong type.

    Source: tf.estimator.experimental.make_early_stopping_hook.

    Example:
      >>> import time
      >>> import phalanx.estimator as estimator
      >>> end_s = time.monotonic() + 20
      >>> def hook_of(model):
      ...     return estimator.experimental.make_early_stopping_hook(model, lambda: time.monotonic() > end_s, run_every_secs=1)
    """
    arguments.instance("estimator", estimator, Estimator, "make_early_stopping_hook(estimator, should_stop_fn)")
    arguments.function("should_stop_fn", should_stop_fn, "lambda: time.monotonic() > end_s")
    return EarlyStoppingHook(should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Returns a hook that ends a training run once a metric of an evaluation is above a threshold. May be called in any context.

    Args:
      estimator: the Estimator that trains.
      metric_name: name of the metric.
      threshold: the threshold.
      eval_dir: folder of the summaries of the evaluations. None for the Estimator's evaluation folder.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between two checks. None if `run_every_steps` is given.
      run_every_steps: number of steps between two checks, or None.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.experimental.stop_if_higher_hook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def hook_of(model):
      ...     return estimator.experimental.stop_if_higher_hook(model, "accuracy", 0.9)
    """
    _require_number("threshold", threshold)
    stops = functools.partial(_crosses, operator.gt, threshold)
    return _metric_hook(stops, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Returns a hook that ends a training run once a metric of an evaluation is below a threshold. May be called in any context.

    Args:
      estimator: the Estimator that trains.
      metric_name: name of the metric.
      threshold: the threshold.
      eval_dir: folder of the summaries of the evaluations. None for the Estimator's evaluation folder.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between two checks. None if `run_every_steps` is given.
      run_every_steps: number of steps between two checks, or None.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.experimental.stop_if_lower_hook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def hook_of(model):
      ...     return estimator.experimental.stop_if_lower_hook(model, "loss", 0.1)
    """
    _require_number("threshold", threshold)
    stops = functools.partial(_crosses, operator.lt, threshold)
    return _metric_hook(stops, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Returns a hook that ends a training run once a metric of evaluations no longer increases. May be called in any context.

    Args:
      estimator: the Estimator that trains.
      metric_name: name of the metric.
      max_steps_without_increase: number of training steps without an increase after which it stops.
      eval_dir: folder of the summaries of the evaluations. None for the Estimator's evaluation folder.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between two checks. None if `run_every_steps` is given.
      run_every_steps: number of steps between two checks, or None.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.experimental.stop_if_no_increase_hook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def hook_of(model):
      ...     return estimator.experimental.stop_if_no_increase_hook(model, "accuracy", max_steps_without_increase=1000)
    """
    arguments.integer("max_steps_without_increase", max_steps_without_increase)
    stops = functools.partial(_stalls, operator.gt, max_steps_without_increase)
    return _metric_hook(stops, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Returns a hook that ends a training run once a metric of evaluations no longer decreases. May be called in any context.

    Args:
      estimator: the Estimator that trains.
      metric_name: name of the metric.
      max_steps_without_decrease: number of training steps without a decrease after which it stops.
      eval_dir: folder of the summaries of the evaluations. None for the Estimator's evaluation folder.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between two checks. None if `run_every_steps` is given.
      run_every_steps: number of steps between two checks, or None.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.experimental.stop_if_no_decrease_hook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def hook_of(model):
      ...     return estimator.experimental.stop_if_no_decrease_hook(model, "loss", max_steps_without_decrease=1000)
    """
    arguments.integer("max_steps_without_decrease", max_steps_without_decrease)
    stops = functools.partial(_stalls, operator.lt, max_steps_without_decrease)
    return _metric_hook(stops, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps)


def _require_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float, np.number)):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a number.", f"{name}=0.9")


def _metric_hook(
    stops: Callable[[Values], bool],
    estimator: Estimator,
    metric_name: str,
    eval_dir: str | None,
    min_steps: int,
    every_secs: float | None,
    every_steps: int | None,
) -> SessionRunHook:
    """Returns a hook that ends a training run once a function of one metric's values returns True."""
    arguments.instance("estimator", estimator, Estimator, "stop_if_higher_hook(estimator, metric_name, threshold)")
    if not isinstance(metric_name, str):
        raise InvalidArgumentError(f"metric_name={shown(metric_name)}", "must be a str.", 'metric_name="loss"')
    arguments.integer("min_steps", min_steps, least=0)
    folder = estimator.eval_dir() if eval_dir is None else arguments.path("eval_dir", eval_dir)
    # Each call reads the files again, because the evaluator that writes them is another process (as in tf.estimator).
    return make_early_stopping_hook(
        estimator, lambda: stops(_values_in(folder, metric_name, min_steps)), every_secs, every_steps
    )


def _crosses(is_beyond: Callable[[float, float], bool], threshold: float, values: Values) -> bool:
    """Returns whether a value has crossed a threshold."""
    # One value is enough, even if later ones are back: the hook may look less often than the evaluator evaluates.
    return any(is_beyond(value, threshold) for _, value in values)


def _stalls(is_better: Callable[[float, float], bool], most: int, values: Values) -> bool:
    """Returns whether the best value was not improved for a number of training steps."""
    best: float | None = None
    best_step = 0
    for step, value in values:
        if best is None or is_better(value, best):
            best, best_step = value, step
        if step - best_step >= most:
            return True
    return False


def _values_in(folder: str, metric_name: str, min_steps: int) -> Values:
    """Returns one metric of the evaluations in a folder.

    Raises:
      InvalidArgumentError: an evaluation does not have the metric.
    """
    values = []
    for step, metrics in read_eval_metrics(folder).items():
        if step >= min_steps:
            if metric_name not in metrics:
                raise InvalidArgumentError(
                    f"metric_name={metric_name!r}", f"the evaluations have {sorted(metrics)}.", 'metric_name="loss"'
                )
            values.append((step, metrics[metric_name]))
    return values


def read_eval_metrics(eval_dir: str) -> dict[int, dict[str, float]]:
    """Returns the metrics of the evaluations in a folder, by step. May be called in any context.

    Args:
      eval_dir: folder of the summaries of evaluations, as `Estimator.eval_dir()` returns it.

    Raises:
      InvalidArgumentError: `eval_dir` is not a path.

    Source: tf.estimator.experimental.read_eval_metrics.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.experimental.read_eval_metrics("no such folder")
      {}
    """
    return events.scalars_in(os.path.join(arguments.path("eval_dir", eval_dir), "*.tfevents.*"))
