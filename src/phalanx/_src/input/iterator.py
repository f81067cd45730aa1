# SPDX-License-Identifier: Apache-2.0
"""The iterator of a distributed dataset, which places batches on the devices and can save its position."""

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, final

import jax
import numpy as np
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.input import state as positions
from phalanx._src.input.feed import AbstractBatches, Batch, Feed, Form, ReadAhead, Step
from phalanx._src.input.landing import Landed, Landing
from phalanx._src.input.lockstep import Lockstep
from phalanx._src.input.placement import Placement
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sharding import Plan
from phalanx._src.input.sources.base import Owner, Piece, State, stack
from phalanx._src.input.sources.rows import read
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import is_distributed, spec_of
from phalanx._src.options import InputOptions
from phalanx._src.runtime.observers import observers
from phalanx._src.tracing.draws import AbstractIterator
from phalanx._src.tracing.scope import innermost, program_scope
from phalanx._src.typed_jax import OpenSpec
from phalanx.errors import ContextError, InputError, OutOfRangeError, arguments
from phalanx.errors.frames import user_place
from phalanx.typing import PyTree

T = TypeVar("T")

_MOST_STEPS = 2**31 - 1

_unused: ContextVar[frozenset[int]] = ContextVar("phalanx_unused", default=frozenset())


@contextmanager
def not_yet_used(values: PyTree) -> Iterator[None]:
    """Returns a context in which iterators give the position before their last batch, if that batch is among `values`."""
    token = _unused.set(_ids(values))
    try:
        yield
    finally:
        _unused.reset(token)


