# SPDX-License-Identifier: Apache-2.0
"""Hooks, and the information that they get about a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from phalanx.errors import InvalidArgumentError, shown
from phalanx.typing import PyTree


@final
@dataclass(frozen=True)
class SessionRunArgs:
    """The values that a hook requests from the next step. `SessionRunHook.before_run` returns it.

    Args:
      fetches: nest of variables, names, and arrays that the model function has computed.
      feed_dict: must be None, because a step has no placeholders.
      options: has no effect.

    Raises:
      InvalidArgumentError: `feed_dict` is not None.

    Source: tf.estimator.SessionRunArgs.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.SessionRunArgs("loss").fetches
      'loss'
    """

    fetches: PyTree
    # Both fields exist in tf.estimator.SessionRunArgs. `options` only traces a session: to ignore it changes no result.
    feed_dict: None = None
    options: object = None

    def __post_init__(self) -> None:
        if self.feed_dict is not None:
            raise InvalidArgumentError(
                f"feed_dict={shown(self.feed_dict)}", "a step has no placeholders.", "put the values into the dataset"
            )


# A protocol and not a base class: the loop that implements it stands above the hooks that use it.
class HookSession(Protocol):
    """What hooks can ask of the loop that calls them. In tf.estimator it is a session of TensorFlow.

    Attributes:
      graph: the graph of the mode.
      step: number of training steps so far.
      ahead: number of steps that may run while the loop continues.
    """

    @property
    def graph(self) -> Any:
        """The graph of the mode."""

    @property
    def step(self) -> int:
        """The number of training steps so far."""

    @property
    def ahead(self) -> int:
        """The number of steps that may run while the loop continues."""

    def run(self, fetches: PyTree, feed_dict: None = None) -> PyTree:
        """Returns the values of fetches."""

    def later(self, fetch: PyTree) -> Callable[[], PyTree]:
        """Returns a function that returns the value of a fetch after the last step, without waiting for it now."""

    def settle(self) -> None:
        """Waits until all scheduled steps have ended."""

    def profile_next(self, folder: str) -> None:
        """Profiles the next step into a folder, if there is a next step."""


@final
@dataclass(frozen=True)
class SessionRunValues:
    """The values that a step computed for a hook. `SessionRunHook.after_run` receives it.

    Args:
      results: nest like `SessionRunArgs.fetches`, of arrays. Values of variables are those after the step.
      options: None.
      run_metadata: None.

    Source: tf.estimator.SessionRunValues.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.SessionRunValues(results=0.5).results
      0.5
    """

    results: PyTree
    options: object = None
    run_metadata: object = None


@final
@dataclass
class SessionRunContext:
    """The step that is about to run or has run. Hooks receive it.

    Args:
      original_args: the values that the loop itself fetches: the loss and the step.
      session: evaluates variables, names and arrays: `session.run(fetches)`.

    Source: tf.estimator.SessionRunContext.

    Example:
      >>> import phalanx.estimator as estimator
      >>> context = estimator.SessionRunContext(estimator.SessionRunArgs("loss"), session=None)
      >>> context.request_stop()
      >>> context.stop_requested
      True
    """

    original_args: SessionRunArgs
    session: HookSession
    # Not an argument: a hook asks for the end by `request_stop`, and no hook can take that back.
    _stops: bool = field(default=False, init=False, repr=False)

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has called `request_stop`."""
        return self._stops

    def request_stop(self) -> None:
        """Ends the loop after this step."""
        self._stops = True


class SessionRunHook:
    """Code that runs between steps, in training, evaluation and prediction. A base class; may be created in any context.

    Source: tf.estimator.SessionRunHook.

    Example:
      >>> import phalanx.estimator as estimator
      >>> class Counter(estimator.SessionRunHook):
      ...     def begin(self):
      ...         self.steps = 0
      ...     def after_run(self, run_context, run_values):
      ...         self.steps += 1
    """

    def begin(self) -> None:
        """Called once, after the model function was traced and before variables are restored."""

    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Called once, after variables were restored.

        Args:
          session: evaluates variables, names and arrays: `session.run(fetches)`.
          coord: None.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each step.

        Args:
          run_context: the step.

        Returns:
          The values to fetch in this step, or None.
        """
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each step.

        Args:
          run_context: the step.
          run_values: the values that `before_run` requested.
        """

    def end(self, session: HookSession) -> None:
        """Called once, after the last step. Not called if a step, or a hook, has raised an error.

        Args:
          session: evaluates variables, names and arrays: `session.run(fetches)`.
        """


def checked_hooks(name: str, hooks: object) -> tuple[SessionRunHook, ...]:
    """Returns hooks as a tuple.

    Raises:
      InvalidArgumentError: one of them is not a `SessionRunHook`.
    """
    items = listed(hooks)
    # Checked when the argument is passed: the missing `end` of a wrong object would fail after hours of training.
    for hook in items:
        if not isinstance(hook, SessionRunHook):
            raise InvalidArgumentError(
                f"{name}={shown(hooks)}",
                f"{shown(hook)} is not a SessionRunHook.",
                f"{name}=[estimator.StopAtStepHook(last_step=100)]",
            )
    return items


def listed(items: object) -> tuple[Any, ...]:
    """Returns the items of an iterable, one item alone, or none for None, as a tuple."""
    if items is None:
        return ()
    # An array is one wrong item, and so is a text.
    if isinstance(items, (str, bytes)) or hasattr(items, "dtype") or not isinstance(items, Iterable):
        return (items,)
    return tuple(items)
