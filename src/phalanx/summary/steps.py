# SPDX-License-Identifier: Apache-2.0
"""Checks steps of summaries."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx.errors import InvalidArgumentError, arguments, shown

Step: TypeAlias = int | np.integer | jax.Array | keras.Variable | None
"""A training step: an integer, or a scalar integer array or variable. None for the default step."""


def checked_step(step: Step) -> Step:
    """Returns a step: None, an int, or a scalar integer array or variable.

    Raises:
      InvalidArgumentError: `step` is something else.
    """
    # A variable stays one: its value is read when the summary is recorded, inside the program.
    if step is None or isinstance(step, keras.Variable):
        is_step = step is None or (not step.shape and jnp.issubdtype(jnp.dtype(step.dtype), jnp.integer))
    elif arguments.is_integer(step, -(2**63), 2**63 - 1):
        return int(step)
    else:
        is_step = hasattr(step, "dtype") and not np.shape(step) and jnp.issubdtype(step.dtype, jnp.integer)
    if not is_step:
        raise InvalidArgumentError(
            f"step={shown(step)}", "must be an integer of 64 bits.", "step=int(optimizer.iterations)"
        )
    return step
