# SPDX-License-Identifier: Apache-2.0
"""The iterator of a distributed dataset: batches on the replicas' devices, and its position."""

import dataclasses
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, final

import jax
import numpy as np
from typing_extensions import override

from phalanx import compat
from phalanx.errors import (
    ContextError,
    InputError,
    OutOfRangeError,
    arguments,
)
from phalanx.errors.frames import user_place
from phalanx.input import state as positions
from phalanx.input.feed import AbstractBatches, Batch, Form, Place, ReadAhead, Step
from phalanx.input.lockstep import Lockstep
from phalanx.input.placement import Placement
from phalanx.input.shard import Worker
from phalanx.input.sharding import Plan
from phalanx.input.sources.base import State, stack
from phalanx.mesh.topology import Topology
from phalanx.mesh.values import PerReplica, is_distributed
from phalanx.options import InputOptions
from phalanx.tracing.draws import AbstractIterator
from phalanx.tracing.scope import innermost

T = TypeVar("T")

_MOST_STEPS = 2**31 - 1


@final
class Optional(Generic[T]):
    """A batch, or none. `DistributedIterator.get_next_as_optional` returns it; may be used in any context.

    Args:
      value: the batch, in a tuple; empty for none.

    Example:
      >>> Optional((1,)).has_value(), Optional(()).has_value()
      (True, False)
    """

    def __init__(self, value: tuple[T] | tuple[()]) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._value)

    def get_value(self) -> T:
        """Returns the batch.

        Raises:
          OutOfRangeError: there is none.
        """
        if not self._value:
            raise OutOfRangeError("Optional.get_value()", "it has no value.", "if optional.has_value():")
        return self._value[0]


