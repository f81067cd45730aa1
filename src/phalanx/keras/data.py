# SPDX-License-Identifier: Apache-2.0
"""What `fit`, `evaluate` and `predict` are given, as epochs of distributed batches."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import keras

from phalanx import compat
from phalanx.errors import InputError, InvalidArgumentError, OutOfRangeError, arguments, shown
from phalanx.input.distributed import DistributedDataset
from phalanx.input.iterator import DistributedIterator
from phalanx.input.sources.base import UNKNOWN, Facts
from phalanx.input.sources.batches import BatchStream
from phalanx.input.sources.files import Files
from phalanx.input.sources.functions import InputContext
from phalanx.options import InputOptions
from phalanx.strategies.base import Strategy


@final
class DatasetCreator:
    """A function that makes a dataset, as an argument of `fit` and `evaluate`. May be made in any context.

    Args:
      dataset_fn: maps a `phalanx.InputContext` to a dataset of per-replica batches; called once for each input pipeline.
      input_options: those of `Strategy.distribute_datasets_from_function`.

    Raises:
      InvalidArgumentError: `dataset_fn` cannot be called, or `input_options` are none.

    Source: tf.keras.utils.experimental.DatasetCreator.

    Example:
      >>> import numpy as np, phalanx
      >>> creator = phalanx.keras.DatasetCreator(lambda context: [np.full((2, 3), context.input_pipeline_id)])
      >>> creator(phalanx.InputContext())[0].shape
      (2, 3)
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], input_options: InputOptions | None = None) -> None:
        if not callable(dataset_fn):
            raise InvalidArgumentError(
                f"DatasetCreator({shown(dataset_fn)})",
                "it cannot be called.",
                "DatasetCreator(lambda context: dataset)",
            )
        if not isinstance(input_options, (InputOptions, type(None))):
            raise InvalidArgumentError(
                f"input_options={shown(input_options)}", "they are no InputOptions.", "phalanx.InputOptions()"
            )
        self._dataset_fn, self.input_options = dataset_fn, input_options

    def __call__(self, context: InputContext) -> Any:
        """Returns the dataset for one input pipeline.

        Raises:
          InvalidArgumentError: `context` is not an InputContext.
        """
        arguments.instance("context", context, InputContext, "creator(phalanx.InputContext())")
        return self._dataset_fn(context)