@final
class Optional(Generic[T]):
    """A batch that may be missing, as `DistributedIterator.get_next_as_optional` returns it. May be used in any context.

    Args:
      value: a tuple that holds the batch, or an empty tuple if there is none.

    Source: tf.experimental.Optional.

    Example:
      >>> Optional((1,)).has_value(), Optional(()).has_value()
      (True, False)
    """

    def __init__(self, value: tuple[T] | tuple[()]) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Returns whether there is a batch."""
        return bool(self._value)

    def get_value(self) -> T:
        """Returns the batch.

        Raises:
          OutOfRangeError: there is no batch.
        """
        if not self._value:
            raise OutOfRangeError("Optional.get_value()", "the optional has no value.", "if optional.has_value():")
        return self._value[0]


@final
class DistributedIterator(AbstractIterator):
    """One iteration over a `DistributedDataset`. `iter(dataset)` creates it.

    A background thread reads ahead until the iterator is exhausted or dropped.

    May be used outside traced steps, with the batch as an argument of the step, or inside a `phalanx.function`. Each call
    of such a function takes as many batches as the function took when it was traced. A call that raises, for example
    because too few batches are left, takes none.

    Args:
      plan: which worker reads which rows.
      topology: devices of the replicas. If it has no devices, batches are not placed.
      options: how the dataset is read.
      steps: number of global batches that are stacked into one. None for no stacking.

    Example:
      >>> import numpy as np, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> iterator = iter(strategy.experimental_distribute_dataset(np.arange(8), batch_size=4))
      >>> _ = next(iterator)
      >>> iterator.get_state()
      {'records': 4, 'data': {'rows': 8}}
    """

    def __init__(self, plan: Plan, topology: Topology, options: InputOptions, *, steps: int | None) -> None:
        self._reads_beside = False
        # The number of steps that will still be taken. None if it is unknown.
        self._expected: int | None = None
        self._plan, self._topology, self._options, self._form = plan, topology, options, Form(steps)
        # Before `worker_of`, which takes the weights of the replicas from the shares.
        topology.shares.adapt(topology.local_replicas, topology.exchange)
        self._worker = worker_of(topology)
        self._state: State
        self._batches: AbstractBatches
        # Batches in the form `self._form` that `look` has read and no call has returned yet.
        self._seen: deque[Batch] = deque()
        # The last batch that the user took, with the position before it. See `not_yet_used`.
        self._last: tuple[PyTree, State] | None = None
        self._open(None)

    def __iter__(self) -> "DistributedIterator":
        require_outside_programs("a loop over an iterator")
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch.

        Raises:
          StopIteration: there is no further batch.
          OutOfRangeError: there is no further batch, in a `phalanx.function`.
          ContextError: called in a replica function, or in the body of a loop.
          InputError: the data cannot be split.
        """
        if compat.lift_scope() is not None:
            return self._drawn(is_optional=False)[0]
        batch = self._next(self._form)
        if batch is None:
            raise StopIteration
        return batch.value

    def get_next(self) -> PyTree:
        """Returns the next batch, like `next(iterator)`.

        Raises:
          OutOfRangeError: there is no further batch.
        """
        try:
            return next(self)
        except StopIteration:
            raise _at_end("iterator.get_next()") from None

    def get_next_as_optional(self) -> Optional[Any]:
        """Returns the next batch as an `Optional`, which has no value at the end of the data.

        In a `phalanx.function`, `has_value()` is a Python bool, because the call that finds no batch is traced separately.
        """
        if compat.lift_scope() is not None:
            return Optional(self._drawn(is_optional=True))
        batch = self._next(self._form)
        return Optional(() if batch is None else (batch.value,))

    def next_steps(self, steps: int, *, room: int | None = None) -> tuple[Any, int]:
        """Returns the next batches, stacked. `Strategy.run_steps` calls it.

        Args:
          steps: largest number of batches to stack.
          room: number of steps that the stack has room for, full or not. None for `steps`.

        Returns:
          The stack, and the number of batches in it. The number is less than `steps` at the end of the data, or before a
          batch of another size.

        Raises:
          OutOfRangeError: there is no further batch.
        """
        require_outside_programs("Strategy.run_steps")
        batch = self._next(Form(steps, room or steps))
        if batch is None:
            raise _at_end("the next steps of an iterator")
        return batch.value, len(batch.steps)

    def next_alike(self, steps: int) -> list[Any]:
        """Returns up to `steps` batches as a list, which ends before a batch of another size.

        `Strategy.run_steps` calls it if the steps cannot be compiled into one program.

        Raises:
          OutOfRangeError: there is no further batch.
        """
        require_outside_programs("Strategy.run_steps")
        batches: list[Any] = []
        while len(batches) < steps and (batch := self._read(Form())) is not None:
            if batches and _shapes(batch.value) != _shapes(batches[0]):
                self._put_back(batch, Form())
                break
            batches.append(batch.value)
            # The position moves only past batches that are returned, not past the one that was put back.
            self._take(batch)
        if not batches:
            raise _at_end("the next steps of an iterator")
        return batches

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of one replica's part of a batch: a pytree of `jax.ShapeDtypeStruct`.

        The number of rows is None if it may differ between batches or replicas. Looks at the next batch, which stays the next one.

        Raises:
          InputError: there is no further batch.
        """
        spec, worker, facts = self.next_spec, self._worker, self._plan.source.facts
        if facts.is_full and (facts.batch_size or 0) % worker.num_replicas == 0 and not worker.weights:
            return spec
        # A stack may have fewer steps too.
        num_dims = 1 if self._form.steps is None else 2
        return jax.tree.map(lambda x: OpenSpec((None,) * len(x.shape[:num_dims]) + x.shape[num_dims:], x.dtype), spec)

    @property
    def next_spec(self) -> PyTree:
        """Shapes and dtypes of one replica's part of the next batch, which stays the next one.

        Raises:
          InputError: there is no further batch.
        """
        batch = self.look(0)
        if batch is None:
            raise InputError("element_spec", "the dataset has no further batch.", "use a dataset that is not empty")
        return jax.tree.map(spec_of, batch[0], is_leaf=is_distributed)

    @override
    def look(self, index: int) -> tuple[Any] | None:
        while len(self._seen) <= index:
            batch = self._get(self._form)
            if batch is None:
                return None
            self._seen.append(batch)
        return (self._seen[index].value,)

    @override
    def advance(self, count: int) -> None:
        for _ in range(count):
            if self._next(self._form) is None:
                return

    def get_state(self) -> State:
        """Returns the position after the last batch that the user took. All workers must call it.

        Batches that were only read ahead do not count. The position belongs to the dataset, not to the devices: with
        AutoShardPolicy DATA or FILE, another number of workers and replicas can continue from it.

        Returns:
          A dict of numbers, strings, lists and dicts.
        """
        state = self._state
        if (unused := _unused.get()) and self._last is not None and unused & _ids(self._last[0]):
            state = self._last[1]
        return self.state_at(state)

    @property
    def position(self) -> State:
        """The position after the last batch that the user took, as this worker alone knows it, for `state_at`."""
        return self._state

    def state_at(self, position: State) -> State:
        """Returns the result of `get_state` when `position` was the position. All workers must call it."""
        state = positions.marked(position, self._plan.source.facts)
        return positions.of_all_workers(state, self._topology.exchange_input) if self._plan.agreed else state

    def set_state(self, state: State) -> None:
        """Moves to a position. All workers must call it.

        Args:
          state: result of `get_state` of this iterator, or of another iterator over the same data.

        Raises:
          InputError: `state` is not a position, or belongs to other data: another kind of dataset or number of rows.
        """
        state = positions.of_worker(state, self._worker.index, self._worker.count)
        state = positions.unmarked(state, self._plan.source.facts)
        self._plan = self._plan.at(state)
        self._batches.stop()
        self._open(state)
        self._seen.clear()
        self._last = None

    def stop_reading(self) -> None:
        """Stops reading ahead until the next batch is requested. Batches that were read are not lost."""
        self._batches.stop()

    def expect(self, steps: int | None) -> None:
        """Announces how many further batches will be taken, so that no others are read. None if it is unknown."""
        self._expected = steps

    def _open(self, state: State | None) -> None:
        reader = self._plan.source.open(self._worker, self._plan.policy, state)
        self._state = reader.get_state()
        ahead, fetches = self._options.experimental_per_replica_buffer_size, self._options.fetches_to_device
        facts, place, landing = self._plan.source.facts, _unplaced, None
        # The default strategy yields the user's own arrays without copying them, if the user's code does not write to them again.
        if not self._topology.has_devices and facts.owner is Owner.UNTIL_READ:
            landing = Landing(facts.owner, self._topology.pool, fits_devices=False)
        if self._topology.has_devices:
            landing = Landing(facts.owner, self._topology.pool, fits_devices=fetches)
            place = Placement(self._topology, self._worker, landing, fetches=fetches).place
        if self._worker.count > 1 and not facts.is_in_memory:
            # Also under DATA, although all workers then end at the same step: if the data of one worker fails, the
            # others must be told before they wait for that worker in a collective.
            exchange = self._topology.exchange_input
            # The code of a caller who owns the arrays runs between two requests.
            in_thread = ahead > 0 and facts.owner is not Owner.CALLER
            self._batches = Lockstep(Feed(reader, landing), place, self._worker, exchange, ahead=in_thread)
        else:
            # The default strategy places nothing, and a dataset that runs on the device is not prefetched to it.
            here = not self._topology.has_devices or self._options.experimental_place_dataset_on_device
            waits = self._topology.num_workers > 1  # See `Turn`: the steps of several processes run one at a time.
            self._batches = ReadAhead(Feed(reader, landing), place, 0 if here else ahead, facts, waits=waits)
            if self._reads_beside:
                self._batches.read_beside()

    def read_beside(self) -> None:
        """Allows a thread to read data in memory ahead. The caller promises that until `stop_reading` nobody writes to them."""
        self._reads_beside = True
        if isinstance(self._batches, ReadAhead):
            self._batches.read_beside()

    def _next(self, form: Form) -> Batch | None:
        batch = self._read(form)
        if batch is not None:
            self._last = (batch.value, self._state) if form is self._form else None
            self._take(batch)
        return batch

    def _take(self, batch: Batch) -> None:
        self._state = batch.state or self._state
        if self._expected is not None:
            self._expected = max(0, self._expected - len(batch.steps))

    def _read(self, form: Form) -> Batch | None:
        if self._worker.count > 1:
            self._topology.require_peers()
        if self._seen:
            if form == self._form:
                return self._seen.popleft()
            # Another form is wanted, for example by `run_steps`. The last batch goes back first, to keep the order.
            while self._seen:
                self._batches.put_back(self._seen.pop())
        return self._get(form)

    def _get(self, form: Form) -> Batch | None:
        most = None if self._expected is None else max(1, self._expected - len(self._seen))
        if not observers.of_waits:
            return self._batches.get(form, most)
        began_s = time.monotonic()
        batch = self._batches.get(form, most)
        for observer in observers.of_waits:
            observer.after_wait(began_s, time.monotonic())
        return batch

    def _put_back(self, batch: Batch, form: Form) -> None:
        """Takes back the batch that `_read` returned last, in the form `form`."""
        if form == self._form:
            self._seen.appendleft(batch)
        else:
            self._batches.put_back(batch)

    def _drawn(self, *, is_optional: bool) -> PyTree:
        """Returns a tuple with the next batch as an input of the program being traced, or an empty tuple at the end."""
        return program_scope().draw(self, is_optional=is_optional) or ()


def check_steps(steps: object) -> int:
    """Returns `steps`, a number of steps.

    Raises:
      InvalidArgumentError: `steps` is not a positive integer below 2**31.
    """
    return arguments.integer("steps", steps, most=_MOST_STEPS, kind="an integer of at least 1", hint="steps=16")


def worker_of(topology: Topology) -> InputWorker:
    """Returns the position of this process among the workers."""
    index, workers = topology.input_index, topology.input_workers
    is_first = topology.worker_index == workers[index]
    return InputWorker(
        index, len(workers), len(topology.local_replicas), tuple(topology.shares.weights), is_first=is_first
    )


def _unplaced(steps: Sequence[Step], room: int | None) -> PyTree:
    """Returns the batch without placing it, for the default strategy."""
    wholes = [jax.tree.map(functools.partial(_rows_of, step.piece), step.piece.parts[0]) for step in steps]
    return wholes[0] if room is None else stack(wholes, len(wholes))


def _rows_of(piece: Piece, leaf: PyTree) -> PyTree:
    return leaf[: piece.counts[0]] if isinstance(leaf, Landed) else read(leaf)


def require_outside_programs(call: str) -> None:
    """Checks that no step is being traced.

    Args:
      call: the call for the error message.

    Raises:
      ContextError: a step is being traced.
    """
    if innermost() is not None:
        raise ContextError(
            f"{call} in a traced step",
            f"the loop at {user_place()} would be unrolled: every call would run as many iterations as the trace did.",
            "loop around the step: `for batch in dataset: step(batch)`; or strategy.run_steps(fn, iterator, steps)",
        )


def _ids(values: PyTree) -> frozenset[int]:
    return frozenset(map(id, jax.tree.leaves(values, is_leaf=is_distributed)))


def _shapes(batch: PyTree) -> list[tuple[int, ...]]:
    return list(map(np.shape, jax.tree.leaves(batch)))


def _at_end(call: str) -> OutOfRangeError:
    return OutOfRangeError(call, "the dataset has no further batch.", "get_next_as_optional(), or a for loop")