@final
class DistributedIterator(AbstractIterator):
    """One pass over a `DistributedDataset`. A background thread reads ahead; it ends with the iterator.

    Used outside programs, where the batch is an argument of the step; or in a `phalanx.function`: each call takes as many batches as
    the function took when it was traced. A call that raises, for example because too few batches are left, takes none.

    Args:
      plan: which worker reads what.
      topology: the replicas' devices. Without devices, batches stay as they are.
      options: how it is read.
      steps: how many batches are stacked into one.
    """

    def __init__(self, plan: Plan, topology: Topology, options: InputOptions, *, steps: int | None) -> None:
        self._plan, self._topology, self._options, self._form = plan, topology, options, Form(steps)
        self._worker = worker_of(topology)
        self._state: State
        self._batches: AbstractBatches
        # Batches that were looked at before they are handed out.
        self._seen: deque[Batch] = deque()
        self._open(None)

    def __iter__(self) -> "DistributedIterator":
        require_outside_programs("a loop over an iterator")
        return self

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
          StopIteration: there is none.
          OutOfRangeError: there is none, in a `phalanx.function`.
          ContextError: called in a replica function, or in the body of a loop.
          InputError: the data cannot be divided.
        """
        if compat.lift_scope() is not None:
            return self._drawn(is_optional=False)[0]
        batch = self._next(self._form)
        if batch is None:
            raise StopIteration
        return batch.value

    def get_next(self) -> Any:
        """Returns the next batch, as `next(iterator)` does.

        Raises:
          OutOfRangeError: there is none.
        """
        try:
            return next(self)
        except StopIteration:
            raise _at_end("iterator.get_next()") from None

    def get_next_as_optional(self) -> Optional[Any]:
        """Returns the next batch as an `Optional`, which has no value at the end.

        In a `phalanx.function`, `has_value()` is a bool: the last call, which finds no batch, has a program of its own.
        """
        if compat.lift_scope() is not None:
            return Optional(self._drawn(is_optional=True))
        batch = self._next(self._form)
        return Optional(() if batch is None else (batch.value,))

    def next_steps(self, steps: int, *, room: int | None = None) -> tuple[Any, int]:
        """Returns the next batches stacked into one, and how many they are: fewer at the end, or before one of another size.

        `Strategy.run_steps` asks for them.

        Args:
          steps: how many.
          room: for how many steps the stack has room, whether it is full or not; None for `steps`.

        Raises:
          OutOfRangeError: there is none.
        """
        require_outside_programs("Strategy.run_steps")
        batch = self._next(Form(steps, room or steps, alike=not self._plan.source.facts.one_layout))
        if batch is None:
            raise _at_end("the next steps of an iterator")
        return batch.value, len(batch.steps)

    def next_alike(self, steps: int) -> list[Any]:
        """Returns the next batches one by one: up to `steps`, and no further than to one of another size.

        `Strategy.run_steps` asks for them where steps cannot be one program.

        Raises:
          OutOfRangeError: there is none.
        """
        require_outside_programs("Strategy.run_steps")
        batches: list[Any] = []
        while len(batches) < steps and (batch := self._read(Form())) is not None:
            if batches and _shapes(batch.value) != _shapes(batches[0]):
                self._put_back(batch, Form())
                break
            batches.append(batch.value)
            self._state = batch.state or self._state
        if not batches:
            raise _at_end("the next steps of an iterator")
        return batches

    @property
    def element_spec(self) -> Any:
        """What one replica gets of a batch: a pytree of `jax.ShapeDtypeStruct`. It reads the next batch ahead.

        Raises:
          InputError: there is no further batch.
        """
        batch = self.look(0)
        if batch is None:
            raise InputError("element_spec", "the dataset has no further batch.", "a dataset that is not empty")
        return jax.tree.map(spec_of, batch[0], is_leaf=is_distributed)

    @override
    def look(self, index: int) -> tuple[Any] | None:
        while len(self._seen) <= index:
            batch = self._batches.get(self._form)
            if batch is None:
                return None
            self._seen.append(batch)
        return (self._seen[index].value,)

    @override
    def advance(self, count: int) -> None:
        for _ in range(count):
            self._next(self._form)

    def get_state(self) -> State:
        """Returns the position after the last batch that was handed out. With several workers all must call it.

        It belongs to the dataset, not to the devices: with AutoShardPolicy DATA and FILE another number of workers and
        replicas can go on from it.

        Returns:
          A dict of numbers, strings, lists and dicts.
        """
        state = positions.marked(self._state, self._plan.source.facts)
        return positions.of_all_workers(state, self._topology.exchange) if self._plan.agreed else state

    def set_state(self, state: State) -> None:
        """Goes to a position. With several workers all must call it.

        Args:
          state: what `get_state` returned, of this or another iterator over the same data.

        Raises:
          InputError: it is no position, or one of other data: another kind of dataset, or another number of rows.
        """
        state = positions.of_worker(state, self._worker.index, self._worker.count)
        state = positions.unmarked(state, self._plan.source.facts)
        self._batches.stop()
        self._open(state)
        self._seen.clear()

    def stop_reading(self) -> None:
        """Ends reading ahead, until the next batch is asked for. What was read is not lost."""
        self._batches.stop()

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes `get_state()` to a file; with several workers all must call it, and the chief writes.

        Raises:
          InvalidArgumentError: `path` is not a path.
        """
        arguments.path("path", path)
        state = self.get_state()
        if self._worker.is_chief:
            positions.save(state, path)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Goes to the position that `save_state` has written.

        Raises:
          InputError: the file holds something else.
          InvalidArgumentError: `path` is not a path.
        """
        self.set_state(positions.load(arguments.path("path", path)))

    def _open(self, state: State | None) -> None:
        reader = self._plan.source.open(self._worker, self._plan.policy, state)
        self._state = reader.get_state()
        place, ahead = self._placing(), self._options.experimental_per_replica_buffer_size
        facts = self._plan.source.facts
        if self._worker.count > 1 and not facts.is_in_memory:
            # Under DATA too: a worker whose data fails must not leave the others waiting for it in the step.
            exchange = self._topology.exchange
            self._batches = Lockstep(reader, place, self._worker, exchange, ahead=ahead > 0, copies=facts.is_borrowed)
        else:
            # Under the default strategy nothing is put anywhere, and a dataset on a device is read where it is.
            here = not self._topology.has_devices or self._options.experimental_place_dataset_on_device
            # The default strategy hands out the arrays of a dataset themselves.
            facts = dataclasses.replace(facts, is_borrowed=facts.is_borrowed and self._topology.has_devices)
            self._batches = ReadAhead(reader, place, 0 if here else ahead, facts)

    def _placing(self) -> Place:
        if not self._topology.has_devices:
            return _unplaced
        facts, fetches = self._plan.source.facts, self._options.fetches_to_device
        return Placement(self._topology, self._worker, facts, fetches=fetches, agreed=self._plan.agreed).place

    def _next(self, form: Form) -> Batch | None:
        batch = self._read(form)
        if batch is not None and batch.state is not None:
            self._state = batch.state
        return batch

    def _read(self, form: Form) -> Batch | None:
        if self._seen:
            if form == self._form:
                return self._seen.popleft()
            while self._seen:
                self._batches.put_back(self._seen.pop())
        return self._batches.get(form)

    def _put_back(self, batch: Batch, form: Form) -> None:
        """Takes back the batch that was read last, in this form."""
        if form == self._form:
            self._seen.appendleft(batch)
        else:
            self._batches.put_back(batch)

    def _drawn(self, *, is_optional: bool) -> Any:
        """Returns the next batch as an input of the program that is being traced, in a tuple; an empty one if there is none."""
        scope = innermost()
        assert scope is not None
        return scope.draw(self, is_optional=is_optional) or ()


def check_steps(steps: Any) -> int:
    """Returns a number of steps.

    Raises:
      InvalidArgumentError: it is no positive integer.
    """
    return arguments.integer("steps", steps, most=_MOST_STEPS, kind="an integer of at least 1", hint="steps=16")


def worker_of(topology: Topology) -> Worker:
    """Returns this process's place among the workers."""
    return Worker(topology.worker_index, topology.num_workers, len(topology.local_replicas))


def _unplaced(steps: Sequence[Step], room: int | None) -> Any:
    """Returns batches as they are, for the default strategy."""
    wholes = [step.piece.parts[0] for step in steps]
    return wholes[0] if room is None else stack(wholes, len(wholes))


def spec_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of one replica's component of a leaf."""
    shape = leaf.data.shape[1:] if isinstance(leaf, PerReplica) else np.shape(leaf)
    return jax.ShapeDtypeStruct(shape, leaf.data.dtype if isinstance(leaf, PerReplica) else leaf.dtype)


def require_outside_programs(asked: str) -> None:
    """Raises while a step is traced.

    Raises:
      ContextError: it is.
    """
    if innermost() is not None:
        raise ContextError(
            f"{asked} in a traced step",
            f"at {user_place()} a compiled step would loop as often as when it was traced, whatever the data.",
            "loop around the step: `for batch in dataset: step(batch)`; or strategy.run_steps(fn, iterator, steps)",
        )


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return list(map(np.shape, jax.tree.leaves(batch)))


def _at_end(asked: str) -> OutOfRangeError:
    return OutOfRangeError(asked, "the dataset has no further batch.", "get_next_as_optional(), or a for loop")
