# SPDX-License-Identifier: Apache-2.0
"""The outputs of `predict`: the rows of all replicas, in the order of the data."""

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import jax
import numpy as np

from phalanx._src.mesh.values import ComponentSizes, differs, is_distributed
from phalanx.errors import InvalidArgumentError
from phalanx.typing import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Predictions:
    """The outputs of all replicas.

    Args:
      data: array (replicas, rows, ...), or (replicas, steps, rows, ...) for stacked steps.
      rows: the sizes of the components. None if they are equal.
    """

    data: PyTree
    rows: ComponentSizes | None = field(metadata={"static": True})


def apart(outputs: PyTree) -> PyTree:
    """Replaces per-replica outputs by plain arrays (`_Predictions`), so that they can be replicated on all processes."""
    return jax.tree.map(lambda x: _Predictions(x.data, x.rows) if differs(x) else x, outputs, is_leaf=is_distributed)


def rows(outputs: PyTree, steps: int | None) -> PyTree:
    """Returns the rows of predictions as NumPy arrays, in the order of the data.

    Args:
      outputs: pytree of `_Predictions`.
      steps: number of stacked steps. None for a single step.
    """
    return jax.tree.map(lambda x: _rows_of(x, steps), outputs, is_leaf=lambda x: isinstance(x, _Predictions))


def _rows_of(output: PyTree, steps: int | None) -> np.ndarray:
    if not isinstance(output, _Predictions):
        return np.asarray(output)
    data = np.asarray(output.data)
    # The sizes of the components are known without the device, so no mask is fetched.
    parts = list(data) if output.rows is None else [output.rows.cut(x, i) for i, x in enumerate(data)]
    # The data is ordered by step first, then by replica.
    return _joined(*(parts if steps is None else [part[step] for step in range(steps) for part in parts]))


def _joined(*parts: np.ndarray) -> np.ndarray:
    """Returns the rows of several parts.

    Raises:
      InvalidArgumentError: their other dims differ.
    """
    shapes = sorted({x.shape for x in parts if x.shape[1:] != parts[0].shape[1:]})
    if shapes and parts[0].ndim:
        raise InvalidArgumentError(
            f"predict of outputs of shapes {parts[0].shape} and {shapes[0]}",
            "a dim behind the first depends on the number of rows, which differs between batches and replicas.",
            "outputs with the rows in dim 0 only; or model(x) outside of predict, on all rows",
        )
    return np.concatenate(parts)


class Outputs:
    """All predictions, in one array per leaf, into which each batch is written when it comes.

    Args:
      expected: number of times that rows will be added. None if it is unknown.
    """

    def __init__(self, expected: int | None) -> None:
        self._expected = expected
        self._leaves: list[_GrowingRows] = []
        self._tree: PyTree = None

    def add(self, parts: Sequence[PyTree]) -> PyTree:
        """Adds rows, given in several parts. Returns them as one pytree of arrays."""
        added = parts[0] if len(parts) == 1 else jax.tree.map(_joined, *parts)
        leaves, tree = jax.tree.flatten(added)
        if self._tree is None:
            # These arrays are full, so they are never written to. The callbacks of the batch hold them too.
            self._leaves, self._tree = [_GrowingRows(leaf, self._expected) for leaf in leaves], tree
            return added
        self._tree = tree
        for rows_so_far, leaf in zip(self._leaves, leaves, strict=True):
            rows_so_far.add(leaf)
        return added

    def result(self) -> PyTree:
        """Returns all rows.

        Raises:
          InvalidArgumentError: there are none.
        """
        if self._tree is None:
            raise InvalidArgumentError("predict without a batch", "the data is empty.", "pass at least one row")
        return self._tree.unflatten([each.rows for each in self._leaves])


@final
class _GrowingRows:
    """The rows of one output so far.

    Args:
      first: the first rows. An output may have another number of rows than its batch.
      expected: number of times that rows will be added, with the first. None if it is unknown.
    """

    def __init__(self, first: np.ndarray, expected: int | None) -> None:
        self._array, self._expected = first, expected
        self._count = len(first) if first.ndim else 0
        self._memory: mmap.mmap | None = None

    @property
    def rows(self) -> np.ndarray:
        """All rows so far."""
        return self._array[: self._count] if self._array.ndim else self._array

    def add(self, leaf: np.ndarray) -> None:
        """Adds rows behind the others."""
        if self._array.dtype != leaf.dtype or self._array.shape[1:] != leaf.shape[1:] or not leaf.ndim:
            self._array, self._memory = _joined(self.rows, leaf), None
            self._count = len(self._array)
            return
        end = self._count + len(leaf)
        if end > len(self._array):
            # At the first time, `_count` is the rows of one call, so this is room for those of all calls.
            expected, self._expected = self._expected, None
            room = max(self._count * (expected or 2), end)
            if expected is None and sys.platform == "linux":
                self._reserve(room)
            else:
                self._move_to(np.empty((room, *leaf.shape[1:]), leaf.dtype))
        self._array[self._count : end] = leaf
        self._count = end

    def _move_to(self, array: np.ndarray) -> None:
        array[: self._count] = self.rows
        self._array = array

    def _reserve(self, room: int) -> None:
        """Makes room for so many rows. The system moves the pages of the rows: a copy would need twice the memory for a moment."""
        shape, dtype = (room, *self._array.shape[1:]), self._array.dtype
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        if self._memory is None:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._move_to(np.ndarray(shape, dtype, self._memory))
        else:
            self._array = self._array[:0].copy()  # Memory with an array over it cannot be moved.
            self._memory.resize(num_bytes)
            self._array = np.ndarray(shape, dtype, self._memory)
