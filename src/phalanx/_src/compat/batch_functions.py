# SPDX-License-Identifier: Apache-2.0
"""Tells which functions of a batch need the rows of all replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx.typing import PyTree

_ROWS = 8
_HALVES = (slice(_ROWS // 2), slice(_ROWS // 2, None))


def needs_all_rows(fn: Callable[..., Any], *args: PyTree) -> bool:
    """Returns whether a function gives one number per batch that is not the mean of the numbers for the parts of replicas.

    A mean over rows is such a mean. A sum is not, and neither is a ratio of sums, such as a correlation.

    Args:
      fn: the function.
      *args: pytrees of arrays (rows, ...).
    """
    return jnp.ndim(jax.eval_shape(fn, *args)) == 0 and not _is_mean(fn, *args)


def _is_mean(fn: Callable[..., Any], *args: PyTree) -> bool:
    """Returns whether the value for a few random rows is the mean of the values for their halves."""
    random = np.random.default_rng(0)
    try:
        with jax.ensure_compile_time_eval():
            rows = keras.tree.map_structure(lambda x: _sample(random, x), args)
            halves = [keras.tree.map_structure(lambda x, half=half: x[half], rows) for half in _HALVES]
            first, second, whole = (float(fn(*each)) for each in (*halves, rows))
    except Exception:  # It wants other shapes or values, or reads a variable.
        return False
    return bool(np.isclose(whole, (first + second) / 2, rtol=1e-5, atol=1e-7))


def _sample(random: np.random.Generator, like: Any) -> Any:
    """Returns rows that most functions take: classes 0 and 1, or probabilities, small ones in the first half and large ones in the other."""
    shape, dtype = (_ROWS, *like.shape[1:]), keras.backend.standardize_dtype(like.dtype)
    values = random.uniform(0.05, 0.45, shape) if "float" in dtype else random.integers(0, 2, shape)
    if "float" in dtype:
        values[_HALVES[1]] += 0.5
    return keras.ops.convert_to_tensor(values, dtype)
