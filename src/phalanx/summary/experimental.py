# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.summary.experimental`: the default step."""

import jax

from phalanx._src.tracing.records import defaults
from phalanx.errors import InvalidArgumentError
from phalanx.errors.names import suggest_names
from phalanx.summary.steps import Step, checked_step

__all__ = ["get_step", "set_step"]


def get_step() -> Step:
    """Returns the default step of this thread, or None. May be called in any context.

    Source: tf.summary.experimental.get_step.

    Example:
      >>> import phalanx
      >>> phalanx.summary.experimental.set_step(3)
      >>> phalanx.summary.experimental.get_step()
      3
      >>> phalanx.summary.experimental.set_step(None)
    """
    return defaults.step


def set_step(step: Step) -> None:
    """Sets the default step of this thread. Call it outside compiled functions.

    A program uses the default step at the time of each run. A variable is read inside the program, where the summary stands.

    Args:
      step: an integer, a scalar integer array, an integer variable such as `optimizer.iterations`, or None for no step.

    Raises:
      InvalidArgumentError: `step` is none of these, or a value of a function that is being traced.

    Source: tf.summary.experimental.set_step.

    Example:
      >>> import phalanx
      >>> phalanx.summary.experimental.set_step(3)
      >>> phalanx.summary.experimental.set_step(None)
    """
    if isinstance(step, jax.core.Tracer):
        raise InvalidArgumentError(
            "summary.experimental.set_step was called with a value of a traced function",
            "the value does not exist after the function has been traced.",
            "with writer.as_default(step): in the function, or set_step(step) before it is called",
        )
    defaults.step = checked_step(step)


suggest_names(__name__)
