# SPDX-License-Identifier: Apache-2.0
"""Predictions of batches, as a caller wants them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from phalanx.errors import InvalidArgumentError, shown
from phalanx.typing import PyTree


def chosen(predictions: PyTree, keys: Sequence[str] | None) -> PyTree:
    """Returns the predictions of these names.

    Raises:
      InvalidArgumentError: there is no prediction of one of the names.
    """
    if keys is None:
        return predictions
    if not isinstance(predictions, Mapping) or not isinstance(keys, Iterable) or not set(keys) <= set(predictions):
        raise InvalidArgumentError(
            f"predict_keys={shown(keys)}",
            f"the predictions are {sorted(predictions) if isinstance(predictions, Mapping) else 'an array'}.",
            "predict_keys=None",
        )
    return {key: predictions[key] for key in keys}


def rows_of(predictions: PyTree) -> Iterator[Any]:
    """Yields the predictions of each row.

    Raises:
      InvalidArgumentError: the predictions have different numbers of rows.
    """
    # A scalar belongs to no row. Repeating it per row would hide that the
    # model function returns a statistic of the batch.
    sizes = {len(x) if np.ndim(x) else -1 for x in jax.tree.leaves(predictions)}
    if len(sizes) != 1 or -1 in sizes:
        raise InvalidArgumentError(
            f"predictions of the shapes {jax.tree.map(np.shape, predictions)}",
            "they must have one entry per row of the batch.",
            "predict(input_fn, yield_single_examples=False)",
        )
    for i in range(sizes.pop()):
        yield jax.tree.map(lambda x, i=i: x[i], predictions)
