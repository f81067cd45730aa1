# SPDX-License-Identifier: Apache-2.0
"""Sends workers data of each other: bytes, and rows as dtypes, shapes and bytes. Nothing is pickled."""

import base64
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from phalanx.errors import InputError
from phalanx.typing import PyTree


def exchange_bytes(data: bytes, exchange: Callable[[np.ndarray], np.ndarray]) -> list[bytes]:
    """Returns the bytes that each worker passed, by rank. A collective call.

    Args:
      data: bytes of this worker, of any length.
      exchange: see `Topology.exchange`.
    """
    # The exchange needs equal shapes, so the lengths go first.
    lengths = exchange(np.array([len(data)]))[:, 0]
    # A power of two, because each length compiles another program.
    padded = np.zeros(1 << int(lengths.max()).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [row[:n].tobytes() for row, n in zip(exchange(padded), lengths, strict=True)]


def packed(rows: PyTree) -> bytes:
    """Returns a pytree of NumPy arrays as text. `unpacked` says what it cannot restore."""
    leaves: list[np.ndarray]
    structure: Any
    leaves, structure = jax.tree.flatten(rows)
    try:
        tree = base64.b64encode(structure.serialize_using_proto()).decode()
    except (ValueError, RuntimeError):
        # A class of the user's own, for example a named tuple; or a key that is not Unicode.
        return json.dumps({"refused": f"{structure}"}).encode()
    names = [_name_of(x.dtype) for x in leaves]
    if None in names:
        return json.dumps({"refused": f"an array of {leaves[names.index(None)].dtype}"}).encode()
    arrays = [[name, x.shape, base64.b64encode(x.tobytes()).decode()] for name, x in zip(names, leaves, strict=True)]
    return json.dumps({"structure": tree, "arrays": arrays}).encode()


def unpacked(data: bytes) -> PyTree:
    """Returns the pytree that `packed` wrote.

    Raises:
      InputError: the batch has objects of user-defined classes, which only unpickling would restore.
    """
    message = json.loads(data)
    if "refused" in message:
        raise InputError(
            f"a worker without rows, while the batches of other workers are {message['refused']}",
            "it pads with a row of another worker, and workers send each other arrays in tuples, lists and dicts only.",
            "batches of tuples, lists and dicts, or at least one row for each worker",
        )
    tree: Any = jax.tree_util.PyTreeDef
    structure = tree.deserialize_using_proto(jax.tree_util.default_registry, base64.b64decode(message["structure"]))
    return structure.unflatten([_array(*array) for array in message["arrays"]])


def _name_of(dtype: np.dtype[Any]) -> str | None:
    """Returns a name that makes the dtype again, or None if its bytes are not its values or it has no such name."""
    for name in (dtype.str, dtype.name):
        try:
            if dtype.kind != "O" and jax.numpy.dtype(name) == dtype:
                return name
        except TypeError:  # No name of a dtype.
            continue
    return None


def _array(dtype: str, shape: list[int], data: str) -> np.ndarray:
    # `jax.numpy.dtype` also knows bfloat16 and its like.
    return np.frombuffer(base64.b64decode(data), jax.numpy.dtype(dtype)).reshape(shape)