class EpochData:
    """The batches of a call of `fit`, `evaluate` or `predict`.

    Args:
      strategy: on whose replicas they are divided.
      x: what Keras takes, a `DistributedDataset`, a `DatasetCreator`, or what `phalanx.data.from_files` returns.
      steps: how many batches make an epoch; None for all.
      group: how many batches are handed out at once.
      is_stacked: whether the batches of a group are stacked, for one program that takes them all.
      **data: what else Keras's data adapters take.
    """

    def __init__(
        self, strategy: Strategy, x: Any, *, steps: int | None, group: int, is_stacked: bool = True, **data: Any
    ) -> None:
        most = keras.config.max_steps_per_epoch()
        if most and (steps is None or steps > most):
            warnings.warn(f"Limiting steps_per_epoch to {most}", stacklevel=3)
            steps = most
        self._steps, self._group = steps, group
        self._stacked = group if is_stacked else 1
        self._iterator: DistributedIterator | None = None
        self._adapter: Any = None
        batched = _batched(strategy, x, data)
        self._dataset = self._of_keras(strategy, x, steps, data) if batched is None else batched
        self._dataset.require_same()

    def _of_keras(self, strategy: Strategy, x: Any, steps: int | None, data: dict[str, Any]) -> DistributedDataset:
        self._adapter = adapter = compat.data_adapter(x=x, steps_per_epoch=steps, **data)
        count = UNKNOWN if adapter.num_batches is None else adapter.num_batches
        batch_size, is_full = compat.size_of_batches(adapter)
        in_memory = compat.is_array_adapter(adapter)
        facts = Facts(
            batch_size=batch_size,
            is_full=is_full,
            num_batches=count,
            num_records=compat.num_rows(adapter) if in_memory else None,
            is_in_memory=in_memory,
            # A mean of the user's own sees as little padding as can be, and none where the replicas divide the batch.
            one_layout=False,
        )
        source = BatchStream(adapter.get_numpy_iterator, facts, copies=True)
        return strategy.experimental_distribute_dataset(source)

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, if that is known."""
        count = self._dataset.cardinality
        return self._steps or (None if count < 0 else count)

    @property
    def element_spec(self) -> Any:
        """The shapes of a batch."""
        if not compat.is_array_adapter(self._adapter):
            return self._dataset.element_spec
        # Keras draws a batch for this, and with it an order of the rows: the epochs are to have the same orders.
        batch = next(iter(self._adapter.get_numpy_iterator()), None)
        if batch is None:
            raise InputError("data without a row", "there is nothing to build the model with.", "at least one row")
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def restart(self) -> None:
        """Lets the next epoch begin with the first batch, where the data can be read again."""
        if not compat.goes_on(self._adapter):
            self._iterator = None

    def epoch(self) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
        """Yields the first step of each group of an epoch, and its parts: a batch, or stacked ones of a size, and how many."""
        if self._adapter is not None:
            self._adapter.on_epoch_begin()
        # Where an epoch is so many steps, the next one goes on where it ends; where the data end, from their beginning.
        goes_on, self._iterator = self._iterator, None
        iterator = goes_on or iter(self._dataset)
        done = 0
        while self._steps is None or done < self._steps:
            wanted = self._group if self._steps is None else min(self._group, self._steps - done)
            parts = list(_parts(iterator, self._stacked, wanted))
            if not parts and goes_on and not done:
                goes_on, iterator = None, iter(self._dataset)
                continue
            if not parts:
                break
            yield done, parts
            done += sum(count for _, count in parts)
        if done == self._steps:
            # Between two epochs Keras's own threads do not run, and nothing may be asked of them.
            iterator.stop_reading()
            self._iterator = iterator
        elif self._steps is not None:
            self._warn(done)
        if self._adapter is not None:
            self._adapter.on_epoch_end()

    def _warn(self, done: int) -> None:
        warnings.warn(
            f"The data ended after {done} of {self._steps} steps of an epoch. HINT: .repeat() the dataset, or leave out steps_per_epoch.",
            stacklevel=4,
        )


def _batched(strategy: Strategy, x: Any, data: dict[str, Any]) -> DistributedDataset | None:
    """Returns the batches of what is none of Keras's own kinds of data; None of those.

    Raises:
      InvalidArgumentError: it has its labels, weights and sizes of batches already, and they are given.
      InputError: it is an iterator.
    """
    if isinstance(x, DistributedIterator):
        raise InputError(
            "fit of a DistributedIterator",
            "it can be read once, an epoch needs a dataset.",
            "fit(dataset) without iter",
        )
    if not isinstance(x, (DistributedDataset, DatasetCreator, Files)):
        return None
    batch_size = data.pop("batch_size", None) if isinstance(x, Files) else None
    given = [name for name, value in data.items() if value is not None and name != "shuffle"]
    if given:
        raise InvalidArgumentError(
            f"{', '.join(given)} with a {type(x).__name__}",
            "its elements are (inputs, targets, sample_weight) already, in batches of its own.",
            "put them into the dataset",
        )
    if isinstance(x, DistributedDataset):
        return x
    if isinstance(x, DatasetCreator):
        return strategy.distribute_datasets_from_function(x, x.input_options)
    return strategy.experimental_distribute_dataset(x, batch_size=batch_size)


def _parts(iterator: DistributedIterator, room: int, wanted: int) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a group of so many steps; those of another size apart from the others."""
    while wanted:
        try:
            batches, count = (iterator.get_next(), 1) if room == 1 else iterator.next_steps(wanted, room=room)
        except OutOfRangeError:
            return
        yield batches, count
        wanted -= count
