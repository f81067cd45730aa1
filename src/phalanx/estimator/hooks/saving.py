# SPDX-License-Identifier: Apache-2.0
"""Hooks that save checkpoints and summaries."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

from typing_extensions import override

from phalanx import summary
from phalanx.errors import InvalidArgumentError, PhalanxError, arguments, shown
from phalanx.estimator.hooks.basic import checked_output
from phalanx.estimator.hooks.timer import SecondOrStepTimer
from phalanx.estimator.loop.saver import Saver
from phalanx.estimator.loop.session import (
    HookSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    listed,
)
from phalanx.summary import SummaryWriter


class CheckpointSaverListener:
    """Code that runs before and after each checkpoint. A base class; may be created in any context.

    Source: tf.estimator.CheckpointSaverListener.

    Example:
      >>> import phalanx.estimator as estimator
      >>> class Told(estimator.CheckpointSaverListener):
      ...     def after_save(self, session, global_step_value):
      ...         print(f"saved step {global_step_value}")
    """

    def begin(self) -> None:
        """Called once, before the first step."""

    def before_save(self, session: HookSession, global_step_value: int) -> None:
        """Called before each checkpoint.

        Args:
          session: evaluates variables, names and arrays: `session.run(fetches)`.
          global_step_value: number of steps so far.
        """

    def after_save(self, session: HookSession, global_step_value: int) -> bool | None:
        """Called after each checkpoint.

        Args:
          session: evaluates variables, names and arrays: `session.run(fetches)`.
          global_step_value: number of steps so far.

        Returns:
          True to end the training run.
        """
        return None

    def end(self, session: HookSession, global_step_value: int) -> None:
        """Called once, after the last step.

        Args:
          session: evaluates variables, names and arrays: `session.run(fetches)`.
          global_step_value: number of steps so far.
        """


def checked_listeners(listeners: object) -> tuple[CheckpointSaverListener, ...]:
    """Returns listeners as a tuple.

    Raises:
      InvalidArgumentError: one of them is not a `CheckpointSaverListener`.
    """
    items = listed(listeners)
    for listener in items:
        arguments.instance(
            "a saving listener", listener, CheckpointSaverListener, "class Told(estimator.CheckpointSaverListener)"
        )
    return items


@final
class CheckpointSaverHook(SessionRunHook):
    """Saves checkpoints during a training run, at its beginning and at its end. May be created in any context.

    Args:
      checkpoint_dir: the folder.
      save_secs: seconds between two checkpoints. None if `save_steps` is given.
      save_steps: number of steps between two checkpoints, or None.
      saver: object that saves. None to save all variables of the model function, by name.
      checkpoint_basename: the beginning of the file names.
      scaffold: must be None. Pass it to `EstimatorSpec` instead.
      listeners: code that runs before and after each checkpoint.

    Raises:
      InvalidArgumentError: both or none of the intervals are given, or another argument has the wrong type.

    Source: tf.estimator.CheckpointSaverHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.CheckpointSaverHook("checkpoints", save_steps=100)
    """

    def __init__(
        self,
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Saver | None = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: None = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> None:
        if scaffold is not None:
            raise InvalidArgumentError(
                f"scaffold={shown(scaffold)}",
                "the hook saves the variables of the graph.",
                "EstimatorSpec(mode, scaffold=scaffold)",
            )
        # A tf.compat.v1.train.Saver cannot save these variables. The argument exists for the Estimator itself.
        if saver is not None:
            arguments.instance("saver", saver, Saver, "omit saver")
        self._dir = arguments.path("checkpoint_dir", checkpoint_dir)
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._saver, self._basename = saver, arguments.path("checkpoint_basename", checkpoint_basename)
        self._listeners = checked_listeners(listeners)

    @override
    def begin(self) -> None:
        """Calls `begin` of the listeners."""
        self._timer.reset()
        for listener in self._listeners:
            listener.begin()

    @override
    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Saves before the first step."""
        if self._saver is None:
            self._saver = Saver(session.graph, self._dir, name=self._basename)
        self._save(session)

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Saves if a checkpoint is due."""
        if self._timer.should_trigger_for_step(run_context.session.step) and self._save(run_context.session):
            run_context.request_stop()

    @override
    def end(self, session: HookSession) -> None:
        """Saves after the last step, unless that step is saved already."""
        # The last step is saved whatever the interval is, as in tf.estimator, but not twice.
        if session.step != self._timer.last_triggered_step():
            self._save(session)
        assert self._saver is not None
        # The other processes may read the file right after the training, for example to evaluate it.
        self._saver.meet()
        for listener in self._listeners:
            listener.end(session, session.step)

    def sync(self) -> None:
        """Waits until the file of the last checkpoint is on the disk."""
        if self._saver is not None:
            self._saver.sync()

    def _save(self, session: HookSession) -> bool:
        """Saves a checkpoint. Returns whether a listener requests the end of the training run."""
        # Scheduled steps change variables at any time. A checkpoint must hold the variables of one step.
        session.settle()
        step = session.step
        self._timer.update_last_triggered_step(step)
        for listener in self._listeners:
            listener.before_save(session, step)
        assert self._saver is not None
        self._saver.save(step)
        # A list, not `any(generator)`: each listener must be called, even if the first one already asks for the end.
        stop_requests = [listener.after_save(session, step) for listener in self._listeners]
        return any(stop_requests)


@contextmanager
def writing_to_the_end(hooks: Iterable[SessionRunHook]) -> Iterator[None]:
    """If the `with` block raises an error, waits for the checkpoints that hooks are writing, so that none is written later."""
    try:
        yield
    # KeyboardInterrupt, too: a file that is written after the error would look like progress of the next run.
    except BaseException:
        for hook in hooks:
            if isinstance(hook, CheckpointSaverHook):
                with suppress(PhalanxError):  # The error of the training is the first one.
                    hook.sync()
        raise


@final
class SummarySaverHook(SessionRunHook):
    """Writes the loss and other scalars of a training run as summaries. May be created in a model function, or in any context.

    Summaries that the model function records with `phalanx.summary` are written by the Estimator and need no hook.

    Args:
      save_steps: number of steps between two summaries. None if `save_secs` is given.
      save_secs: seconds between two summaries, or None.
      output_dir: folder. Ignored if there is a writer.
      summary_writer: writer of the summaries.
      scaffold: must be None.
      summary_op: dict from tags to fetches of scalars.

    Raises:
      InvalidArgumentError: an argument is missing, or has the wrong type.

    Source: tf.estimator.SummarySaverHook. Here `summary_op` is a dict, because summaries are not graph operations.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.SummarySaverHook(save_steps=10, output_dir="logs", summary_op={"loss": "loss"})
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
        scaffold: None = None,
        summary_op: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(summary_op, dict) or not summary_op or not all(isinstance(tag, str) for tag in summary_op):
            raise InvalidArgumentError(
                f"summary_op={shown(summary_op)}", "must be a dict from tags to scalars.", 'summary_op={"loss": loss}'
            )
        # tf.estimator has a third source, Scaffold.summary_op, which needs a graph. So one of these two is required.
        if output_dir is None and summary_writer is None:
            raise InvalidArgumentError(
                "SummarySaverHook without a writer",
                "it needs a writer or a folder.",
                'SummarySaverHook(output_dir="logs", ...)',
            )
        if scaffold is not None:
            raise InvalidArgumentError(f"scaffold={shown(scaffold)}", "has no summaries.", "omit scaffold")
        self._output_dir, self._writer = checked_output(output_dir, summary_writer)
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._fetches = summary_op
        self._is_due = False

    @override
    def begin(self) -> None:
        """Opens the file."""
        self._timer.reset()
        if self._writer is None and self._output_dir is not None:
            self._writer = summary.create_file_writer(self._output_dir)

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Requests the values if they are due."""
        # Decided before the step, because the values must be fetched from it.
        self._is_due = self._timer.should_trigger_for_step(run_context.session.step + 1)
        return SessionRunArgs(self._fetches) if self._is_due else None

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the values."""
        if not self._is_due:
            return
        step = run_context.session.step
        self._timer.update_last_triggered_step(step)
        assert self._writer is not None
        with self._writer.as_default(step):
            for tag, value in run_values.results.items():
                summary.scalar(tag, value)

    @override
    def end(self, session: HookSession) -> None:
        """Writes all queued summaries."""
        if self._writer is not None:
            self._writer.flush()
