# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.compat.v1.estimator.inputs`: input functions over arrays and tables."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.errors.names import suggest_names
from phalanx.typing import PyTree

__all__ = ["numpy_input_fn", "pandas_input_fn"]


def numpy_input_fn(
    x: PyTree,
    y: PyTree = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
) -> Callable[[], Any]:
    """Returns an input function that yields batches of NumPy arrays. May be called in any context.

    As in TensorFlow, batches continue across epoch boundaries, so only the last batch may be short.

    Args:
      x: array, or dict of arrays (rows, ...).
      y: array, or dict of arrays, of labels. None for none.
      batch_size: rows per batch.
      num_epochs: number of times that each row is yielded. None for no limit.
      shuffle: whether to shuffle the rows of each epoch.
      queue_capacity: has no effect.
      num_threads: has no effect.

    Raises:
      InvalidArgumentError: the arrays have different numbers of rows, or an argument has the wrong type.

    Source: tf.compat.v1.estimator.inputs.numpy_input_fn.

    Example:
      >>> import numpy as np
      >>> import phalanx.estimator as estimator
      >>> input_fn = estimator.inputs.numpy_input_fn({"x": np.arange(5.0)}, np.arange(5), batch_size=2, shuffle=False)
      >>> [features["x"].tolist() for features, labels in input_fn()]
      [[0.0, 1.0], [2.0, 3.0], [4.0]]
    """
    arguments.integer("batch_size", batch_size)
    if num_epochs is not None:
        arguments.integer("num_epochs", num_epochs)
    # There is no default: inputs/numpy_io.py of tf.estimator insists on it as
    # well, because forgetting it spoils a training run.
    if not isinstance(shuffle, bool):
        raise InvalidArgumentError(f"shuffle={shown(shuffle)}", "must be a bool.", "shuffle=True")
    data = jax.tree.map(np.asarray, x if y is None else (x, y))
    if not all(array.ndim for array in jax.tree.leaves(data)):
        raise InvalidArgumentError(f"x={shown(x)} and y={shown(y)}", "must be arrays with rows.", "np.array([1, 2])")
    sizes = {len(array) for array in jax.tree.leaves(data)}
    # Empty arrays would make an epoch without a batch, and num_epochs=None would never end.
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidArgumentError(
            f"x and y with {sorted(sizes)} rows",
            "all arrays need the same number of rows, at least 1.",
            "y with one label per row",
        )
    (size,) = sizes
    return lambda: _Batches(data, size, batch_size, num_epochs, shuffle)


class _Batches:
    """Batches of arrays, again and again."""

    def __init__(self, data: PyTree, size: int, batch_size: int, epochs: int | None, shuffle: bool) -> None:
        self._data, self._size, self._batch_size = data, size, batch_size
        self._epochs, self._shuffle = epochs, shuffle

    def __iter__(self) -> Iterator[Any]:
        waiting = np.zeros(0, np.int64)
        for rows in self._orders():
            # Row numbers are carried over the end of an epoch, not rows: the arrays are copied once per batch.
            waiting = np.concatenate([waiting, rows])
            while len(waiting) >= self._batch_size:
                yield self._rows(waiting[: self._batch_size])
                waiting = waiting[self._batch_size :]
        if len(waiting):
            yield self._rows(waiting)

    def _orders(self) -> Iterator[np.ndarray]:
        # No seed, as in tf.estimator: two calls give two orders.
        rng = np.random.default_rng()
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            yield rng.permutation(self._size) if self._shuffle else np.arange(self._size)
            epoch += 1

    def _rows(self, rows: np.ndarray) -> PyTree:
        return jax.tree.map(lambda array: array[rows], self._data)


def pandas_input_fn(x: PyTree, y: PyTree = None, **options: PyTree) -> Callable[[], Any]:
    """Returns an input function that yields batches of a table of pandas. May be called in any context.

    Args:
      x: a `pandas.DataFrame`, whose columns are the features.
      y: a `pandas.Series` of labels. None for none.
      **options: as for `numpy_input_fn`.

    Raises:
      InvalidArgumentError: `x` is not a table, or see `numpy_input_fn`.

    Source: tf.compat.v1.estimator.inputs.pandas_input_fn.
    """
    # pandas is not imported: whoever has a DataFrame has imported it.
    if not hasattr(x, "columns"):
        raise InvalidArgumentError(f"x={shown(x)}", "must be a pandas.DataFrame.", "numpy_input_fn(x, y)")
    features = {str(name): x[name].to_numpy() for name in x.columns}
    return numpy_input_fn(features, None if y is None else y.to_numpy(), **options)


suggest_names(__name__)
