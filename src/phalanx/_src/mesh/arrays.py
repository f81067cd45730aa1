# SPDX-License-Identifier: Apache-2.0
"""Converts host values to arrays that a program accepts. Used for datasets, arguments and assignments."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from phalanx._src.typed_jax import explicit_transfer, is_ready
from phalanx.errors import InputError, InvalidArgumentError, TraceError, shown
from phalanx.typing import PyTree

# A CPU device uses memory whose address this divides, and copies other memory.
ALIGNMENT = 64

# For fewer bytes, aligned memory does not make `device_put` faster, and takes 3 us longer to get.
_SMALL_BYTES = 1 << 14
_NARROW_BYTES = 4
"""Numbers of this size fit, and need not be looked at."""

_FLOAT32_MAX, _FLOAT64_MAX = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)
# The smallest and largest number of each kind of dtype that JAX arrays can hold, without and with jax_enable_x64. With
# it, only Python numbers can be too large.
_LIMITS: tuple[Mapping[str, tuple[float, float]], ...] = (
    {
        "i": (-(2**31), 2**31 - 1),
        "u": (0, 2**32 - 1),
        "f": (-_FLOAT32_MAX, _FLOAT32_MAX),
        "c": (-_FLOAT32_MAX, _FLOAT32_MAX),
    },
    {"i": (-(2**63), 2**63 - 1), "f": (-_FLOAT64_MAX, _FLOAT64_MAX)},
)
_ENABLE_X64 = 'jax.config.update("jax_enable_x64", True) when the program starts'


def over_rows(rows: jax.Array, values: jax.Array) -> jax.Array:
    """Reshapes `rows`, an array over the leading dims of `values`, so that it broadcasts to `values`.

    Example:
      >>> over_rows(np.ones(3), np.ones((3, 4, 5))).shape
      (3, 1, 1)
    """
    return rows.reshape(rows.shape + (1,) * (values.ndim - rows.ndim))


def require_live(value: object) -> None:
    """Checks that `value` is not a value of a trace that has ended. May add an operation to the trace of a traced value.

    Raises:
      TraceError: it is one.
    """
    if isinstance(value, jax.core.Tracer):
        try:
            value == value  # noqa: B015, PLR0124  (any operation of one operand that takes every dtype)
        except jax.errors.UnexpectedTracerError as e:
            raise of_another_trace() from e


def of_another_trace(at: str = "") -> TraceError:
    """Returns the error for a value of a trace that has ended. `at` says where it was used."""
    return TraceError(
        f"a value from another trace{at}",
        "the value was kept in a list, an attribute or a global variable while a function was traced, when it had no "
        "number yet.",
        "return the value from the step, or store it in a keras.Variable",
    )


def as_array(value: object, name: str = "a value") -> Any:
    """Returns an array of numbers or bools of any library as a NumPy or JAX array.

    TensorFlow and torch tensors share their memory with the result. Sparse arrays become dense.

    Args:
      value: any object.
      name: name of the value for error messages.

    Returns:
      The array, or None if `value` is not an array of numbers or bools.

    Raises:
      InputError: `value` is a masked, ragged or deleted array, or has numbers that do not fit into JAX arrays.
    """
    if isinstance(value, jax.Array):
        # A tracer has no memory: its `is_deleted` raises an error.
        if not isinstance(value, jax.core.Tracer) and value.is_deleted():
            raise InputError(
                f"{name} that is a deleted array {value.dtype}{list(value.shape)}",
                "its memory was donated to a program, or freed.",
                "jnp.copy(x), called before the array is donated",
            )
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        value = of_other_library(value, name)
        if value is None:
            return None
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{name} that is a masked array", "JAX arrays cannot carry a mask.", "x.filled(0)")
    if not is_array(value):
        return None
    array: Any = value
    if not array.dtype.isnative or array.dtype.type in _ODD_KINDS:
        array = _usual(array, name)
    if array.dtype.itemsize >= 8:
        require_fits(array, name)
    return array


def is_array(value: object) -> bool:
    """Returns whether JAX accepts `value` as an array. False for strings, dates, objects and NumPy bool scalars."""
    if isinstance(value, (np.ndarray, np.generic)):
        # A NumPy bool selects the program like a Python bool, so that a step may use it in an `if`.
        return value.dtype.kind not in "OSUMm" and not isinstance(value, np.bool_)
    return isinstance(value, jax.Array)


def as_number(value: object, name: str = "a value") -> Any:
    """Returns Python numbers unchanged, except bools, and converts other values like `as_array`.

    Raises:
      InputError: see `as_array`.
    """
    if isinstance(value, (int, float, complex)) and not isinstance(value, (bool, np.generic)):
        # Fast path: nearly all numbers are small enough for every dtype.
        if not (isinstance(value, (int, float)) and -(2**31) <= value < 2**31):
            require_fits(value, name)
        return value
    return as_array(value, name)


def to_host(tree: PyTree, name: str) -> PyTree:
    """Converts each leaf of a pytree to an array. JAX arrays stay JAX arrays. All other leaves become NumPy arrays.

    Args:
      tree: a pytree of arrays, numbers and tensors, or of text and objects.
      name: name of the pytree for error messages.

    Returns:
      The pytree of arrays.

    Raises:
      InputError: see `as_array`. The message names the leaf.
    """
    return map_named(_to_host_leaf, tree, name, is_leaf=is_one_array)


def to_numpy(value: object, name: str) -> np.ndarray:
    """Returns a value as a NumPy array. Text and objects are allowed.

    Raises:
      InputError: `value` is a list whose rows have different shapes.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as e:
        raise InputError(
            f"{name} {shown(value)}", f"cannot be converted to an array: {e}", "pad the rows to the same shape"
        ) from e


