# SPDX-License-Identifier: Apache-2.0
"""The outputs of `predict`: the rows of all replicas, in the order of the data."""

from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx._src.mesh.values import differs, is_distributed
from phalanx.typing import PyTree


class _ReplicaRows(NamedTuple):
    """The outputs of all replicas.

    Args:
      data: array (replicas, rows, ...), or (replicas, steps, rows, ...) for stacked steps.
      mask: bool array of the leading dims of `data`. True for real rows. None if all rows are real.
    """

    data: PyTree
    mask: jax.Array | np.ndarray | None


def apart(outputs: PyTree) -> PyTree:
    """Replaces per-replica outputs by plain arrays (`_ReplicaRows`), so that they can be replicated on all processes."""
    return jax.tree.map(_apart_of, outputs, is_leaf=is_distributed)


def _apart_of(output: PyTree) -> PyTree:
    if not differs(output):
        return output
    return _ReplicaRows(output.data, None if output.rows is None else output.rows.mask)


def rows(outputs: PyTree, steps: int | None) -> PyTree:
    """Returns the real rows of predictions as NumPy arrays, in the order of the data.

    Args:
      outputs: pytree of `_ReplicaRows`.
      steps: number of stacked steps. None for a single step.
    """
    return jax.tree.map(lambda x: _rows_of(x, steps), outputs, is_leaf=lambda x: isinstance(x, _ReplicaRows))


def _rows_of(output: PyTree, steps: int | None) -> np.ndarray:
    if not isinstance(output, _ReplicaRows):
        return np.asarray(output)
    data, mask = np.asarray(output.data), None if output.mask is None else np.asarray(output.mask)
    if steps is not None:
        # The data is ordered by step first, then by replica.
        data = np.moveaxis(data, 1, 0)[:steps]
        mask = None if mask is None else np.moveaxis(mask, 1, 0)[:steps]
    return data.reshape(-1, *data.shape[2 + (steps is not None) :]) if mask is None else data[mask]


def joined(outputs: list[Any]) -> PyTree:
    """Concatenates predictions along dim 0."""
    return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
