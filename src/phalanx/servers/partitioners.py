# SPDX-License-Identifier: Apache-2.0
"""How large variables are divided into shards, and which server holds what: arithmetic only."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, final

import numpy as np
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, shown

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(ABC):
    """Says into how many shards a variable is divided. May be made and called in any context.

    For a rule of your own, override `__call__`; a plain function with the same arguments will do too.

    Source: tf.distribute.experimental.partitioners.Partitioner.

    Example:
      >>> class Halves(Partitioner):
      ...     def __call__(self, shape, dtype, axis=0):
      ...         return [2, *[1] * (len(shape) - 1)]
      >>> Halves()((100, 8), "float32")
      [2, 1]
    """

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns how many parts each dim of a variable has.

        Args:
          shape: that of the variable, of one dim or more.
          dtype: its type, as Keras or NumPy write it.
          axis: the dim that is divided; the others have one part. A strategy divides dim 0.

        Raises:
          InvalidArgumentError: there is no such dim, or no such type.
        """


@final
@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """As many shards for every variable, or one for each row where there are fewer rows. May be made in any context.

    Args:
      num_shards: how many.

    Raises:
      InvalidArgumentError: fewer than one.

    Source: tf.distribute.experimental.partitioners.FixedShardsPartitioner.

    Example:
      >>> FixedShardsPartitioner(2)((10, 3), "float32")
      [2, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive("num_shards", self.num_shards)

    @override
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        _check_axis(shape, axis)
        return _parts(shape, axis, self.num_shards)


@final
@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """As many shards as can be while none is smaller than a size. May be made in any context.

    Args:
      min_shard_bytes: how small a shard may be.
      max_shards: how many shards there may be.
      bytes_per_string: what one string counts for.

    Raises:
      InvalidArgumentError: one of them is less than one.

    Source: tf.distribute.experimental.partitioners.MinSizePartitioner.

    Example:
      >>> MinSizePartitioner(min_shard_bytes=1024, max_shards=8)((1000, 3), "float32")
      [8, 1]
      >>> MinSizePartitioner(min_shard_bytes=4096, max_shards=8)((1000, 3), "float32")
      [2, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _check_positive("min_shard_bytes", self.min_shard_bytes)
        _check_positive("max_shards", self.max_shards)
        _check_positive("bytes_per_string", self.bytes_per_string)

    @override
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows, row_bytes = _rows(shape, dtype, axis, self.bytes_per_string)
        fewest_rows = -(-self.min_shard_bytes // row_bytes)
        return _parts(shape, axis, min(self.max_shards, rows // fewest_rows))


@final
@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as can be while none is larger than a size. May be made in any context.

    Args:
      max_shard_bytes: how large a shard may be; one of a single row may be larger.
      max_shards: how many shards there may be, though they are larger then; None is any number.
      bytes_per_string: what one string counts for.

    Raises:
      InvalidArgumentError: one of them is less than one.

    Source: tf.distribute.experimental.partitioners.MaxSizePartitioner.

    Example:
      >>> MaxSizePartitioner(max_shard_bytes=4096)((1000, 3), "float32")
      [3, 1]
      >>> MaxSizePartitioner(max_shard_bytes=4096, max_shards=2)((1000, 3), "float32")
      [2, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _check_positive("max_shard_bytes", self.max_shard_bytes)
        _check_positive("max_shards", 1 if self.max_shards is None else self.max_shards)
        _check_positive("bytes_per_string", self.bytes_per_string)

    @override
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows, row_bytes = _rows(shape, dtype, axis, self.bytes_per_string)
        most_rows = max(1, self.max_shard_bytes // row_bytes)
        return _parts(shape, axis, min(self.max_shards or rows, -(-rows // most_rows)))


def check_partitions(shape: Sequence[int], counts: Any) -> int:
    """Returns into how many shards a variable is divided: as a partitioner answered, but no more than it has rows.

    Args:
      shape: that of the variable, of one dim or more.
      counts: what the partitioner returned.

    Raises:
      InvalidArgumentError: it is no list with one number for each dim, or divides another dim than 0.

    Example:
      >>> check_partitions((13, 4), [5, 1])
      5
      >>> check_partitions((2, 4), [5, 1])
      2
    """
    is_list = isinstance(counts, list | tuple) and all(isinstance(n, Integral) for n in counts)
    if not is_list or len(counts) != len(shape) or counts[0] < 1 or any(n != 1 for n in counts[1:]):
        raise InvalidArgumentError(
            f"variable_partitioner returned {shown(counts)} for a variable of shape {tuple(shape)}",
            "it must be a list with one number for each dim: how many shards, and 1 for every dim but the first.",
            f"return {[2, *[1] * (len(shape) - 1)]}",
        )
    return max(1, min(int(counts[0]), shape[0]))


def split_rows(rows: int, num_shards: int) -> list[range]:
    """Returns the rows of each shard: they follow each other, and the first shards have one more where it does not divide.

    Example:
      >>> [len(shard) for shard in split_rows(13, 5)]
      [3, 3, 3, 2, 2]
    """
    each, longer = divmod(rows, num_shards)
    starts = [shard * each + min(shard, longer) for shard in range(num_shards + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:], strict=False)]


def place(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Returns which server holds each thing, so that the fullest server holds little.

    The largest goes first, each to the server that holds least; of equals the first. Where all are empty at the beginning
    the fullest holds at most 4/3 of what it would in the best of all placements.

    Args:
      sizes: of the things, in bytes.
      loads: what each server holds already, in bytes.

    Example:
      >>> place([10, 40, 20, 30], [0, 0])
      [0, 0, 1, 1]
    """
    servers, loads = [0] * len(sizes), list(loads)
    for thing in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        servers[thing] = loads.index(min(loads))
        loads[servers[thing]] += sizes[thing]
    return servers


def _parts(shape: Sequence[int], axis: int, count: int) -> list[int]:
    parts = [1] * len(shape)
    parts[axis] = max(1, min(count, shape[axis]))
    return parts


def _rows(shape: Sequence[int], dtype: Any, axis: int, bytes_per_string: int) -> tuple[int, int]:
    """How many rows there are along `axis`, and the bytes of one."""
    _check_axis(shape, axis)
    elements = math.prod(shape)
    if not elements:
        return 0, 1  # There is nothing to divide.
    return shape[axis], elements // shape[axis] * _item_bytes(dtype, bytes_per_string)


def _item_bytes(dtype: Any, bytes_per_string: int) -> int:
    if isinstance(dtype, str) and dtype == "string":  # Keras's name, which NumPy does not know.
        return bytes_per_string
    try:
        known = np.dtype(dtype)
    except Exception as e:  # NumPy has no one error for it.
        raise InvalidArgumentError(f"dtype={shown(dtype)}", "not the type of a variable.", 'dtype="float32"') from e
    return bytes_per_string if known.kind in "OSTU" else known.itemsize


def _check_axis(shape: Sequence[int], axis: int) -> None:
    if not isinstance(shape, (list, tuple)) or not all(_is_size(n) for n in shape):
        raise InvalidArgumentError(f"shape={shown(shape)}", "must be a tuple of integers, 0 or more.", "shape=(8, 2)")
    if isinstance(axis, bool) or not isinstance(axis, Integral):
        raise InvalidArgumentError(f"axis={shown(axis)}", "must be an integer.", "axis=0")
    if not -len(shape) <= axis < len(shape):
        raise InvalidArgumentError(
            f"axis={axis} of a variable of shape {tuple(shape)}",
            f"it has {len(shape)} dims." if len(shape) else "a scalar is not divided.",
            "axis=0" if len(shape) else "a partitioner for variables of one dim or more",
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a whole number, at least 1.", f"{name}=2")