def flattened(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Calls `jax.tree.flatten`.

    Raises:
      InvalidArgumentError: a dict has keys without an order, or another container cannot be flattened.
    """
    try:
        # Of `jax.tree_util`: `jax.tree.flatten` is a Python function that calls it, in each step of `run`.
        leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf)
    except ValueError as e:
        raise InvalidArgumentError(
            f"a nest of type {type(tree).__name__}",
            f"JAX cannot flatten it: {e}",
            "dicts whose keys have one type, such as texts",
        ) from e
    return leaves, structure


def map_named(
    convert: Callable[..., Any], tree: PyTree, name: str, *, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Returns the pytree of `convert(leaf, name=name)`. The message of an InputError names the leaf."""
    leaves, structure = flattened(tree, is_leaf)
    try:
        return structure.unflatten([convert(leaf, name=name) for leaf in leaves])
    except InputError:
        # Paths take time, so they are only made if a leaf is wrong. Its conversion fails again, now with its path.
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [convert(leaf, name=f"{name}{jax.tree_util.keystr(path)}") for path, leaf in leaves]


def copied(array: PyTree) -> PyTree:
    """Returns a copy of a NumPy array, aligned so that a CPU device can use its memory without another copy.

    Args:
      array: an array that other code may change later. JAX arrays and NumPy scalars cannot change, so they are returned
        unchanged.
    """
    if not isinstance(array, np.ndarray):
        return array
    if array.nbytes < _SMALL_BYTES:
        return array.copy()
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns a new array, aligned so that a CPU device can use its memory without a copy."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    # NumPy refuses a view of bytes as objects.
    if not num_bytes or dtype.hasobject:
        return np.empty(shape, dtype)
    array: np.ndarray = aligned_bytes(num_bytes).view(dtype).reshape(shape)
    return array


def aligned_bytes(count: int) -> np.ndarray:
    """Returns `count` new bytes, aligned so that a CPU device can use them without a copy."""
    memory = np.empty(count + ALIGNMENT, np.uint8)
    start = -address(memory) % ALIGNMENT
    return memory[start : start + count]


def uncommitted(value: PyTree) -> PyTree:
    """Returns an array on one device as an array that JAX moves to wherever an operation needs it.

    JAX refuses to combine arrays that are committed to different devices. The result stays on its device and shares the
    memory of the array. Other values, among them arrays over several devices, are returned unchanged.
    """
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array) or len(value.sharding.device_set) > 1:
        return value
    # The constructor of an array of keys takes other arguments than the one below.
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(uncommitted(jax.random.key_data(value)), impl=jax.random.key_impl(value))
    # `device_put` without a device leaves a committed array committed, and JAX has no other public function for it.
    kind: Callable[..., jax.Array] = type(value)
    return kind(value.aval, value.sharding, [value], committed=False)


