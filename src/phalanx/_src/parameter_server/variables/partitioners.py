# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sharding variables over parameter servers: numbers of shards, rows per shard, and balancing. Imports no JAX."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, final

import numpy as np
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(ABC):
    """Decides the number of shards of a variable. May be created and called in any context.

    For a custom rule, override `__call__`, or use a plain function with the same arguments.

    Source: tf.distribute.experimental.partitioners.Partitioner.

    Example:
      >>> class Halves(Partitioner):
      ...     def __call__(self, shape, dtype, axis=0):
      ...         return [2, *[1] * (len(shape) - 1)]
      >>> Halves()((100, 8), "float32")
      [2, 1]
    """

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: str | type | np.dtype, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dim of a variable.

        Args:
          shape: shape of the variable, with at least one dim.
          dtype: dtype of the variable, as Keras or NumPy write it.
          axis: the dim to shard; all other dims have one shard. A strategy shards dim 0.

        Returns:
          One integer per dim.

        Raises:
          InvalidArgumentError: `axis` or `dtype` is invalid.
        """


@final
@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable, at most one per row. May be created in any context.

    Args:
      num_shards: number of shards.

    Raises:
      InvalidArgumentError: `num_shards` is not a positive integer.

    Source: tf.distribute.experimental.partitioners.FixedShardsPartitioner.

    Example:
      >>> FixedShardsPartitioner(2)((10, 3), "float32")
      [2, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive("num_shards", self.num_shards)

    @override
    def __call__(self, shape: Sequence[int], dtype: str | type | np.dtype, axis: int = 0) -> list[int]:
        _check_axis(shape, axis)
        return _parts(shape, axis, self.num_shards)


@final
@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """As many shards as possible such that none is smaller than a minimum. May be created in any context.

    Args:
      min_shard_bytes: smallest size of a shard, in bytes.
      max_shards: largest number of shards.
      bytes_per_string: assumed size of one string, in bytes.

    Raises:
      InvalidArgumentError: an argument is not a positive integer.

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
    def __call__(self, shape: Sequence[int], dtype: str | type | np.dtype, axis: int = 0) -> list[int]:
        rows, row_bytes = _rows(shape, dtype, axis, self.bytes_per_string)
        fewest_rows = -(-self.min_shard_bytes // row_bytes)
        return _parts(shape, axis, min(self.max_shards, rows // fewest_rows))


@final
@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as possible such that none is larger than a maximum. May be created in any context.

    Args:
      max_shard_bytes: largest size of a shard, in bytes. A shard of a single row may be larger.
      max_shards: largest number of shards, which takes precedence over the size. None for no limit.
      bytes_per_string: assumed size of one string, in bytes.

    Raises:
      InvalidArgumentError: an argument is not a positive integer.

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
    def __call__(self, shape: Sequence[int], dtype: str | type | np.dtype, axis: int = 0) -> list[int]:
        rows, row_bytes = _rows(shape, dtype, axis, self.bytes_per_string)
        most_rows = max(1, self.max_shard_bytes // row_bytes)
        return _parts(shape, axis, min(self.max_shards or rows, -(-rows // most_rows)))


def check_partitions(shape: Sequence[int], counts: Any) -> int:
    """Returns the number of shards that a partitioner requests, at most one per row.

    Args:
      shape: shape of the variable, with at least one dim.
      counts: result of the partitioner.

    Raises:
      InvalidArgumentError: `counts` is not a list with one number per dim, or it shards a dim other than 0.

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
            "the result must be a list with one number per dim: the number of shards, then 1 for every other dim.",
            f"return {[2, *[1] * (len(shape) - 1)]}",
        )
    return max(1, min(int(counts[0]), shape[0]))


def split_rows(rows: int, num_shards: int) -> list[range]:
    """Returns the rows of each shard as consecutive ranges. The first shards have one more row if the rows do not divide evenly.

    Example:
      >>> [len(shard) for shard in split_rows(13, 5)]
      [3, 3, 3, 2, 2]
    """
    each, longer = divmod(rows, num_shards)
    starts = [shard * each + min(shard, longer) for shard in range(num_shards + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:], strict=False)]


def place(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Assigns variables to servers such that the load of the fullest server is small.

    Greedy: from the largest variable to the smallest, each goes to the server with the least load, or the first of several. If
    all servers are empty at the start, the fullest holds at most 4/3 of its load in an optimal assignment.

    Args:
      sizes: size of each variable, in bytes.
      loads: current load of each server, in bytes.

    Returns:
      The index of a server, for each variable.

    Source: Graham 1969, Bounds on multiprocessing timing anomalies (the rule "longest processing time first").

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


def _rows(shape: Sequence[int], dtype: str | type | np.dtype, axis: int, bytes_per_string: int) -> tuple[int, int]:
    """Returns the number of rows along `axis`, and the bytes per row."""
    _check_axis(shape, axis)
    elements = math.prod(shape)
    if not elements:
        return 0, 1  # An empty variable, of which nothing can be sharded.
    return shape[axis], elements // shape[axis] * _item_bytes(dtype, bytes_per_string)


def _item_bytes(dtype: str | type | np.dtype, bytes_per_string: int) -> int:
    if isinstance(dtype, str) and dtype == "string":  # A dtype of Keras that NumPy does not have.
        return bytes_per_string
    try:
        known = np.dtype(dtype)
    except Exception as e:  # NumPy raises several kinds of errors here.
        raise InvalidArgumentError(f"dtype={shown(dtype)}", "is not the dtype of a variable.", 'dtype="float32"') from e
    return bytes_per_string if known.kind in "OSTU" else known.itemsize


def _check_axis(shape: Sequence[int], axis: int) -> None:
    if not isinstance(shape, (list, tuple)) or not all(arguments.is_integer(n, least=0) for n in shape):
        raise InvalidArgumentError(f"shape={shown(shape)}", "must be a tuple of integers, 0 or more.", "shape=(8, 2)")
    if not arguments.is_integer(axis):
        raise InvalidArgumentError(f"axis={shown(axis)}", "must be an integer.", "axis=0")
    if not -len(shape) <= axis < len(shape):
        raise InvalidArgumentError(
            f"axis={axis} of a variable of shape {tuple(shape)}",
            f"the variable has {len(shape)} dims." if len(shape) else "a scalar cannot be sharded.",
            "axis=0" if len(shape) else "use the partitioner for variables with at least one dim",
        )


def _check_positive(name: str, value: object) -> None:
    arguments.integer(name, value, kind="a positive integer", hint=f"{name}=2")
