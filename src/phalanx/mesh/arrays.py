# SPDX-License-Identifier: Apache-2.0
"""Host values as arrays: what may enter a program, in which form. Datasets, arguments and assignments pass through here."""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import InputError, shown

_ALIGNMENT = 64
_SMALL_BYTES = 1 << 14
_FLOAT32_MAX, _FLOAT64_MAX = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)
# What fits into arrays of JAX, by the kind of dtype; without and with jax_enable_x64, where only Python numbers do not.
_LIMITS: Any = (
    {
        "i": (-(2**31), 2**31 - 1),
        "u": (0, 2**32 - 1),
        "f": (-_FLOAT32_MAX, _FLOAT32_MAX),
        "c": (-_FLOAT32_MAX, _FLOAT32_MAX),
    },
    {"i": (-(2**63), 2**63 - 1), "f": (-_FLOAT64_MAX, _FLOAT64_MAX)},
)
_ENABLE_X64 = 'jax.config.update("jax_enable_x64", True) when the program starts'


def as_array(value: Any, name: str = "a value") -> Any:
    """Returns `value` as an array of NumPy or JAX if it is an array of numbers or bools of any library; else None.

    Tensors of TensorFlow and torch share their memory with the result. Sparse arrays become dense.

    Args:
      value: any object.
      name: what errors call it.

    Raises:
      InputError: it is a masked, ragged or deleted array, or has numbers that do not fit into the arrays of JAX.
    """
    if isinstance(value, jax.Array):
        if not isinstance(value, jax.core.Tracer) and value.is_deleted():
            raise InputError(
                f"{name} that is a deleted array {value.dtype}{list(value.shape)}",
                "its memory has been given to a program (donated) or freed.",
                "a copy that was made before: jnp.copy(x)",
            )
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        value = of_other_library(value, name)
        if value is None:
            return None
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(
            f"{name} that is a masked array", "JAX has no arrays that carry a mask of their own.", "x.filled(0)"
        )
    if not is_array(value):
        return None
    if value.dtype.itemsize >= 8:
        require_fits(value, name)
    return value


def is_array(value: Any) -> bool:
    """Whether `value` is an array that JAX understands: no array of strings, dates or objects, and no single bool."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind not in "OSUMm" and not isinstance(value, np.bool_)
    return isinstance(value, jax.Array)


def as_number(value: Any, name: str = "a value") -> Any:
    """Returns what `as_array` does, and Python numbers that are not bools as they are.

    Raises:
      InputError: see `as_array`.
    """
    if isinstance(value, (int, float, complex)) and not isinstance(value, (bool, np.generic)):
        # Small numbers, which nearly all are, fit everywhere.
        if not (isinstance(value, (int, float)) and -(2**31) <= value < 2**31):
            require_fits(value, name)
        return value
    return as_array(value, name)


def to_host(tree: Any, name: str) -> Any:
    """Returns a nest with an array for each leaf: of JAX if it was one, else of NumPy; text and objects too.

    Args:
      tree: a nest of arrays, numbers and tensors.
      name: what errors call it.

    Raises:
      InputError: see `as_array`; the error says which leaf.
    """
    return map_named(_to_host_leaf, tree, name, is_leaf=is_sparse)


def to_numpy(value: Any, name: str) -> np.ndarray:
    """Returns what NumPy makes of a value: text and objects too.

    Raises:
      InputError: it is a list whose rows have different shapes.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as e:
        raise InputError(
            f"{name} {shown(value)}", f"is not an array: {e}", "rows of one shape, padded if need be"
        ) from e


