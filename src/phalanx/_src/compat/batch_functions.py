# SPDX-License-Identifier: Apache-2.0
"""Tells which losses and metrics need the rows of all replicas."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx._src.typed_jax import shape_dtype
from phalanx.typing import PyTree

_ROWS = 8
_HALVES = (slice(_ROWS // 2), slice(_ROWS // 2, None))


def needs_all_rows(fn: Callable[..., Any], *args: PyTree, source: object) -> bool:
    """Returns whether what a function gives for a batch does not follow from what it gives for the parts of replicas.

    It does if the function returns one value per row from this row alone, or the mean over rows. Then the sum over rows, a ratio of
    sums such as a correlation, and a value per row that depends on the other rows need the whole batch.

    Args:
      fn: the function.
      *args: pytrees of arrays (rows, ...).
      source: the function or class that it comes from. Of Keras's own functions, it is known which depend on other rows.
    """
    shape = shape_of(fn, *args)
    is_number = not shape
    if not is_number and str(getattr(source, "__module__", "")).startswith("keras."):
        return source in _OF_OTHER_ROWS or _has_pairs(fn, args, shape)
    values = _sampled(fn, *args)
    # A number may be anything, and the rows of all replicas are right for all of them. Values per row are most often of their row.
    if values is None:
        return is_number
    first, second, whole = values
    expected = (first + second) / 2 if is_number else np.concatenate([first, second])
    return whole.shape != expected.shape or not np.allclose(whole, expected, rtol=2e-6, atol=1e-7)


def shape_of(fn: Callable[..., Any], *args: PyTree) -> tuple[int, ...]:
    """Returns the shape of what a function returns. What it assigns is forgotten, such as the state of a random generator."""
    with keras.StatelessScope():
        return jnp.shape(jax.eval_shape(fn, *args))


def _has_pairs(fn: Callable[..., Any], args: PyTree, shape: tuple[int, ...]) -> bool:
    """Whether there is a value per pair of rows, as where a function takes labels (rows, 1) for labels (rows,)."""
    if shape[0] not in shape[1:]:
        return False
    more = jax.tree.map(lambda x: shape_dtype((shape[0] + 1, *jnp.shape(x)[1:]), jnp.result_type(x)), args)
    return shape_of(fn, *more)[1:] != shape[1:]


_OF_OTHER_ROWS = (keras.losses.circle,)


def _sampled(fn: Callable[..., Any], *args: PyTree) -> list[np.ndarray] | None:
    """Returns the values for the halves of a few random rows, and for all of them. None if there are none for such rows."""
    random = np.random.default_rng(0)
    try:
        with keras.StatelessScope(), jax.ensure_compile_time_eval():
            places = itertools.count()
            rows = keras.tree.map_structure(lambda x: _sample(random, x, is_label=next(places) == 0), args)
            halves = [keras.tree.map_structure(lambda x, half=half: x[half], rows) for half in _HALVES]
            return [np.asarray(fn(*each), "float64") for each in (*halves, rows)]
    except Exception:  # It wants other shapes or values, or reads a variable.
        return None


def _sample(random: np.random.Generator, like: PyTree, *, is_label: bool) -> PyTree:
    """Returns rows that most functions take: classes 0 and 1, or probabilities."""
    shape, dtype = (_ROWS, *like.shape[1:]), keras.backend.standardize_dtype(like.dtype)
    if "float" not in dtype:
        return keras.ops.convert_to_tensor(random.integers(0, 2, shape), dtype)
    values = random.uniform(0.05, 0.45, shape)
    # Halves that are alike would make a ratio look like a mean. So outputs are farther from labels in the second.
    values[_HALVES[1]] += 0.0 if is_label else 0.5
    return keras.ops.convert_to_tensor(values, dtype)
