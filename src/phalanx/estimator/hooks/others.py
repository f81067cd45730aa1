# SPDX-License-Identifier: Apache-2.0
"""Hooks that profile, wait, and compute something at the end."""

import logging
import time
from typing import final

from typing_extensions import override

from phalanx._src.runtime.bootstrap import is_this_chief
from phalanx.errors import arguments
from phalanx.estimator.hooks.timer import SecondOrStepTimer
from phalanx.estimator.loop.session import HookSession, SessionRunArgs, SessionRunContext, SessionRunHook
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")


@final
class ProfilerHook(SessionRunHook):
    """Profiles single steps, for the profile plugin of TensorBoard and for Perfetto. May be created in any context.

    Args:
      save_steps: number of steps between two profiles. None if `save_secs` is given.
      save_secs: seconds between two profiles, or None.
      output_dir: folder. The profiles are in `plugins/profile` inside.
      show_dataflow: has no effect, because a profile of JAX shows what a step computes.
      show_memory: has no effect, for the same reason.

    Raises:
      InvalidArgumentError: both or none of the intervals are given, or another argument has the wrong type.

    Source: tf.estimator.ProfilerHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.ProfilerHook(save_steps=1000, output_dir="logs")
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
    ) -> None:
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        # tf.estimator's default is "", which means the working folder.
        self._dir = arguments.path("output_dir", "." if isinstance(output_dir, str) and not output_dir else output_dir)
        arguments.flag("show_dataflow", show_dataflow)
        arguments.flag("show_memory", show_memory)

    @override
    def begin(self) -> None:
        """Clears the state of an earlier training run. The first step, which compiles, is not profiled."""
        self._timer.reset()
        self._timer.update_last_triggered_step(0)

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks the session to profile the step if it is due."""
        # The step that is about to run. JAX profiles an interval of time, so it must be known before the step starts.
        step = run_context.session.step + 1
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            # One process writes the profile, but all advance their timers, so that they agree about the next one.
            if is_this_chief():
                run_context.session.profile_next(self._dir)
        return None


@final
class GlobalStepWaiterHook(SessionRunHook):
    """Waits until another process has saved a number of steps, before training begins. May be created in any context.

    Workers of asynchronous training can start one after another with it. Workers of synchronous strategies take the same steps,
    so they have nothing to wait for.

    Args:
      wait_until_step: number of steps.

    Raises:
      InvalidArgumentError: `wait_until_step` is not an integer.

    Source: tf.estimator.GlobalStepWaiterHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.GlobalStepWaiterHook(wait_until_step=0)
    """

    def __init__(self, wait_until_step: int) -> None:
        self._wait_until = arguments.integer("wait_until_step", wait_until_step, least=0)

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Waits until the number of steps is reached."""
        told_s = 0.0
        while run_context.session.run(run_context.session.graph.global_step) < self._wait_until:
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                _log.info("Waiting for step %d.", self._wait_until)
            time.sleep(_POLL_S)
        return None


# Seconds between two looks and between two log lines. A look reads one scalar from a device.
_POLL_S, _TELL_S = 0.5, 60.0


@final
class FinalOpsHook(SessionRunHook):
    """Fetches values after the last step. May be created in a model function, or in any context.

    Args:
      final_ops: nest of variables, names, and arrays of the model function.
      final_ops_feed_dict: must be None.

    Raises:
      InvalidArgumentError: `final_ops_feed_dict` is not None.

    Attributes:
      final_ops_values: nest like `final_ops` of arrays. None before the end.

    Source: tf.estimator.FinalOpsHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> hook = estimator.FinalOpsHook("loss")
    """

    def __init__(self, final_ops: PyTree, final_ops_feed_dict: None = None) -> None:
        # Arrays of the model function are found in the attributes.
        self._final_ops = SessionRunArgs(final_ops, final_ops_feed_dict).fetches
        self.final_ops_values: PyTree = None

    @override
    def end(self, session: HookSession) -> None:
        """Fetches the values."""
        self.final_ops_values = session.run(self._final_ops)
