# SPDX-License-Identifier: Apache-2.0
"""Collectives over the replica axis, inside a program, for any pytree.

They run under `jax.shard_map(..., check_vma=False)`, where `psum` transposes to `psum`: the gradient of an all-reduce is
the all-reduce of the gradient, as in tf.distribute.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call
from jax.extend import core as jex
from jax.typing import ArrayLike

from phalanx._src.collectives.codes import Rounded, coded_sum
from phalanx._src.collectives.dtypes import Divisor, divided, dtype_of, term
from phalanx._src.mesh.arrays import as_number, flattened
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import differs
from phalanx._src.options import ReduceOp
from phalanx._src.typed_jax import psum
from phalanx.errors import PhalanxError, ReduceOpError, arguments, shown
from phalanx.typing import PyTree

T = TypeVar("T")

# The beginnings of names, because JAX has variants such as psum_invariant.
_COLLECTIVES = (
    "psum",
    "pmax",
    "pmin",
    "ppermute",
    "pbroadcast",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "pgather",
)


_A_DIM = "jnp.reshape(x, 1), and axis=0"
"""What makes a scalar an array that can be gathered."""


def as_array(value: ArrayLike) -> jax.Array:
    """Returns `value` as an array of numbers, bools included.

    Raises:
      InputError, ReduceOpError, ContextError: as `as_any_array`, and for random keys.
    """
    array = as_any_array(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ReduceOpError(f"value={shown(value)}", "random keys are not numbers.", "one key per replica")
    return array


def as_any_array(value: ArrayLike) -> jax.Array:
    """Returns `value` as an array of numbers, bools or random keys.

    Raises:
      ReduceOpError: `value` is not a number or an array of numbers, or the array was deleted.
      InputError: JAX cannot hold the numbers of `value`.
      ContextError: `value` is a `PerReplica`.
    """
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted():
        raise ReduceOpError(
            f"an array {value.dtype}{list(value.shape)}",
            "it was deleted, or donated to a program.",
            "pass jnp.copy(x) to the earlier call",
        )
    try:
        number = as_number(value)
        return jnp.asarray(value if number is None else number)
    except PhalanxError:  # A `PerReplica` refuses to become an array.
        raise
    except Exception as e:
        raise ReduceOpError(
            f"value={shown(value)}", "is not an array of numbers.", "pass arrays, or a pytree of arrays"
        ) from e


def check_arrays(tree: PyTree) -> None:
    """Checks that all leaves are arrays of numbers, without copying large ones.

    Raises:
      ReduceOpError, ContextError: as `as_array`.
    """
    checked_arrays(tree)


def checked_arrays(tree: PyTree) -> PyTree:
    """Returns a pytree whose leaves are arrays and numbers. Leaves that act like arrays, such as variables, are converted.

    Raises:
      ReduceOpError, ContextError: as `as_array`.
    """

    def checked(leaf: ArrayLike) -> ArrayLike:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUMm":
            return as_number(leaf)  # type: ignore[no-any-return]  # `as_array` would copy it to a device.
        array = as_any_array(leaf)
        is_one = isinstance(leaf, (int, float, complex, np.ndarray, np.generic, jax.Array))
        # Copy it, because the next step may be given the array of the variable itself, and donate it.
        return leaf if is_one else jnp.copy(array)

    leaves, structure = flattened(tree, differs)
    return structure.unflatten(map(checked, leaves))


def to_array(value: ArrayLike) -> jax.Array:
    """Returns `value` as an array that can be summed.

    Raises:
      ReduceOpError, ContextError: as `as_array`, and for bools and random keys.
    """
    array = as_any_array(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        hint = "strategy.experimental_local_results(value), or jax.random.key_data(key)"
        raise ReduceOpError(f"a value of dtype {array.dtype}", "random keys have no sum or mean.", hint)
    if array.dtype == jnp.bool_:
        raise ReduceOpError("a value of dtype bool", "bools have no sum or mean.", 'value.astype("int32")')
    return array


def sums(arrays: list[jax.Array], wire_dtype: str | None = None) -> list[jax.Array]:
    """Returns the sums of arrays over the replicas. Floats wider than `wire_dtype` are sent in that dtype."""
    if wire_dtype is None:
        return list(psum(arrays, REPLICA_AXIS))
    return [_narrow_sum(wire_dtype, x) if _is_wider(x, wire_dtype) else psum(x, REPLICA_AXIS) for x in arrays]


def _is_wider(x: jax.Array, wire_dtype: str) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > jnp.dtype(wire_dtype).itemsize


def _narrow_sum(wire_dtype: str, x: jax.Array) -> jax.Array:
    """Returns the sum over the replicas, sent in `wire_dtype`."""

    def total(_: tuple[()], x: jax.Array) -> jax.Array:
        return coded_sum(Rounded(wire_dtype), x)[0]

    # Like psum, it is its own transpose. The transpose that JAX derives would add in the narrow dtype.
    result: jax.Array = linear_call(total, total, (), x)
    return result


def all_reduce(
    op: ReduceOp, tree: T, num_replicas: int, *, counts: jax.Array | None = None, wire_dtype: str | None = None
) -> T:
    """Returns a pytree with the sum or mean of every leaf over the replicas, on every replica.

    Args:
      op: SUM or MEAN. The dtypes are those of `accumulation`.
      tree: pytree of the arrays of this replica. Shapes must agree between replicas.
      num_replicas: size of the replica axis; 1 outside a mapped program.
      counts: bool scalar. Whether this replica counts. None if all replicas count. If none counts, the result is 0.
      wire_dtype: dtype in which wider floats are sent. None sends them in their own dtype.
    """
    leaves, structure = flattened(tree, differs)
    arrays = [to_array(x) for x in leaves]
    results = [term(op, x) for x in arrays]
    divisor: Divisor = num_replicas
    if counts is not None:
        results = [jnp.where(counts, x, 0) for x in results]
    if counts is not None and num_replicas > 1 and op is ReduceOp.MEAN:
        divisor = jnp.maximum(psum(jnp.asarray(counts, jnp.int32), REPLICA_AXIS), 1)  # 0 / 0 would be NaN.
    if num_replicas > 1:
        results = [_counted_gradient(counts, x) for x in sums(results, wire_dtype)]
    if op is ReduceOp.MEAN:
        results = [divided(x, divisor) for x in results]
    results = [result.astype(dtype_of(op, x.dtype)) for result, x in zip(results, arrays, strict=True)]
    reduced: T = jax.tree.unflatten(structure, results)
    return reduced


def _counted_gradient(counts: jax.Array | None, value: jax.Array) -> jax.Array:
    """Returns `value`, whose gradient on this replica is zero unless `counts`.

    The gradient of an exchange adds up what comes back from all replicas. A replica without rows computes with padding, including a loss
    of it.
    """
    return value if counts is None else jnp.where(counts, value, lax.stop_gradient(value))


def all_gather(
    tree: PyTree, dim: int, num_replicas: int, sizes_of: Callable[[int], Sequence[int] | None] | None = None
) -> PyTree:
    """Returns a pytree whose leaves are concatenated over the replicas along `dim`, in replica order.

    Args:
      tree: pytree of the arrays of this replica.
      dim: the dim.
      num_replicas: size of the replica axis.
      sizes_of: function of the size of the dim of the next leaf. Returns its size on each replica, or None if they are equal.

    Raises:
      ReduceOpError: a leaf does not have this dim.
    """

    def gather(value: jax.Array) -> jax.Array:
        array = as_any_array(value)
        dim_ = canonical_dim(dim, array.ndim, _A_DIM)
        if num_replicas == 1:
            return array
        sizes = None if sizes_of is None else sizes_of(array.shape[dim_])
        if sizes is not None:
            return _gathered(array, dim_, sizes)
        if not array.size:  # XLA has no collectives for empty arrays.
            return jnp.concatenate([array] * num_replicas, axis=dim_)
        gathered: jax.Array = lax.all_gather(array, REPLICA_AXIS, axis=dim_, tiled=True)
        return gathered

    return jax.tree.map(gather, tree, is_leaf=differs)


def _gathered(array: jax.Array, dim: int, sizes: Sequence[int]) -> jax.Array:
    """Returns the concatenation of arrays of different sizes. They are sent with room for the largest."""
    widths = [(0, max(0, max(sizes) - array.shape[dim]) if d == dim else 0) for d in range(array.ndim)]
    counts = jnp.asarray(sizes)[lax.axis_index(REPLICA_AXIS)] > 0 if 0 in sizes else None
    parts = _counted_gradient(counts, lax.all_gather(jnp.pad(array, widths), REPLICA_AXIS))
    return jnp.concatenate(
        [lax.slice_in_dim(part, 0, size, axis=dim) for part, size in zip(parts, sizes, strict=True)], axis=dim
    )


def broadcast(tree: T, num_replicas: int, source: int = 0) -> T:
    """Returns the leaves of replica `source`, on every replica."""
    if num_replicas == 1:
        return tree
    # JAX sums bools as int32.
    sums = psum(jax.tree.map(lambda x: only_on(source, x), tree), REPLICA_AXIS)
    result: T = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, tree)
    return result


def only_on(replica: int, value: jax.Array) -> jax.Array:
    """Returns `value` on one replica and zeros on the others."""
    return jnp.where(lax.axis_index(REPLICA_AXIS) == replica, value, jnp.zeros_like(value))


def packed(
    reduce: Callable[[list[jax.Array]], list[jax.Array]], values: list[jax.Array], packs: list[list[int]]
) -> list[jax.Array]:
    """Runs `reduce` on a few flat buffers instead of on many arrays.

    Args:
      reduce: elementwise function from a list of arrays to a list of arrays of the same shapes.
      values: the arrays.
      packs: indices of the values in each buffer. All values of a buffer have the same dtype.

    Returns:
      One array per value, in the order of `values`.
    """
    buffers = [joined([values[i] for i in pack]) if len(pack) > 1 else values[pack[0]] for pack in packs]
    results = list(values)
    for pack, buffer in zip(packs, reduce(buffers), strict=True):
        parts = split(buffer, [values[i] for i in pack]) if len(pack) > 1 else [buffer]
        for i, part in zip(pack, parts, strict=True):
            results[i] = part
    return results


def joined(arrays: list[jax.Array]) -> jax.Array:
    """Returns one flat array with the elements of all arrays."""
    return jnp.concatenate([x.ravel() for x in arrays])


def split(flat: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
    """Splits a flat array into arrays with the shapes of `arrays`. The inverse of `joined`."""
    pieces, start = [], 0
    for x in arrays:
        pieces.append(flat[start : start + x.size].reshape(x.shape))
        start += x.size
    return pieces


def communicates(eqn: jex.JaxprEqn) -> bool:
    """Returns whether replicas communicate in an operation of a trace, or in one inside it."""
    inner = jex.jaxprs_in_params(eqn.params)
    return eqn.primitive.name.startswith(_COLLECTIVES) or any(communicates(e) for jaxpr in inner for e in jaxpr.eqns)


def canonical_dim(dim: int, ndim: int, of_scalar: str = "axis=None") -> int:
    """Returns `dim`, an argument `axis`, as a non-negative index.

    Args:
      dim: the dim.
      ndim: the number of dims.
      of_scalar: what to write instead if there are none.

    Raises:
      ReduceOpError: `dim` is not an integer from -ndim to ndim - 1.
    """
    if not arguments.is_integer(dim):
        raise ReduceOpError(f"axis={shown(dim)}", "must be an integer.", "axis=0")
    if not -ndim <= dim < ndim:
        where = "a scalar has no dims" if ndim == 0 else f"the value has dims 0 to {ndim - 1}"
        raise ReduceOpError(f"axis={dim}", f"{where}.", of_scalar if ndim == 0 else "axis=0")
    return dim % ndim
