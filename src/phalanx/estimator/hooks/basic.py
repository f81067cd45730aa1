# SPDX-License-Identifier: Apache-2.0
"""Hooks that stop, log, and check for NaN."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from jax.typing import ArrayLike
from typing_extensions import override

from phalanx import summary
from phalanx.errors import InvalidArgumentError, NanLossDuringTrainingError, arguments, shown
from phalanx.estimator.hooks.timer import SecondOrStepTimer
from phalanx.estimator.loop.graph import GLOBAL_STEP
from phalanx.estimator.loop.session import (
    HookSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from phalanx.summary import SummaryWriter
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")


@final
class StopAtStepHook(SessionRunHook):
    """Stops after a number of steps, or at a step. May be created in any context.

    Args:
      num_steps: number of steps from the beginning of this call.
      last_step: total number of training steps, over all calls.

    Raises:
      InvalidArgumentError: both or none are given, or one is not a positive integer.

    Source: tf.estimator.StopAtStepHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.StopAtStepHook(num_steps=100)
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        # The same rule and the same two names as in basic_session_run_hooks.py.
        # `num_steps` counts from where this call begins.
        if (num_steps is None) == (last_step is None):
            raise InvalidArgumentError(
                f"StopAtStepHook(num_steps={shown(num_steps)}, last_step={shown(last_step)})",
                "exactly one of them must be given.",
                "StopAtStepHook(last_step=100)",
            )
        for name, value in (("num_steps", num_steps), ("last_step", last_step)):
            if value is not None:
                arguments.integer(name, value)
        self._num_steps, self._last_step = num_steps, last_step
        self._end = 0

    @override
    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Computes the last step."""
        # Only now is the first step known: a checkpoint may have been restored since the constructor.
        if self._last_step is not None:
            self._end = self._last_step
        else:
            assert self._num_steps is not None
            self._end = session.step + self._num_steps

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stops at the last step."""
        if run_context.session.step >= self._end:
            run_context.request_stop()


def checked_output(output_dir: object, writer: SummaryWriter | None) -> tuple[str | None, SummaryWriter | None]:
    """Returns the folder and the writer of a hook.

    Raises:
      InvalidArgumentError: the folder is not a path, or the writer is not a writer.
    """
    # Checked in the constructor, although the file is created in `begin`: a wrong
    # path must not end a training run at its first step.
    folder = None if output_dir is None else arguments.path("output_dir", output_dir)
    if writer is not None:
        arguments.instance("summary_writer", writer, SummaryWriter, "phalanx.summary.create_file_writer(log_dir)")
    return folder, writer