def address(array: np.ndarray) -> int:
    """Returns the memory address of the first byte of an array."""
    return int(array.__array_interface__["data"][0])


def is_on_cpu(array: jax.Array) -> bool:
    """Returns whether NumPy can read an array where it is."""
    return next(iter(array.devices())).platform == "cpu" and not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def spans_processes(value: object) -> bool:
    """Returns whether `value` is an array of which no process holds the whole."""
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)


def put_shards(value: ArrayLike, sharding: Sharding) -> jax.Array:
    """Places the shards of this process. With several processes, all pass equal values, which are not compared."""
    if sharding.is_fully_addressable or spans_processes(value):
        placed: jax.Array = jax.device_put(value, sharding)
        return placed
    # `device_put` would communicate with the other processes, to compare the values.
    return _put_host(np.asarray(value), sharding)


def put_parts(shape: tuple[int, ...], sharding: Sharding, part: Callable[[Any], ArrayLike]) -> jax.Array:
    """Places an array of the host, in half of the time that `device_put` takes, which derives what is known here.

    Args:
      shape: shape of the array.
      sharding: where it belongs.
      part: maps the index of a device's part to this part.
    """
    with explicit_transfer():
        return jax.make_array_from_callback(shape, sharding, part)


def put_small(value: object, sharding: Sharding) -> jax.Array | None:
    """Places a copy of a small array on all devices of a sharding, in a quarter of the time that `device_put` takes.

    Args:
      value: any value.
      sharding: where it belongs.

    Returns:
      The new array. None if `value` is not an array in the memory of one CPU device or of NumPy, is large or still being computed, or
      if the sharding divides it.
    """
    return _put_host(np.array(value), sharding) if sharding.is_fully_replicated and _is_small_here(value) else None


def _is_small_here(value: object) -> bool:
    """Returns whether NumPy can read a small array without waiting for it."""
    if isinstance(value, np.ndarray):
        return value.nbytes < _SMALL_BYTES
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    is_on_one_cpu = len(value.devices()) == 1 and is_on_cpu(value)
    return is_on_one_cpu and value.size * value.dtype.itemsize < _SMALL_BYTES and is_ready(value)


def _put_host(host: np.ndarray, sharding: Sharding) -> jax.Array:
    with explicit_transfer():
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def is_sparse(value: object) -> bool:
    """Returns whether `value` is a sparse array of SciPy, JAX or TensorFlow."""
    # By names, because SciPy and TensorFlow need not be installed.
    if hasattr(type(value), "todense"):
        return True
    kind = type(value)
    return kind.__name__ in ("SparseTensor", "SparseTensorValue") and kind.__module__.startswith("tensorflow.")


def is_one_array(value: object) -> bool:
    """Returns whether `value` stands for one array, although it may be a pytree: a sparse array or a distributed value."""
    return hasattr(type(value), "__jax_array__") or is_sparse(value)


def require_fits(value: object, name: str) -> None:
    """Checks that 64-bit numbers fit into JAX arrays, which have 32 bits unless `jax_enable_x64` is set.

    Args:
      value: a NumPy array or a Python number.
      name: name of the value for error messages.

    Raises:
      InputError: a number does not fit.
    """
    number = _too_large(value)
    if number is None:
        return
    dtype = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    hint = "numbers of at most 64 bits" if _is_wide() else f"{_ENABLE_X64}; or hash ids into range(2**31)"
    why = (
        "arrays hold 64 bits per number." if _is_wide() else "jax_enable_x64 is off, so arrays hold 32 bits per number."
    )
    raise InputError(f"{name} with the number {shown(number)}{dtype}", f"it does not fit: {why}", hint)


