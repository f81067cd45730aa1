# SPDX-License-Identifier: Apache-2.0
"""The outputs of `predict`: the rows of all replicas, in the order of the data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        self._expected = expected or 1
        self._arrays: list[np.ndarray] = []
        # Per array, because an output may have another number of rows than the batch.
        self._counts: list[int] = []
        self._tree: PyTree = None

    def add(self, parts: Sequence[PyTree]) -> PyTree:
        """Adds rows, given in several parts. Returns them as one pytree of arrays."""
        added = parts[0] if len(parts) == 1 else jax.tree.map(_joined, *parts)
        leaves, self._tree = jax.tree.flatten(added)
        if not self._arrays:
            # These arrays are full, so they are never written to. The callbacks of the batch hold them too.
            self._arrays, self._counts = leaves, [len(leaf) if leaf.ndim else 0 for leaf in leaves]
            return added
        self._arrays = list(map(self._grown, self._arrays, self._counts, leaves))
        self._counts = [count + len(leaf) for count, leaf in zip(self._counts, leaves, strict=True)]
        self._expected = 2  # The first rows told how many there would be. If that was too few, twice as many.
        return added

    def result(self) -> PyTree:
        """Returns all rows.

        Raises:
          InvalidArgumentError: there are none.
        """
        if self._tree is None:
            raise InvalidArgumentError("predict without a batch", "the data is empty.", "pass at least one row")
        return self._tree.unflatten([x[:n] if x.ndim else x for x, n in zip(self._arrays, self._counts, strict=True)])

    def _grown(self, array: np.ndarray, count: int, leaf: np.ndarray) -> np.ndarray:
        """Writes rows behind those that an array has, into a larger array if there is no room."""
        if array.dtype != leaf.dtype or array.shape[1:] != leaf.shape[1:] or not leaf.ndim:
            return _joined(array[:count], leaf)
        if count + len(leaf) > len(array):
            # At the first time, `count` is the rows of one call, so this is room for those of all calls.
            room = max(count * self._expected, count + len(leaf))
            larger = np.empty((room, *leaf.shape[1:]), leaf.dtype)
            larger[:count] = array[:count]
            array = larger
        array[count : count + len(leaf)] = leaf
        return array