def map_named(
    convert: Callable[[Any, str], Any], tree: Any, name: str, *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Returns the nest of `convert(leaf, name)`; an InputError names the leaf."""
    try:
        return jax.tree.map(lambda x: convert(x, name), tree, is_leaf=is_leaf)
    except InputError:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [convert(leaf, f"{name}{jax.tree_util.keystr(path)}") for path, leaf in leaves]


def copied(array: Any) -> Any:
    """Returns a copy of a NumPy array, which JAX may share: it begins where a device of the CPU can use it.

    Args:
      array: an array that somebody else may change later; arrays of JAX and NumPy scalars cannot be, and stay as they are.
    """
    if not isinstance(array, np.ndarray):
        return array
    if array.nbytes < _SMALL_BYTES:
        return array.copy()
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a new array whose memory a device of the CPU can use without a copy."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -address(memory) % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def address(array: np.ndarray) -> int:
    """Returns where the memory of an array begins."""
    return int(array.__array_interface__["data"][0])


def is_shared_by_cpu(array: np.ndarray) -> bool:
    """Whether a CPU device uses the memory of this array in place of a copy."""
    return address(array) % _ALIGNMENT == 0


def is_sparse(value: Any) -> bool:
    """Whether `value` is a sparse array of SciPy, JAX or TensorFlow."""
    if hasattr(type(value), "todense"):
        return True
    kind = type(value)
    return kind.__name__ in ("SparseTensor", "SparseTensorValue") and kind.__module__.startswith("tensorflow.")


def require_fits(value: Any, name: str) -> None:
    """Makes sure that numbers of 64 bits fit into what JAX makes of them: 32 bits, unless `jax_enable_x64` is set.

    Args:
      value: an array of NumPy, or a Python number.
      name: what errors call it.

    Raises:
      InputError: they do not.
    """
    found = _too_large(value)
    if found is None:
        return
    dtype = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    hint = "numbers of at most 64 bits" if _is_wide() else f"{_ENABLE_X64}; or hash ids into range(2**31)"
    why = (
        "arrays hold 64 bits per number." if _is_wide() else "jax_enable_x64 is off, so arrays hold 32 bits per number."
    )
    raise InputError(f"{name} with the number {found}{dtype}", f"it does not fit: {why}", hint)


def of_other_library(value: Any, name: str) -> Any:
    """Returns an array of another library than NumPy and JAX as one of NumPy; None for other objects.

    Raises:
      InputError: it is ragged.
    """
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if is_sparse(value):
        return _dense(value, kind.__name__)
    if library == "torch" and isinstance(value, sys.modules["torch"].Tensor):
        return _of_torch(value)
    if library != "tensorflow":
        return None
    if kind.__name__ in ("RaggedTensor", "RaggedTensorValue"):
        raise InputError(f"{name} that is a tf.RaggedTensor", "the rows of an array have one length.", "x.to_tensor()")
    # A scalar tensor is an array too, of a bool as well.
    return np.asarray(value.numpy()) if hasattr(value, "numpy") else None


def _too_large(value: Any) -> Any:
    """Returns a number that does not fit, or None."""
    kind = value.dtype.kind if hasattr(value, "dtype") else "i" if isinstance(value, int) else "f"
    limits = _LIMITS[_is_wide()].get(kind)
    if limits is None or (isinstance(value, np.ndarray) and not value.size):
        return None
    if not isinstance(value, np.ndarray):
        number = value.item() if isinstance(value, np.generic) else value
        is_same = (
            limits[0] <= x <= limits[1] or (isinstance(x, float) and not math.isfinite(x)) for x in _parts(number)
        )
        return None if all(is_same) else number
    for part in _parts(value):
        lowest, highest = part.min(), part.max()
        if limits[0] <= lowest and highest <= limits[1]:
            continue
        # NaN and infinities are the same in 32 bits.
        large = part[np.isfinite(part) & ((part < limits[0]) | (part > limits[1]))]
        if large.size:
            return large.flat[0].item()
    return None


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns real and imaginary part of what is complex."""
    is_complex = value.dtype.kind == "c" if isinstance(value, np.ndarray) else isinstance(value, complex)
    return (value.real, value.imag) if is_complex else (value,)


def _is_wide() -> bool:
    """Whether arrays of JAX have 64 bits per number, in this thread."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def _to_host_leaf(value: Any, name: str) -> Any:
    array = as_array(value, name)
    if array is not None:
        return array
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
    array: np.ndarray = (
        tensor.view(torch.int16).numpy().view(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )
    return array
