# SPDX-License-Identifier: Apache-2.0
"""The dtypes of sums and means: those of `jnp.sum` and `jnp.mean`, whatever reduces, and over however many replicas.

    terms                            SUM accumulates in   is       MEAN accumulates in   is
    bool                             (refused)                     (refused)
    int8, int16, int32               int32                int32    float32               float32
    uint8, uint16, uint32            uint32               uint32   float32               float32
    int64, uint64                    their dtype          the same float64               float64
    float16, bfloat16                their dtype          the same float32               their dtype
    float32, float64, complex        their dtype          the same their dtype           their dtype

With 64-bit types enabled in JAX, sums of integers are int64 and uint64. A variable keeps its dtype. The mean that it becomes has no
fraction if it holds integers, and is exact where a float32 would lose digits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from phalanx._src.options import ReduceOp

Divisor = int | jax.Array


def term(op: ReduceOp, value: jax.Array) -> jax.Array:
    """Returns an array of numbers in the dtype in which its sum or mean accumulates."""
    return value.astype(_accumulates_in(op, value.dtype))


def dtype_of(op: ReduceOp, dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of the sum or mean of terms of this dtype."""
    return _accumulates_in(op, dtype) if is_integer(dtype) else dtype


def divided(total: jax.Array, count: Divisor) -> jax.Array:
    """Returns a mean of floats from their sum."""
    # With JAX's strict promotion of dtypes, which a program may turn on, no float is divided by an integer array.
    return total / (count.astype(total.dtype) if isinstance(count, jax.Array) else count)


def is_integer(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is one of integers."""
    return jnp.issubdtype(dtype, jnp.integer)


def parts_of_mean(value: jax.Array, weight: jax.Array | None, count: Divisor) -> list[jax.Array]:
    """Returns arrays from whose sums over the replicas `mean_of_parts` makes the mean of a variable.

    An integer has two parts, its quotient and its remainder, whose sums neither wrap nor lose digits.

    Args:
      value: the value of one replica.
      weight: scalar. How much this replica counts: a bool, or, if the value is a float, its number of rows. None if all replicas
        count alike.
      count: the sum of the weights of all replicas.
    """
    if is_integer(value.dtype):
        # Quotients add up to no more than the largest value, and remainders to less than the square of the number of replicas.
        integer = term(ReduceOp.SUM, value)
        divisor = jnp.asarray(count, integer.dtype)
        parts = [integer // divisor, integer % divisor]
    else:
        parts = [term(ReduceOp.MEAN, value)]
    return parts if weight is None else [_weighted(part, weight) for part in parts]


def mean_of_parts(totals: Sequence[jax.Array], count: Divisor, dtype: DTypeLike) -> jax.Array:
    """Returns the mean of a variable from the sums of its parts, in the dtype of the variable.

    As in an assignment of a float to a variable of integers, the fraction is cut off: -2.5 becomes -2.
    """
    if len(totals) == 1:
        return divided(totals[0], count).astype(dtype)
    quotients, remainders = totals
    divisor = jnp.asarray(count, quotients.dtype)
    floor = quotients + remainders // divisor
    # `//` rounds towards minus infinity, so a negative mean with a fraction is one too small.
    return jnp.where((floor < 0) & (remainders % divisor > 0), floor + 1, floor).astype(dtype)


def _accumulates_in(op: ReduceOp, of: DTypeLike) -> np.dtype:
    dtype: np.dtype = jnp.dtype(of)
    if op is ReduceOp.MEAN and is_integer(dtype):
        return np.dtype("float64" if dtype.itemsize == 8 else "float32")
    if op is ReduceOp.MEAN:
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return np.dtype("float32") if is_narrow else dtype
    if not is_integer(dtype):
        return dtype
    # The default integer is int64 if 64-bit types are enabled.
    default: np.dtype = jnp.dtype(jnp.result_type(jnp.uint if jnp.issubdtype(dtype, jnp.unsignedinteger) else int))
    return max(dtype, default, key=lambda candidate: candidate.itemsize)


def _weighted(value: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns 0 for a weight of 0, even if the value is not finite."""
    return jnp.where(weight > 0, value if weight.dtype == jnp.bool_ else value * weight.astype(value.dtype), 0)
