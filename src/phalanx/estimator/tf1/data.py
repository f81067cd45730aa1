# SPDX-License-Identifier: Apache-2.0
"""`Dataset`: the methods of `tf.data.Dataset` that input functions use, over Grain."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np
from jax.typing import ArrayLike

from phalanx.errors import InvalidArgumentError, MissingDependencyError, arguments, shown
from phalanx.typing import PyTree

AUTOTUNE = -1
_MOST_IN_MEMORY = 2**20
"""Number of elements whose order is a permutation in memory. Grain computes that of few elements one by one, which takes long."""


@final
class Dataset:
    """A sequence of rows or batches. May be created in any context.

    Args:
      dataset: a `grain.MapDataset`.

    Source: tf.data.Dataset.

    Example:
      >>> from phalanx.estimator import tf1
      >>> dataset = tf1.data.Dataset.from_tensor_slices(([1, 2, 3], [4, 5, 6])).repeat(2).batch(2)
      >>> [x.tolist() for x, y in dataset]
      [[1, 2], [3, 1], [2, 3]]
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @staticmethod
    def from_tensor_slices(tensors: PyTree, name: str | None = None) -> "Dataset":
        """Returns the rows of arrays: a nest of arrays and lists (rows, ...).

        Raises:
          InvalidArgumentError: the arrays have different numbers of rows.
        """
        arrays = jax.tree.map(_array, tensors, is_leaf=lambda x: isinstance(x, list))
        sizes = {len(x) if x.ndim else 0 for x in jax.tree.leaves(arrays)}
        if len(sizes) != 1 or 0 in sizes:
            raise InvalidArgumentError(
                f"from_tensor_slices({shown(tensors)})", "the arrays need the same number of rows.", "([1, 2], [3, 4])"
            )
        return Dataset(_source(_Rows(arrays, sizes.pop())))

    @staticmethod
    def from_tensors(tensors: PyTree, name: str | None = None) -> "Dataset":
        """Returns a dataset of one element."""
        return Dataset(_source([jax.tree.map(_array, tensors, is_leaf=lambda x: isinstance(x, list))]))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = None
    ) -> "Dataset":
        """Returns the elements in a random order. All of them are shuffled, whatever the size of the buffer."""
        seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        is_small = len(self._dataset) <= _MOST_IN_MEMORY
        return Dataset(_shuffled(self._dataset, seed) if is_small else self._dataset.shuffle(seed=seed))

    def repeat(self, count: int | None = None) -> "Dataset":
        """Returns the elements several times; with None or -1, forever. A shuffled dataset gets another order each time."""
        # -1 is forever in tf.data, too.
        has_end = count is not None and count != -1
        return Dataset(self._dataset.repeat(arguments.integer("count", count) if has_end else None))

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_calls: int | None = None) -> "Dataset":
        """Returns batches of elements."""
        arguments.integer("batch_size", batch_size)
        return Dataset(self._dataset.batch(batch_size, drop_remainder=drop_remainder))

    def map(self, map_func: Callable[..., Any], num_parallel_calls: int | None = None) -> "Dataset":
        """Applies a function to each element. If the element is a pair, the function gets two arguments."""
        arguments.function("map_func", map_func, "dataset.map(lambda features, labels: ...)")
        return Dataset(self._dataset.map(lambda x: map_func(*x) if isinstance(x, tuple) else map_func(x)))

    def take(self, count: int) -> "Dataset":
        """Returns the first elements."""
        return Dataset(self._dataset[: arguments.integer("count", count, least=0)])

    def skip(self, count: int) -> "Dataset":
        """Returns the elements after the first ones."""
        return Dataset(self._dataset[arguments.integer("count", count, least=0) :])

    def shard(self, num_shards: int, index: int) -> "Dataset":
        """Returns every `num_shards`-th element, from `index` on."""
        arguments.integer("num_shards", num_shards)
        arguments.integer("index", index, least=0, most=num_shards - 1, kind=f"from 0 to {num_shards - 1}")
        return Dataset(self._dataset[index::num_shards])

    def prefetch(self, buffer_size: int) -> "Dataset":
        """Returns the dataset, because Phalanx always reads ahead."""
        return self

    def cache(self, filename: str = "") -> "Dataset":
        """Returns the dataset, because its arrays are in memory."""
        return self

    def make_one_shot_iterator(self) -> "OneShotIterator":
        """Returns an object whose `get_next()` an input function returns. Source: tf.compat.v1.data.make_one_shot_iterator."""
        return OneShotIterator(self)

    def __iter__(self) -> Iterator[Any]:
        import grain  # type: ignore[import-untyped]

        # The arrays are in memory, so that threads would only cost time.
        return iter(self._dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def __len__(self) -> int:
        return len(self._dataset)


@final
class OneShotIterator:
    """What an input function of TensorFlow 1 gets its batches from. May be created in any context.

    Args:
      dataset: the dataset.

    Source: tf.compat.v1.data.Iterator.

    Example:
      >>> from phalanx.estimator import tf1
      >>> def input_fn():
      ...     dataset = tf1.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [3, 4])).batch(2)
      ...     return dataset.make_one_shot_iterator().get_next()
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def get_next(self) -> Dataset:
        """Returns the dataset itself, for the input function to return. No graph runs it again for each batch."""
        return self._dataset


class experimental:  # noqa: N801  (as in TensorFlow)
    """Names of `tf.data.experimental`."""

    AUTOTUNE = AUTOTUNE


class _Rows:
    """Random access to the rows of arrays."""

    def __init__(self, arrays: PyTree, size: int) -> None:
        self._arrays, self._size = arrays, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> PyTree:
        return jax.tree.map(lambda x: x[index], self._arrays)


def _array(x: ArrayLike) -> np.ndarray:
    array = np.asarray(x)
    # TensorFlow's floats are single, unless a program says otherwise.
    return array.astype(np.float32) if array.dtype == np.float64 and isinstance(x, list) else array


def _shuffled(dataset: Any, seed: int) -> Any:
    """Returns a `grain.MapDataset` in a random order, another one in each epoch."""
    import grain

    size = len(dataset)

    @functools.lru_cache(2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(size)

    class Shuffled(grain.MapDataset):
        def __len__(self) -> int:
            return size

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                return self.slice(index)
            epoch, place = divmod(index, size)
            return dataset[epoch * size + int(order(epoch)[place])]

    return Shuffled(dataset)


def _source(rows: Any) -> Any:
    try:
        import grain  # type: ignore[import-untyped]
    except ImportError as e:
        raise MissingDependencyError(
            "tf1.data.Dataset",
            "it needs the library grain, which is not installed.",
            'pip install ".[data]" in a clone of Phalanx',
        ) from e
    return grain.MapDataset.source(rows)
