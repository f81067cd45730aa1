# SPDX-License-Identifier: Apache-2.0
"""Arrays in Keras weight files, mapped into memory: whoever needs a slice of one reads only that slice from the disk."""

import math
import struct
from collections.abc import Callable

import keras
import numpy as np
from keras.src.saving import saving_lib

from phalanx._src.compat.hooks import extend
from phalanx._src.compat.layouts import layout_of_shards

_SMALL_BYTES = 1 << 20
"""The size below which reading an array is faster than mapping it."""
_ZIP_HEADER, _ZIP_LENGTHS = 30, 26
"""The fixed bytes of the header of a file in an archive, and where it says how long the name and the extra field after them are."""


@extend(saving_lib.H5IOStore, "__getitem__")
def _getitem(original: Callable[..., np.ndarray], self: saving_lib.H5IOStore, key: str) -> np.ndarray:
    mapped = _mapped(self, key)
    return original(self, key) if mapped is None else mapped


@extend(saving_lib, "is_memory_sufficient")
def _is_memory_sufficient(original: Callable[..., bool], model: keras.Model) -> bool:
    """Returns False for a model with sharded variables, so that Keras does not read all weights of a `.keras` file at once."""
    return all(layout_of_shards(v) is None for v in model.variables) and original(model)


def _mapped(store: saving_lib.H5IOStore, key: str) -> np.ndarray | None:
    """Returns a large array of a file without reading it. A change of the array does not change the file.

    Returns:
      The array. None if it is small, compressed or in chunks, or if the file cannot be mapped.
    """
    dataset = saving_lib.safe_get_h5_dataset(store._h5_entry_group, key)
    offset = dataset.id.get_offset()
    if offset is None or math.prod(dataset.shape) * dataset.dtype.itemsize < _SMALL_BYTES:
        return None
    # HDF5 has no bfloat16, so Keras writes the name of this dtype next to the bytes.
    dtype = dataset.attrs.get("dtype", dataset.dtype)
    try:
        file, start = _place_of(store)
        return np.memmap(file, dtype, "c", start + offset, dataset.shape)
    except (OSError, ValueError, TypeError):
        return None


def _place_of(store: saving_lib.H5IOStore) -> tuple[str, int]:
    """Returns the file with the bytes of a store, and where they begin in it.

    Raises:
      ValueError: they are compressed.
    """
    if store.archive is None:
        return store.h5_file.filename, 0
    info = store.archive.getinfo(str(store.path_or_io))
    if info.compress_size != info.file_size:
        raise ValueError("the weights are compressed")
    with open(store.archive.filename, "rb") as archive:
        archive.seek(info.header_offset + _ZIP_LENGTHS)
        lengths = struct.unpack("<HH", archive.read(4))
    return store.archive.filename, info.header_offset + _ZIP_HEADER + sum(lengths)
