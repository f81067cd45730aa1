# SPDX-License-Identifier: Apache-2.0
"""What `fit`, `evaluate` and `predict` are given, as epochs of distributed batches."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax

from phalanx import compat
from phalanx.errors import InputError, OutOfRangeError
from phalanx.input.distributed import DistributedDataset, DistributedIterator
from phalanx.input.sources.base import UNKNOWN, Facts
from phalanx.input.sources.batches import BatchStream
from phalanx.strategies.base import Strategy


class EpochData:
    """The batches of a call of `fit`, `evaluate` or `predict`.

    Args:
      strategy: on whose replicas they are divided.
      x: what Keras takes, or a `DistributedDataset`.
      steps: how many batches make an epoch; None for all.
      group: how many batches are handed out at once.
      **data: what else Keras's data adapters take.
    """

    def __init__(self, strategy: Strategy, x: Any, *, steps: int | None, group: int, **data: Any) -> None:
        self._steps, self._group = steps, group
        self._iterator: DistributedIterator | None = None
        self._adapter: Any = None
        if isinstance(x, DistributedDataset):
            self._dataset = x
            return
        self._adapter = adapter = compat.data_adapter(x=x, steps_per_epoch=steps, **data)
        count = UNKNOWN if adapter.num_batches is None else adapter.num_batches
        batch_size, is_full = compat.size_of_batches(adapter)
        facts = Facts(batch_size=batch_size, is_full=is_full, num_batches=count)
        source = BatchStream(lambda: iter(adapter.get_numpy_iterator()), facts, copies=True)
        self._dataset = strategy.experimental_distribute_dataset(source)

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

    def epoch(self) -> Iterator[tuple[int, int, Any]]:
        """Yields the first step, the number of steps, and the batch or the stacked batches, of each group of an epoch."""
        if self._adapter is not None:
            self._adapter.on_epoch_begin()
        # Where an epoch is so many steps, the next one goes on where it ends.
        iterator = self._iterator or iter(self._dataset)
        done = 0
        while self._steps is None or done < self._steps:
            wanted = self._group if self._steps is None else min(self._group, self._steps - done)
            group = _next_group(iterator, self._group, wanted)
            if group is None:
                if self._steps is not None:
                    self._warn(done)
                break
            batches, count = group
            yield done, count, batches
            done += count
        self._iterator = iterator if self._steps is not None else None
        if self._adapter is not None:
            self._adapter.on_epoch_end()

    def _warn(self, done: int) -> None:
        warnings.warn(
            f"The data ended after {done} of {self._steps} steps of an epoch. HINT: .repeat() the dataset, or leave out steps_per_epoch.",
            stacklevel=4,
        )


def _next_group(iterator: DistributedIterator, room: int, wanted: int) -> tuple[Any, int] | None:
    try:
        return (iterator.get_next(), 1) if room == 1 else iterator.next_steps(wanted, room=room)
    except OutOfRangeError:
        return None