def of_other_library(value: object, name: str) -> np.ndarray | None:
    """Converts an array of a library other than NumPy and JAX to NumPy. Returns None for other objects.

    Raises:
      InputError: the array is ragged.
    """
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if is_sparse(value):
        return _dense(value, kind.__name__)
    # A value can exist only if its library is loaded, so nothing is imported.
    if library == "torch" and isinstance(value, sys.modules["torch"].Tensor):
        return _of_torch(value)
    if library != "tensorflow":
        return None
    if kind.__name__ in ("RaggedTensor", "RaggedTensorValue"):
        raise InputError(
            f"{name} that is a tf.RaggedTensor", "all rows of an array must have the same length.", "x.to_tensor()"
        )
    # `numpy()` of a scalar tensor returns a NumPy scalar. `asarray` makes it an array, even if it is a bool.
    return np.asarray(value.numpy()) if hasattr(value, "numpy") else None


def _too_large(value: Any) -> Any:
    """Returns a number that does not fit, or None."""
    kind = value.dtype.kind if hasattr(value, "dtype") else "i" if isinstance(value, int) else "f"
    limits = _LIMITS[_is_wide()].get(kind)
    if limits is None or (isinstance(value, np.ndarray) and (not value.size or value.real.itemsize <= _NARROW_BYTES)):
        return None
    if not isinstance(value, np.ndarray):
        number = value.item() if isinstance(value, np.generic) else value
        is_same = (
            limits[0] <= x <= limits[1] or (isinstance(x, float) and not math.isfinite(x)) for x in _parts(number)
        )
        return None if all(is_same) else number
    # `min` and `max` need no memory. Only an array that exceeds the limits gets a mask.
    for part in _parts(value):
        lowest, highest = part.min(), part.max()
        if limits[0] <= lowest and highest <= limits[1]:
            continue
        # NaN and infinities exist in 32 bits too, so they always fit.
        large = part[np.isfinite(part) & ((part < limits[0]) | (part > limits[1]))]
        if large.size:
            return large.flat[0].item()
    return None


def _parts(value: np.ndarray | complex) -> tuple[Any, ...]:
    """Returns the real and the imaginary part of a complex value, and any other value unchanged."""
    is_complex = value.dtype.kind == "c" if isinstance(value, np.ndarray) else isinstance(value, complex)
    return (value.real, value.imag) if is_complex else (value,)


_ODD_KINDS = (np.void, np.longdouble, np.clongdouble)


def _usual(value: Any, name: str) -> Any:
    """Returns an array whose numbers are in the byte order of another machine in that of this one.

    Raises:
      InputError: it is a structured array, or its numbers are longer than 64 bits.
    """
    dtype = value.dtype
    if dtype.type is np.void:
        fields = dtype.names or ("field",)
        raise InputError(
            f"{name} that is a structured array of dtype {dtype}",
            "JAX arrays have one dtype.",
            f"one array per field: {{{', '.join(f'{field!r}: x[{field!r}]' for field in fields)}}}",
        )
    if dtype.type in _ODD_KINDS:
        raise InputError(
            f"{name} of dtype {dtype}",
            "JAX arrays hold numbers of at most 64 bits.",
            'x.astype("complex128")' if dtype.kind == "c" else 'x.astype("float64")',
        )
    return value.astype(dtype.newbyteorder("="))


def _is_wide() -> bool:
    """Returns whether JAX arrays in this thread have 64 bits per number."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def _to_host_leaf(value: object, name: str) -> Any:
    array = as_array(value, name)
    if array is not None:
        return array
    # NumPy makes 64-bit numbers of a list. They may not fit, so they are checked too.
    value = to_numpy(value, name)
    array = as_array(value, name)
    return value if array is None else array


def _dense(value: Any, kind: str) -> np.ndarray:
    if kind == "SparseTensor":
        value = sys.modules["tensorflow"].sparse.to_dense(value).numpy()
    elif kind == "SparseTensorValue":
        dense = np.zeros(value.dense_shape, value.values.dtype)
        dense[tuple(np.asarray(value.indices).T)] = value.values
        value = dense
    else:
        value = value.todense()
    return np.asarray(value)


def _of_torch(tensor: Any) -> np.ndarray:
    torch: Any = sys.modules["torch"]
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    # NumPy has no bfloat16, so `Tensor.numpy` refuses it. Its bits travel as integers.
    array: np.ndarray = (
        tensor.view(torch.int16).numpy().view(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )
    return array
