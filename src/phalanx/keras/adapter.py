# SPDX-License-Identifier: Apache-2.0
"""Data that Keras's adapters read for `fit`, `evaluate` and `predict`: a source of batches, and its epochs."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import GeneratorType, NoneType
from typing import final

import jax
import numpy as np

from phalanx._src import compat
from phalanx._src.input.distributed import DistributedDataset
from phalanx._src.input.sources.base import UNKNOWN, Facts, Owner, no_array, to_host
from phalanx._src.input.sources.batches import BatchStream
from phalanx._src.input.sources.rows import ChosenRows
from phalanx._src.mesh.arrays import as_array, copied, is_sparse
from phalanx._src.strategies.base import Strategy
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InputError, shown
from phalanx.typing import PyTree


def adapter_of(x: PyTree, steps: int | None, data: dict[str, PyTree]) -> PyTree:
    """Returns Keras's adapter of any data that Keras accepts.

    Args:
      x: the data.
      steps: number of batches per epoch. None for all.
      data: further arguments of the adapter, such as `y` and `batch_size`.

    Raises:
      InputError: `x`, or its first batch, or `sample_weight` contains no array.
    """
    # JAX warns of a generator, and of other iterables.
    if isinstance(x, (NoneType, list, tuple, dict)) and not jax.tree.leaves(x):
        raise InputError(f"the data x={shown(x)}", "they contain no array.", "x: an array (rows, ...), or a dataset")
    weights = data.get("sample_weight")
    if isinstance(weights, (list, tuple, dict)) and not jax.tree.leaves(weights):
        raise InputError(f"sample_weight={shown(weights)}", "it contains no array.", "sample_weight=None")
    if isinstance(x, GeneratorType):
        # Keras reads two batches before it yields the first, and a generator may write both into the same arrays.
        x = compat.peeked(x, _kept)
    try:
        return compat.data_adapter(x=x, steps_per_epoch=steps, **data)
    except (AttributeError, IndexError, ValueError) as e:
        # Keras has begun to read a dataset of Grain, and its own errors do not name a batch without arrays.
        is_read_again = isinstance(x, Iterable) and not isinstance(x, Iterator) and not hasattr(x, "shape")
        if is_read_again and not jax.tree.leaves(batch := next(iter(x), None)):
            raise no_array("a batch", batch) from None
        if _is_dataset(x) and f"{e}".startswith(_NOT_READ):
            raise InputError(
                f"x={shown(x)} in fit, evaluate or predict",
                "Keras reads no data of this kind.",
                "x=strategy.experimental_distribute_dataset(x), with batch_size=64 if x has single rows",
            ) from None
        raise


_NOT_READ = (
    "Unrecognized data type",
    "Data cardinality is ambiguous",
    "When passing a dataset to a Keras model, the arrays must be",
)
"""How Keras's errors for data that it does not read begin."""


def _is_dataset(x: PyTree) -> bool:
    """Whether `experimental_distribute_dataset` may read data that Keras does not: batches, rows, or a function that returns an iterator."""
    if isinstance(x, (list, tuple)):
        return bool(x) and all(isinstance(batch, tuple) for batch in x)
    is_read_in_turn = isinstance(x, Iterable) or all(hasattr(x, name) for name in ("__len__", "__getitem__"))
    return callable(x) or (is_read_in_turn and not isinstance(x, (dict, str, bytes)) and not hasattr(x, "shape"))


