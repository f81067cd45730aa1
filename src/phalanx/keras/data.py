# SPDX-License-Identifier: Apache-2.0
"""Turns the data arguments of `fit`, `evaluate` and `predict` into epochs of distributed batches."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, final

import jax
import keras
import numpy as np

from phalanx._src.input.distributed import DistributedDataset
from phalanx._src.input.iterator import DistributedIterator
from phalanx._src.input.order import Order, generators, set_generators
from phalanx._src.input.sources.base import INFINITE, AbstractRows, State
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.options import InputOptions
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.strategies.base import Strategy
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InputError, InvalidArgumentError, OutOfRangeError, arguments, listed, shown, warn_of_slip
from phalanx.keras.adapter import AdaptedData, adapter_of
from phalanx.typing import PyTree

_NO_ORDER: State = {}
_NOT_NOTED = bytes(8).hex()


@final
class DatasetCreator:
    """A function that creates a dataset, as the argument `x` of `fit` or `evaluate`. May be created in any context.

    Args:
      dataset_fn: maps a `phalanx.InputContext` to a dataset of per-replica batches. Called once per input pipeline.
      input_options: options of `Strategy.distribute_datasets_from_function`.

    Raises:
      InvalidArgumentError: `dataset_fn` is not callable, or `input_options` are not `phalanx.InputOptions`.

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
                "dataset_fn is not callable.",
                "DatasetCreator(lambda context: dataset)",
            )
        if not isinstance(input_options, (InputOptions, type(None))):
            raise InvalidArgumentError(
                f"input_options={shown(input_options)}",
                "must be InputOptions or None.",
                "input_options=phalanx.InputOptions()",
            )
        self._dataset_fn, self.input_options = dataset_fn, input_options

    def __call__(self, context: InputContext) -> PyTree:
        """Returns the dataset of one input pipeline.

        Args:
          context: index and number of the input pipeline, for `dataset_fn`.

        Raises:
          InvalidArgumentError: `context` is not an InputContext.
        """
        arguments.instance("context", context, InputContext, "creator(phalanx.InputContext())")
        return self._dataset_fn(context)


