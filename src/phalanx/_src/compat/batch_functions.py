# SPDX-License-Identifier: Apache-2.0
"""Tells which losses and metrics need the rows of all replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src import backend

from phalanx._src.compat.row_flow import CONSTANT, MEAN, ROWS, SOME, kind_of, sized
from phalanx._src.compat.scope import surrounding_scope
from phalanx.errors import warn_of_slip
from phalanx.typing import PyTree


def needs_all_rows(fn: Callable[..., Any], *args: PyTree, source: object, weight: PyTree = None) -> bool:
    """Returns whether what a function gives for a batch does not follow from what it gives for the parts of replicas.

    It does if the function returns one value per row from this row alone, or the mean over rows. Then the sum over rows, a ratio of
    sums such as a correlation, and a value per row that depends on the other rows need the whole batch.

    Args:
      fn: the function.
      *args: pytrees of arrays (rows, ...).
      source: the function or class that it comes from. Of Keras's own functions, it is known which depend on other rows.
      weight: weights per row. Keras multiplies each of them by the number that a function returns for the batch.
    """
    try:
        shape = shape_of(fn, *args)
    except Exception:  # It takes more rows than this replica has, as the largest ten. If it takes no rows at all, the next call says so.
        return True
    is_number = not shape
    if is_number and weight is not None and jnp.ndim(weight):
        return True
    if not is_number and str(getattr(source, "__module__", "")).startswith("keras."):
        return source in _OF_OTHER_ROWS or _is_of_others(fn, args, shape)
    expected, scope = MEAN if is_number else ROWS, surrounding_scope()
    sizes = SOME if scope is None else scope.share.sizes(args)
    if kind_of(fn, *args, sizes=sizes) in (expected, CONSTANT):
        return False
    if not _takes(fn, args, max(sizes)):
        warn_of_slip(
            f"{getattr(source, '__name__', 'A loss or metric')} takes no other number of rows than those of a replica, as if it used rows that the "
            "model has kept, such as self.code. Each replica computes it from its own rows, which is right for a mean only.",
            "an output of the model instead of an attribute, or mean(...) over the rows",
        )
        return False
    return True


def with_all_rows(fn: Callable[..., jax.Array], *args: PyTree, source: object) -> jax.Array:
    """Calls a function of rows, in a step with the rows of all replicas if it needs them. `needs_all_rows` explains the arguments."""
    scope = surrounding_scope()
    if scope is None or not scope.share.has_others:
        return fn(*args)
    with scope.share.whole_batch(()):
        is_of_all = needs_all_rows(fn, *args, source=source)
    if not is_of_all:
        return fn(*args)
    with scope.share.whole_batch(args) as whole:
        return fn(*whole)


def mask_of(x: PyTree) -> jax.Array | None:
    """Returns the mask of steps that Keras's layers have given an array, or None."""
    mask: jax.Array | None = backend.get_keras_mask(x)
    return mask


def masked(x: PyTree, mask: jax.Array | None) -> PyTree:
    """Returns an array, with a mask if it is not None."""
    if mask is not None:
        backend.set_keras_mask(x, mask)
    return x


def shape_of(fn: Callable[..., Any], *args: PyTree) -> tuple[int, ...]:
    """Returns the shape of what a function returns. What it assigns is forgotten, such as the state of a random generator."""
    with keras.StatelessScope():
        return jnp.shape(jax.eval_shape(fn, *args))


def _is_of_others(fn: Callable[..., Any], args: PyTree, shape: tuple[int, ...]) -> bool:
    """Whether values are not per row: per column with `axis=0`, or per pair where a function takes labels (rows, 1) for (rows,)."""
    return shape_of(fn, *sized(args, shape[0] + 1)) != (shape[0] + 1, *shape[1:])


def _takes(fn: Callable[..., Any], args: PyTree, rows: int) -> bool:
    """Whether a function takes another number of rows. It does not if it joins them with rows of its own, as `call` keeps in attributes."""
    try:
        shape_of(fn, *sized(args, rows))
    except Exception:
        return False
    return True


_OF_OTHER_ROWS = (keras.losses.circle,)
