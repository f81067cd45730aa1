# SPDX-License-Identifier: Apache-2.0
"""The outputs of `predict`: the rows of all replicas, in the order of the data."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from phalanx._src.mesh.values import ComponentSizes, differs, is_distributed
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
    return np.concatenate(parts if steps is None else [part[step] for step in range(steps) for part in parts])


def joined(outputs: list[Any]) -> PyTree:
    """Concatenates predictions along dim 0."""
    return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
