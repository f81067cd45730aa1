# SPDX-License-Identifier: Apache-2.0
"""Python values as JSON: numbers, text, bytes, tuples, dicts with any keys, NumPy generators, and references to arrays."""

import base64
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src.mesh.arrays import spans_processes
from phalanx.typing import PyTree

_BYTES, _TUPLE, _ITEMS, _COMPLEX, _ARRAY, _KEY = (
    f"__{name}__" for name in ("bytes", "tuple", "items", "complex", "array", "key")
)
_MOST_BITS = 14_000
PLAIN = (type(None), bool, int, float, complex, str, bytes)

Put = Callable[[Any], str]
"""Stores a copy of a NumPy array, or of a JAX array that spans processes, and returns its name."""


def is_array(value: object) -> bool:
    """Returns whether a value is stored as an array: a NumPy or JAX array, a NumPy scalar, or JAX's random keys."""
    return isinstance(value, (np.ndarray, np.generic, jax.Array))


def is_key(value: object) -> bool:
    """Returns whether a value consists of JAX's random keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_plain(value: object) -> bool:
    """Returns whether a value consists of Python's own numbers, text and containers, and needs no array."""
    # A namedtuple is flattened by its fields, because `decode` returns plain tuples.
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, PLAIN) and is_plain(v) for k, v in value.items())
    return isinstance(value, PLAIN) and not isinstance(value, np.generic) and not _is_too_long(value)


def _is_too_long(value: object) -> bool:
    """Returns whether a value is an integer that Python would not read again: it takes no more than 4,300 digits."""
    return isinstance(value, int) and value.bit_length() > _MOST_BITS


def encode(value: PyTree, put: Put | None = None) -> Any:
    """Returns a value as what `json` can write.

    Args:
      value: what `is_plain` accepts; also with arrays and NumPy scalars in it if there is a `put`.
      put: stores the arrays.

    Raises:
      TypeError: the value contains another object.
    """
    # First, because np.float64 is a float too, and would lose its dtype.
    if is_array(value):
        if put is None:
            raise TypeError(f"{type(value).__name__} is not plain")
        return encode_array(value, put)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {_COMPLEX: [value.real, value.imag]}
    if isinstance(value, list):
        return [encode(item, put) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, put) for item in value]}
    if isinstance(value, dict):
        # A key such as "__tuple__" would be read as a mark.
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: encode(item, put) for k, item in value.items()}
        return {_ITEMS: [[encode(k, put), encode(item, put)] for k, item in value.items()]}
    if isinstance(value, PLAIN) and not _is_too_long(value):
        return value
    raise TypeError(f"{type(value).__name__} can be converted neither to an array nor to JSON")


def encode_array(value: Any, put: Put) -> dict[str, Any]:
    """Stores an array and returns the reference to it, with the kind of random key if it holds such keys.

    Raises:
      TypeError: the array holds Python objects or text.
    """
    if is_key(value):
        return {_ARRAY: put(np.asarray(jax.random.key_data(value))), _KEY: str(jax.random.key_impl(value))}
    if spans_processes(value):
        # No process has all of it, so no copy can be made here.
        return {_ARRAY: put(value)}
    # No copy: `put` makes one.
    array = np.asarray(value, order="C")
    # Files have one order of bytes, and name dtypes without it.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if dtype_of_name(array.dtype.name) != array.dtype:
        raise TypeError(f"an array of dtype {array.dtype} has no fixed format")
    return {_ARRAY: put(array)}


def dtype_of_name(name: str) -> np.dtype[Any] | None:
    """Returns the dtype of a name. None if there is none, as for dtypes of records, or if it holds text, dates or Python objects."""
    # NumPy would read more than names, such as "(2,3)i4".
    if not name.isidentifier():
        return None
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.kind not in "OSUMm" and dtype.itemsize and dtype.name == name else None


def decode(value: Any, get: Callable[[str], np.ndarray]) -> PyTree:
    """Returns the value that `encode` was called with. `get` returns the array of a name."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        array = get(value[_ARRAY])
        return jax.random.wrap_key_data(jnp.asarray(array), impl=value[_KEY]) if _KEY in value else array
    if _BYTES in value:
        return base64.b64decode(value[_BYTES], validate=True)
    if _COMPLEX in value:
        return complex(*value[_COMPLEX])
    if _TUPLE in value:
        return tuple(decode(item, get) for item in value[_TUPLE])
    if _ITEMS in value:
        return {decode(k, get): decode(item, get) for k, item in value[_ITEMS]}
    return {k: decode(item, get) for k, item in value.items()}


def packed(value: PyTree) -> bytes:
    """Returns a value that `encode` accepts, with its arrays, as bytes.

    Raises:
      TypeError: the value contains another object.
    """
    arrays: list[list[Any]] = []

    def put(array: np.ndarray) -> str:
        arrays.append([str(array.dtype), array.shape, base64.b64encode(array.tobytes()).decode()])
        return str(len(arrays) - 1)

    return json.dumps([encode(value, put), arrays]).encode()


def unpacked(data: bytes) -> PyTree:
    """Returns the value that `packed` was called with."""
    value, arrays = json.loads(data)

    def get(name: str) -> np.ndarray:
        dtype, shape, numbers = arrays[int(name)]
        # `frombuffer` returns arrays that cannot be written to.
        return np.frombuffer(base64.b64decode(numbers), jnp.dtype(dtype)).reshape(shape).copy()

    return decode(value, get)


def kind_of_keys(value: object) -> str | None:
    """Returns the kind of the random keys that an encoded value consists of. None if it is something else."""
    return value.get(_KEY) if isinstance(value, dict) else None


def references(value: object) -> list[str]:
    """Returns the names of the arrays that an encoded value refers to, as often as it does."""
    if isinstance(value, dict):
        return [value[_ARRAY]] if _ARRAY in value else references([*value.values()])
    return [name for item in value for name in references(item)] if isinstance(value, list) else []