class EpochData:
    """The batches of one call of `fit`, `evaluate` or `predict`.

    Args:
      strategy: the strategy whose replicas share each batch.
      x: any data that Keras accepts, a `DistributedDataset`, a `DatasetCreator`, or the result of `phalanx.data.from_files`.
      steps: number of batches per epoch. None for all.
      group: number of batches per execution, as in `compile(steps_per_execution=...)`.
      is_stacked: whether the batches of a group are stacked, for one program that runs them all.
      fresh: see `Order`.
      **data: further arguments of Keras's data adapters, such as `y` and `batch_size`.

    Attributes:
      group: number of batches of the next execution.
      stacked: number of them that one program runs.

    Raises:
      InputError: the data is known to be endless, and `steps` is None.
    """

    def __init__(
        self,
        strategy: Strategy,
        x: PyTree,
        *,
        steps: int | None,
        group: int,
        is_stacked: bool = True,
        fresh: IdentityMap[State] | None = None,
        **data: PyTree,
    ) -> None:
        most = keras.config.max_steps_per_epoch()
        if most and (steps is None or steps > most):
            warnings.warn(f"Limiting steps_per_epoch to {most}", stacklevel=3)
            steps = most
        self._steps, self.group = steps, group
        self.stacked = group if is_stacked else 1
        self._iterator: DistributedIterator | None = None
        self._is_empty, self._is_used_up = True, False
        self._reads_beside = False
        # For `get_state`: steps of the epoch so far, the iterator they came from, and what decided the order before the epoch in which it
        # was created.
        self._reading: DistributedIterator | None = None
        self._done, self._opened = 0, _NO_ORDER
        # The same before the present group of steps, for a group that fails.
        self._before: tuple[int, State] = (0, {})
        self._restored: State | None = None
        batched = _batched(strategy, x, data)
        self._adapted = AdaptedData(adapter_of(x, steps, data) if batched is None else None)
        self._dataset = self._adapted.distribute(strategy) if batched is None else batched
        self._dataset.note_first()
        self._order = Order(x, fresh) if batched is None else batched.order
        # The adapter's number of batches is None for endless data, but also for a generator, which may end.
        is_endless = isinstance(x, keras.utils.PyDataset) and x.num_batches is None
        if steps is None and (is_endless or self._dataset.cardinality == INFINITE):
            raise InputError(
                "fit, evaluate or predict on endless data, without a number of steps",
                "the first epoch would never end.",
                "fit(dataset, steps_per_epoch=100); steps=100 in evaluate and predict",
            )

    def read_beside(self) -> None:
        """Allows a thread to read data in memory alongside the steps. The caller promises that nobody writes to them during an epoch."""
        # Such data draws from NumPy's global generator, whose state would depend on how far a thread has read.
        self._reads_beside = not self._adapted.draws_while_reading

    @property
    def num_batches(self) -> int | None:
        """The number of batches per epoch; None if it is unknown."""
        count = self._dataset.cardinality
        return self._steps or (None if count < 0 else count)

    def require_batch(self, method: str) -> None:
        """Checks that an epoch has had a batch.

        Raises:
          InvalidArgumentError: there was none.
        """
        if self._is_empty:
            raise InvalidArgumentError(f"{method} without a batch", "the data is empty.", "pass at least one row")

    @property
    def num_groups(self) -> int | None:
        """The number of groups per epoch that `epoch` yields at most; None if it is unknown."""
        return self.num_batches and -(-self.num_batches // self.group)

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a global batch: a pytree of `jax.ShapeDtypeStruct`."""
        spec = self._adapted.spec()
        if spec is None:
            replicas = self._dataset.topology.num_replicas
            spec = jax.tree.map(lambda x: _of_all(x, replicas), self._dataset.next_spec)
        return spec

    def restart(self) -> None:
        """Makes the next epoch begin with the first batch, unless the data can be read only once.

        As in Keras, this ends an epoch of the data even if none has begun: some data is shuffled by that.
        """
        if self._reading is not None:
            self._reading.stop_reading()
        self._adapted.end_pass()
        if not self._adapted.is_read_once:
            self._iterator = None

    def epoch(self) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
        """Yields the groups of one epoch.

        Yields:
          The index of the first step of the group, and the parts of the group: pairs of a batch, or a stack of batches of
          equal size, and its number of steps.
        """
        if self._is_used_up:
            warn_of_slip(
                "The generator ended in an earlier epoch, so this epoch has at most the two batches that Keras looked at beforehand.",
                "strategy.experimental_distribute_dataset(rows), where rows is the function that returns the generator; or a "
                "keras.utils.PyDataset",
            )
        # With `steps_per_epoch`, an epoch continues where the last one ended, and starts over at the end of the data.
        restored = self._begin_epoch()
        # Set again after the last step only: after an error or a `break`, the next epoch opens the data again.
        goes_on, self._iterator = self._iterator, None
        done = self._done if restored else 0
        iterator = goes_on or self._new_iterator()
        iterator.expect(self._left(done))
        self._reading = iterator
        self._require_same_order(iterator)
        while self._steps is None or done < self._steps:
            num_steps = self.group if self._steps is None else min(self.group, self._steps - done)
            self._before = done, iterator.position
            parts = list(_parts(iterator, self.stacked, num_steps))
            # The last epoch ended exactly at the end of the data.
            if not parts and goes_on and not done:
                goes_on, iterator = None, self._new_iterator()
                iterator.expect(self._left(done))
                self._reading = iterator
                continue
            if not parts:
                break
            # Before `yield`, because callbacks save the position while this generator is suspended there.
            self._done, self._is_empty = done + steps_in(parts), False
            yield done, parts
            done = self._done
        if done == self._steps:
            # Keras stops the threads of a `PyDataset` in `on_epoch_end`. A Phalanx thread that waits for them would hang.
            iterator.stop_reading()
            self._iterator = iterator
        elif self._steps is not None:
            self._warn(done)
        else:
            self._is_used_up = self._adapted.is_read_once
        # None at the end of the data: the position is then what decides the order of the next epoch.
        self._done, self._reading = 0, self._iterator
        self._adapted.end_epoch()

    def _new_iterator(self) -> DistributedIterator:
        self._opened = self._order.before_epoch
        iterator = iter(self._dataset)
        if self._reads_beside:
            iterator.read_beside()
        return iterator

    def _left(self, done: int) -> int | None:
        """Returns how many steps of the epoch are left. A later epoch, or another caller, may read the next batch."""
        return None if self._steps is None else self._steps - done

    @property
    def is_within_epoch(self) -> bool:
        """Whether the next epoch continues in the middle."""
        return self._restored is not None and bool(self._restored["done"])

    def get_state(self, *, undone: bool = False) -> State:
        """Returns the position: the number of steps of the epoch, that of the iterator, if there is one, and what decides the order.

        Args:
          undone: whether the present group of steps does not count.
        """
        if self._restored is not None:
            return self._restored
        if self._reading is None:
            return {"done": self._done, "iterator": None, "order": self._order.take(), "first": ""}
        done, position = self._before if undone else (self._done, None)
        position = self._reading.get_state() if position is None else self._reading.state_at(position)
        # The order before the iterator was opened: a new iterator draws it again and skips to the position.
        return {"done": done, "iterator": position, "order": self._opened, "first": self._dataset.first.hex()}

    def get_order(self) -> State:
        """Returns the position at the beginning of the present epoch, or between two epochs."""
        if self._restored is not None:
            order = self._restored["order"]
        else:
            order = self._order.take() if self._reading is None else self._opened
        return {"done": 0, "iterator": None, "order": order, "first": ""}

    @property
    def is_agreed(self) -> bool:
        """See `DistributedDataset.is_agreed`."""
        return self._dataset.is_agreed

    def move(self) -> None:
        """Begins to read again, for the replicas that the strategy has now. Set the state after it.

        Raises:
          InputError: the data can be read only once.
        """
        if self._adapted.is_read_once:
            raise InputError(
                "fit of a generator in a group whose processes have changed",
                "a generator can be read only once, and the steps since the last copy must be repeated.",
                "keras.utils.PyDataset, arrays, or a Grain dataset",
            )
        if self._reading is not None:
            self._reading.stop_reading()
        self._adapted.end_epoch()
        self._adapted.begin_again()
        self._iterator, self._reading = None, None

    def set_state(self, state: State) -> None:
        """Makes the next epoch continue from a position.

        Raises:
          InputError: the position belongs to other data.
        """
        # Now, and not when the epoch begins: a restore of a checkpoint then has changed nothing yet.
        if state["iterator"] is not None:
            self._dataset.require_position(state["iterator"])
        self._restored = state

    def _begin_epoch(self) -> bool:
        """Begins an epoch, at the position that `set_state` has set. Returns whether there was one."""
        state, self._restored = self._restored, None
        if state is None:
            (self._order if self._adapted else self._dataset).begin_epoch()
            self._adapted.begin_epoch()
            return False
        now = generators()
        self._order.restore(state["order"])
        self._done = state["done"]
        if state["iterator"] is None:
            set_generators(now)
        self._order.begin_epoch()
        self._adapted.begin_epoch()
        if state["iterator"] is not None:
            # Keras draws the order when the epoch begins, or when it reads the first batch, so draw it again.
            self._iterator = self._new_iterator()
            if not self._adapted:
                self._order.restore(state["order"])  # The new iterator may have opened the data already.
            self._iterator.set_state(state["iterator"])
            self._iterator.expect(self._left(self._done))
            self._iterator.look(0)
            # The generators stay where the batches that were skipped have moved them, because those that follow may draw too.
            if state["first"] not in (_NOT_NOTED, self._dataset.first.hex()):
                self._begin_again()
        return True

    def _begin_again(self) -> None:
        """Reads an epoch from its beginning, because its rest cannot be told from what was read of it."""
        assert self._iterator is not None
        warn_of_slip(
            f"The data has another order than when its position was saved after {self._done} steps of an epoch"
            + ("." if self._adapted.is_read_once else ", so the epoch begins again."),
            "get_state() and set_state(state) in the dataset, which say what decides its order",
        )
        if not self._adapted.is_read_once:
            self._iterator.stop_reading()
            self._adapted.begin_again()
            self._iterator, self._done = self._new_iterator(), 0

    def _require_same_order(self, iterator: DistributedIterator) -> None:
        """Checks that all workers read the same first batch, because each keeps its part of it. It stays the next one, even after the loss of a worker.

        Raises:
          InputError: they have read different ones.
        """
        topology = self._dataset.topology
        if self._dataset.is_agreed or topology.num_workers == 1:
            return
        iterator.look(0)
        # `look` has read the batch, so `first` is its digest. JAX has no 64 bits unless `jax_enable_x64` is set.
        digests = topology.exchange(np.frombuffer(self._dataset.first, np.uint32))
        ranks = [str(rank) for rank, digest in enumerate(digests) if (digest != digests[0]).any()]
        if ranks:
            raise InputError(
                f"fit, evaluate or predict on {topology.num_workers} workers",
                f"the first batch of rank{'s' * (len(ranks) > 1)} {listed(ranks)} is not that of rank 0, so the workers would mix the rows of "
                "different batches.",
                "the same data, in the same order, on all workers; keras.utils.set_random_seed(1) with the same number on all, because the "
                "seed decides how fit shuffles; get_state() and set_state(state) in a dataset that shuffles itself, for workers that join later",
            )

    def _warn(self, done: int) -> None:
        warn_of_slip(
            f"The data ended after {done} of {self._steps} steps of an epoch.",
            "dataset.repeat(), or omit steps_per_epoch",
        )


def _of_all(spec: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the rows of all replicas, from those of one replica."""
    return shape_dtype((spec.shape[0] * replicas, *spec.shape[1:]), spec.dtype) if spec.shape else spec


def _batched(strategy: Strategy, x: PyTree, data: dict[str, Any]) -> DistributedDataset | None:
    """Returns the distributed dataset for data that only Phalanx supports, or None for data that Keras reads.

    Raises:
      InvalidArgumentError: labels, weights or a batch size are passed besides `x`, which already contains them.
      InputError: `x` is an iterator.
    """
    if isinstance(x, DistributedIterator):
        raise InputError(
            "fit of a DistributedIterator",
            "an iterator can be read only once, but each epoch reads the data again.",
            "fit(dataset) instead of fit(iter(dataset))",
        )
    if not isinstance(x, (DistributedDataset, DatasetCreator, AbstractRows)):
        return None
    # Rows in files are not batched yet, so `fit` may say the batch size.
    batch_size = data.pop("batch_size", None) if isinstance(x, AbstractRows) else None
    # `fit` passes shuffle=True by default, so it does not show what the user wants.
    names = [name for name, value in data.items() if value is not None and name != "shuffle"]
    if names == ["batch_size"]:
        raise InvalidArgumentError(
            f"batch_size with a {type(x).__name__}", "the dataset already has its batches.", "omit batch_size in fit"
        )
    if names:
        raise InvalidArgumentError(
            f"{', '.join(names)} with a {type(x).__name__}",
            "the dataset already yields batches of (inputs, targets, sample_weight).",
            "make them part of the elements of the dataset",
        )
    if isinstance(x, DistributedDataset):
        return x
    if isinstance(x, DatasetCreator):
        return strategy.distribute_datasets_from_function(x, x.input_options)
    return strategy.experimental_distribute_dataset(x, batch_size=batch_size)


# Runs at every step. `map` of an `itemgetter` calls no Python function.
_COUNT = itemgetter(1)


def steps_in(parts: Sequence[tuple[Any, int]]) -> int:
    """Returns the number of steps of a group that `EpochData.epoch` yields."""
    return sum(map(_COUNT, parts))


def _parts(iterator: DistributedIterator, room: int, num_steps: int) -> Iterator[tuple[Any, int]]:
    """Yields the parts of a group: stacks of batches of equal size with their numbers of steps.

    Args:
      iterator: the iterator to read.
      room: number of steps that a stack has room for. 1 for batches that are not stacked.
      num_steps: number of steps of the group.
    """
    while num_steps:
        try:
            # The room is the same for the last, shorter stack, so that it needs no other program.
            batches, count = (iterator.get_next(), 1) if room == 1 else iterator.next_steps(num_steps, room=room)
        except OutOfRangeError:
            return
        yield batches, count
        num_steps -= count