@final
class StepCounterHook(SessionRunHook):
    """Writes steps per second, as the summary `global_step/sec` and to the log. May be created in any context.

    Args:
      every_n_steps: number of steps between two values. None if `every_n_secs` is given.
      every_n_secs: seconds between two values, or None.
      output_dir: folder for the summaries. Ignored if there is a writer.
      summary_writer: writer of the summaries. None, without a folder, to write to the log only.

    Raises:
      InvalidArgumentError: both or none of the intervals are given.

    Source: tf.estimator.StepCounterHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.StepCounterHook(every_n_steps=10)
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
    ) -> None:
        self._timer = SecondOrStepTimer(every_n_secs, every_n_steps)
        self._output_dir, self._writer = checked_output(output_dir, summary_writer)

    @override
    def begin(self) -> None:
        """Opens the file."""
        if self._writer is None and self._output_dir is not None:
            self._writer = summary.create_file_writer(self._output_dir)

    @override
    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Clears the state of an earlier training run. The first step, which compiles, is not measured."""
        self._timer.reset()

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the speed if it is due."""
        step = run_context.session.step
        if not self._timer.should_trigger_for_step(step):
            return
        # A rate needs two moments, so the first step writes none. That also skips the time of compilation.
        elapsed_s, steps = self._timer.update_last_triggered_step(step)  # Two Nones at the first step.
        if elapsed_s and steps:
            rate = steps / elapsed_s
            _log.info("%s/sec: %g", GLOBAL_STEP, rate)
            if self._writer is not None:
                with self._writer.as_default(step):
                    summary.scalar(f"{GLOBAL_STEP}/sec", rate)


@final
class LoggingTensorHook(SessionRunHook):
    """Logs the values of arrays and variables. May be created in a model function, or in any context.

    Args:
      tensors: dict from names to fetches, or list of fetches: variables, names, and arrays of the model function.
      every_n_iter: number of steps between two lines, from the first. None if another argument is given.
      every_n_secs: seconds between two lines, or None.
      at_end: whether to log at the end. If no interval is given, only there.
      formatter: function of the dict of values. Returns the line. None for `name = value, ...`.

    Raises:
      InvalidArgumentError: the intervals contradict each other, or none is given.

    Source: tf.estimator.LoggingTensorHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.LoggingTensorHook({"loss": "loss"}, every_n_iter=100)
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Sequence[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        arguments.flag("at_end", at_end)
        if formatter is not None:
            arguments.function("formatter", formatter, "formatter=lambda values: str(values)")
        # SecondOrStepTimer refuses to have no interval at all, which LoggingTensorHook allows with at_end.
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        self._timer = None if only_at_end else SecondOrStepTimer(every_n_secs, every_n_iter)
        if not isinstance(tensors, (Mapping, list, tuple)):
            raise InvalidArgumentError(f"tensors={shown(tensors)}", "must be a dict or a list.", '{"loss": loss}')
        # Names in a fixed order, so that the log lines of two runs can be compared.
        named = (
            sorted(tensors.items(), key=lambda item: str(item[0]))
            if isinstance(tensors, Mapping)
            else [(_name_of(i, x), x) for i, x in enumerate(tensors)]
        )
        self._tensors = dict(named)
        self._at_end, self._formatter = at_end, formatter
        # The hook counts its own iterations, like tf.estimator's: `every_n_iter` is relative to the start of this call.
        self._iteration, self._is_due = 0, False

    @override
    def begin(self) -> None:
        """Begins to count."""
        self._iteration = 0
        if self._timer is not None:
            self._timer.reset()

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Requests the values if they are due."""
        self._is_due = self._timer is not None and self._timer.should_trigger_for_step(self._iteration)
        return SessionRunArgs(self._tensors) if self._is_due else None

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the values."""
        if self._is_due:
            self._write(run_values.results)
        self._iteration += 1

    @override
    def end(self, session: HookSession) -> None:
        """Logs the last values."""
        if self._at_end:
            self._write(session.run(self._tensors))

    def _write(self, values: dict[str, Any]) -> None:
        elapsed_s = None if self._timer is None else self._timer.update_last_triggered_step(self._iteration)[0]
        values = {name: np.asarray(values[name]) for name in self._tensors}
        if self._formatter is not None:
            _log.info("%s", self._formatter(values))
            return
        text = ", ".join(f"{name} = {value}" for name, value in values.items())
        _log.info("%s%s", text, "" if elapsed_s is None else f" ({elapsed_s:.3f} sec)")


def _name_of(place: int, tensor: object) -> str:
    # Arrays of a traced function have no names, unlike tensors of a graph. Their place in the list must do.
    return tensor if isinstance(tensor, str) else getattr(tensor, "path", None) or f"array {place}"


@final
class NanTensorHook(SessionRunHook):
    """Ends the training if a loss is NaN. May be created in a model function, or in any context.

    It checks the loss of a step while later steps run, so that the devices do not wait.

    Args:
      loss_tensor: the loss: an array of the model function, or `"loss"`.
      fail_on_nan_loss: whether to raise an error instead of only stopping.

    Raises:
      InvalidArgumentError: `fail_on_nan_loss` is not a bool.

    Source: tf.estimator.NanTensorHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.NanTensorHook("loss", fail_on_nan_loss=False)
    """

    def __init__(self, loss_tensor: PyTree, fail_on_nan_loss: bool = True) -> None:
        arguments.flag("fail_on_nan_loss", fail_on_nan_loss)
        self._loss, self._fails = loss_tensor, fail_on_nan_loss
        # Losses of steps that may still be running. Reading the newest one at once
        # would make each step wait for the one before.
        self._waiting: deque[Callable[[], Any]] = deque()

    @override
    def begin(self) -> None:
        """Forgets the losses of an earlier training run."""
        self._waiting.clear()

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Checks the loss of an earlier step, which has ended."""
        session = run_context.session
        self._waiting.append(session.later(self._loss))
        if len(self._waiting) > session.ahead and self._is_nan(self._waiting.popleft()()):
            run_context.request_stop()

    @override
    def end(self, session: HookSession) -> None:
        """Checks the losses of the last steps."""
        while self._waiting:
            self._is_nan(self._waiting.popleft()())

    def _is_nan(self, loss: ArrayLike | None) -> bool:
        # None: a scheduled step of a parameter server found no data.
        if loss is None or not np.isnan(np.asarray(loss)).any():
            return False
        if self._fails:
            raise NanLossDuringTrainingError(
                "the loss of a training step",
                "is NaN.",
                "a smaller learning rate, or clipnorm=1.0 in the optimizer; NanTensorHook(loss, fail_on_nan_loss=False) only stops",
            )
        _log.warning("The loss is NaN: the training stops.")
        return True
