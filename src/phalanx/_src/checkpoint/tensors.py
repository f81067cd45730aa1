# SPDX-License-Identifier: Apache-2.0
"""Reads files of the safetensors format, on a disk through one descriptor: the bytes that are checked are those that are read.

The library maps a file into memory, so that the process dies of SIGBUS if another one shortens the file.
"""

import functools
import math
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple, final

import ml_dtypes  # noqa: F401  (NumPy knows the names of JAX's dtypes after this import.)
import numpy as np

from phalanx._src.checkpoint.remote import is_remote, read_into, status_of
from phalanx._src.cluster.untrusted import open_data, parse_json
from phalanx._src.mesh.arrays import empty

DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{
        f"{letter}{bits}": f"{kind}{bits}"
        for letter, kind in zip("IU", ("int", "uint"), strict=True)
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""The dtypes of the format that NumPy has."""

_LENGTH_BYTES = 8


class TensorEntry(NamedTuple):
    """The dtype, the shape and the place of an array in a file.

    Args:
      code: the name of its dtype in the format.
      shape: its shape.
      begin: its first byte in the file.
      end: the byte after its last one.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, entry: dict[str, Any], base: int, size: int) -> "TensorEntry":
        """Returns an entry of the list of contents.

        Args:
          entry: as it is in the file.
          base: where the arrays of the file begin.
          size: the size of the file.

        Raises:
          LookupError, TypeError, ValueError: it is none, or its bytes are not in the file.
        """
        begin, end = entry["data_offsets"]
        code, shape = entry["dtype"], entry["shape"]
        # Not `isinstance(n, int)`, which takes JSON's true for 1.
        if not (isinstance(code, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))):
            raise TypeError(str(entry))
        if not begin <= end <= size - base:
            raise ValueError("an array ends after the file")
        if code in DTYPES and math.prod(shape) * np.dtype(DTYPES[code]).itemsize != end - begin:
            raise ValueError("an array has another size than its shape")
        return cls(code, tuple(shape), base + begin, base + end)


@final
class Tensors:
    """A file of the safetensors format that is open for reading.

    Args:
      file: the file.

    Raises:
      OSError: it cannot be read.
      AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError: it is not of the format.

    Attributes:
      header: the bytes before the arrays.
      metadata: the texts in it.
      entries: the arrays in it, by name.
    """

    def __init__(self, file: Path) -> None:
        if is_remote(file):
            self._read_into = functools.partial(read_into, file)
            size = status_of(file).st_size
        else:
            opened = open_data(file)
            # Open as long as this object: a manager may delete the file of an older checkpoint while it is read.
            weakref.finalize(self, opened.close)
            self._read_into = functools.partial(_from_descriptor, opened.fileno())
            size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(self._read(np.empty(_LENGTH_BYTES, np.uint8), 0).tobytes(), "little")
        if length > size - _LENGTH_BYTES:
            raise ValueError("its list of contents ends after the file")
        # With its length, which the sum in it covers too.
        self.header = self._read(np.empty(_LENGTH_BYTES + length, np.uint8), 0).tobytes()
        entries = parse_json(self.header[_LENGTH_BYTES:], size)
        self.metadata: dict[str, str] = dict(entries.pop("__metadata__", {}))
        self.entries = {name: TensorEntry.of(entry, len(self.header), size) for name, entry in entries.items()}
        # Or else a small file could fill the memory with many copies of its bytes.
        if sum(entry.end - entry.begin for entry in self.entries.values()) != size - len(self.header):
            raise ValueError("its arrays overlap, or some bytes belong to none")

    def array(self, name: str) -> np.ndarray:
        """Reads an array of one of `DTYPES`.

        Raises:
          EOFError: the file has become shorter.
          MemoryError: the array does not fit into the memory of this process.
          OSError: the file cannot be read.
        """
        entry = self.entries[name]
        return self._read(empty(entry.shape, DTYPES[entry.code]), entry.begin)

    def _read(self, array: np.ndarray, begin: int) -> np.ndarray:
        """Fills an array with bytes of the file."""
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            count = self._read_into(rest, begin)
            if not count:
                raise EOFError("the file ends too early")
            rest, begin = rest[count:], begin + count
        return array


def _from_descriptor(descriptor: int, memory: memoryview, begin: int) -> int:
    return os.preadv(descriptor, [memory], begin)  # Linux reads at most 2 GiB per call.