@final
class AdaptedData:
    """The data of one of Keras's adapters.

    Args:
      adapter: what `adapter_of` returns. None if Keras does not read the data: its epochs then have no beginning and no end.
    """

    def __init__(self, adapter: PyTree) -> None:
        self._adapter = adapter
        self._open: PyTree = None  # The adapter that is within an epoch.
        # Keras asks for it here and when it resets the data. A PyDataset may have more at the next end of an epoch.
        self._num_batches: int | None = None if adapter is None else adapter.num_batches

    def __bool__(self) -> bool:
        return self._adapter is not None

    @property
    def is_read_once(self) -> bool:
        """Whether a new iterator continues where the last one stopped, as for a generator."""
        return compat.goes_on(self._adapter)

    @property
    def draws_while_reading(self) -> bool:
        """Whether an order is drawn for each batch, not only for each epoch."""
        return compat.draws_while_reading(self._adapter)

    def distribute(self, strategy: Strategy) -> DistributedDataset:
        """Returns the dataset of the adapter's batches, for the replicas of a strategy."""
        adapter = self._adapter
        count = UNKNOWN if adapter.num_batches is None else adapter.num_batches
        batch_size, is_full = compat.size_of_batches(adapter)
        owner = Owner.NOBODY if compat.makes_arrays(adapter) else Owner.UNTIL_READ
        facts = Facts(batch_size=batch_size, is_full=is_full, num_batches=count, owner=owner)
        if compat.is_array_adapter(adapter):
            return strategy.experimental_distribute_dataset(self._of_arrays(facts))
        batches = self._counted(compat.raw_batches(adapter))
        return strategy.experimental_distribute_dataset(BatchStream(batches, replace(facts, is_begun=True)))

    def _of_arrays(self, facts: Facts) -> BatchStream:
        batches = compat.ArrayBatches(self._adapter, _checked, ChosenRows, to_host)
        rows = compat.num_rows(self._adapter)
        facts = replace(facts, num_records=rows, is_in_memory=True, owner=Owner.CALLER)
        # Ready, because `_checked` and `to_host` have converted all leaves already: arrays once, not once per batch.
        return BatchStream(self._counted(batches), facts, is_ready=True)

    def _counted(self, make: Callable[[], Iterator[PyTree]]) -> Callable[[], Iterator[PyTree]]:
        """Returns a function like `make`, whose iterators have the batches of one epoch."""
        return lambda: itertools.islice(make(), self._num_batches)

    def spec(self) -> PyTree:
        """Returns shapes and dtypes of a global batch, from the first batch of an epoch. None if no batch can be read beforehand.

        Keras begins an epoch to build the model, reads one batch, and ends the epoch. That draws one random order of the rows. The
        same is done here, so that the epochs have the same orders as in Keras. `end_pass` ends the epoch.

        Raises:
          InputError: there are no rows.
        """
        if not compat.has_epochs(self._adapter):
            return None
        self._begin(compat.separate(self._adapter))
        batch = next(iter(self._open.get_numpy_iterator()), None)
        if batch is None:
            raise InputError(
                "fit, evaluate or predict on data without rows",
                "the shapes for building the model are unknown.",
                "pass at least one row",
            )
        return jax.tree.map(lambda x: shape_dtype(x.shape, x.dtype), batch)

    def begin_epoch(self) -> None:
        """Tells the data that an epoch begins."""
        self._begin(self._adapter)

    def _begin(self, adapter: PyTree) -> None:
        if adapter is not None:
            adapter.on_epoch_begin()
            self._open = adapter

    def end_epoch(self) -> None:
        """Tells the data that the epoch has ended, if one has begun."""
        adapter, self._open = self._open, None
        if adapter is not None:
            adapter.on_epoch_end()

    def begin_again(self) -> None:
        """Makes the next iterator begin with the first batch, after one that was left in the middle."""
        compat.begin_again(self._adapter)

    def end_pass(self) -> None:
        """Tells the data that an epoch has ended, even if none has begun, as Keras does: some data is shuffled by that."""
        # The adapter of `spec`, if it is open: its threads end with its epoch, and the dataset is told once.
        self._open = self._open or self._adapter
        if self._adapter is not None:
            self._num_batches = self._adapter.num_batches
        self.end_epoch()


def _checked(array: PyTree) -> PyTree:
    """Returns an array with all rows as one that JAX can hold. Text and objects are refused when they are read."""
    usual = as_array(array, "fit, evaluate or predict on an array")
    return array if usual is None else usual


def _kept(batch: PyTree) -> PyTree:
    """Returns a batch of a generator, in memory to which the generator does not write again."""

    def kept(leaf: PyTree) -> PyTree:
        array = as_array(leaf)
        return leaf if array is None or isinstance(leaf, np.generic) else copied(array)

    return jax.tree.map(kept, batch, is_leaf=is_sparse)
