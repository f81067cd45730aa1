# SPDX-License-Identifier: Apache-2.0
"""Distributed datasets: datasets whose global batches are split over the replicas."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

from phalanx._src.input import state as positions
from phalanx._src.input.iterator import DistributedIterator, T, check_steps, require_outside_programs, worker_of
from phalanx._src.input.lockstep import require_same_data
from phalanx._src.input.order import Order
from phalanx._src.input.sharding import Plan, WorkerShard, plan
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.base import UNKNOWN, AbstractSource, State
from phalanx._src.input.sources.functions import FunctionSource, InputContext
from phalanx._src.input.sources.partial import partial_source
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import AutoShardPolicy, InputOptions, InputReplicationMode
from phalanx.errors import CardinalityError, InputError, InvalidArgumentError, arguments, shown
from phalanx.typing import PyTree


@final
class DistributedDataset:
    """A dataset whose global batches are split over the replicas.

    `Strategy.experimental_distribute_dataset` creates it. May be iterated in cross-replica context or outside all scopes.

    Each iteration reads the dataset from its beginning. Batches are pytrees of `PerReplica`. With one replica they are
    pytrees of arrays, unless a batch may be short: then the leaves are `PerReplica` values that act like the array of
    their real rows.

    Args:
      plan: which worker reads which rows.
      where: returns the devices of the replicas, which change with an elastic group. If there are none, batches are not placed.
      options: how the dataset is read.
      make_plan: returns the plan for other devices.
      steps: number of global batches that are stacked into one. None for no stacking.
      origin: the user's dataset. None if there is not exactly one.

    Example:
      >>> import numpy as np, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
      >>> [[x.tolist() for x in batch.values] for batch in dataset]
      [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    """

    def __init__(
        self,
        plan: Plan,
        where: Callable[[], Topology],
        options: InputOptions,
        make_plan: Callable[[Topology], Plan],
        *,
        steps: int | None = None,
        origin: Any = None,
    ) -> None:
        self._origin = origin
        self._last_plan, self._options, self._steps = plan, options, steps
        self._where, self._make_plan = where, make_plan
        self._last_topology = where()
        self._notes_first = False
        # The plan that was compared with those of the other workers.
        self._compared: Plan | None = None
        # The iterator that `element_spec` opened to look at the first batch. The next `iter` returns it, so that a
        # dataset that can be read only once loses no batch.
        self._untouched: DistributedIterator | None = None

    def __iter__(self) -> "DistributedIterator":
        require_outside_programs("iter(dataset)")
        self.require_same()
        plan = self._plan
        iterator, self._untouched = self._untouched, None
        return iterator or DistributedIterator(plan, self.topology, self._options, steps=self._steps)

    def __len__(self) -> int:
        if self.cardinality < 0:
            raise CardinalityError(
                "len of a distributed dataset",
                f"its number of batches is {'unknown' if self.cardinality == UNKNOWN else 'infinite'} "
                f"(cardinality {self.cardinality}).",
                "for batch in dataset",
            )
        return self.cardinality

    @property
    def topology(self) -> Any:
        """The devices that the batches are split for."""
        return self._where()

    @property
    def _plan(self) -> Plan:
        topology = self.topology
        if topology is not self._last_topology:
            # An iterator that `element_spec` has opened reads for the devices of the last group.
            self._last_plan, self._last_topology, self._untouched = self._make_plan(topology), topology, None
            if self._notes_first:
                self._last_plan.source.note_first()
        return self._last_plan

    @property
    def cardinality(self) -> int:
        """The number of batches; -1 if it is infinite, -2 if it is unknown. May be read in any context."""
        # Workers that read different rows continue until the last of them ends, so none knows the number of steps.
        count = UNKNOWN if self._plan.agreed else self._plan.source.facts.num_batches
        # In an elastic group that scales its batches, the number of steps depends on who leaves and joins.
        count = UNKNOWN if count > 0 and self.topology.shares.part is not None else count
        if count < 0 or self._steps is None:
            return count
        # A stack ends before a batch of another size.
        facts = self._plan.source.facts
        if facts.is_full:
            return math.ceil(count / self._steps)
        if facts.num_records is None or not facts.batch_size:
            return UNKNOWN
        full, rest = divmod(facts.num_records, facts.batch_size)
        return math.ceil(full / self._steps) + (rest > 0)

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of one replica's part of a batch: a pytree of `jax.ShapeDtypeStruct`.

        The number of rows is None if it may differ between batches or replicas. Reads the first batch, so it may be read only outside
        traced steps.

        Raises:
          ContextError: a step is being traced.
          InputError: the dataset is empty.
        """
        return self._look().element_spec

    @property
    def next_spec(self) -> PyTree:
        """Shapes and dtypes of one replica's part of the first batch: a pytree of `jax.ShapeDtypeStruct`.

        Raises:
          InputError: the dataset is empty.
        """
        return self._look().next_spec

    @functools.cached_property
    def order(self) -> Order:
        """The state that decides the order of the user's dataset."""
        return Order(self._origin)

    def note_first(self) -> None:
        """See `AbstractSource.note_first`."""
        self._notes_first = True
        self._plan.source.note_first()

    @property
    def first(self) -> bytes:
        """See `AbstractSource.first`. Zeros if the workers read different rows, because the position is then that of all of them."""
        return bytes(8) if self._plan.agreed else self._plan.source.first

    def begin_epoch(self) -> None:
        """Notes what decides the order of the iteration that `iter` returns next. Data that is open already has drawn its order."""
        if self._untouched is None:
            self.order.begin_epoch()

    def _look(self) -> "DistributedIterator":
        """Returns the iterator that `iter` will return next."""
        self.begin_epoch()
        self._untouched = iter(self)
        return self._untouched

    def require_same(self) -> None:
        """Checks that all workers have the same data, as far as that is known before reading. `iter(dataset)` calls it.

        A collective call: all workers must make it. May be called in cross-replica context or outside all scopes.

        Raises:
          InputError: the workers have different numbers of rows or batches.
        """
        plan = self._plan
        if self._compared is not plan and not plan.agreed and worker_of(self.topology).count > 1:
            require_same_data(plan.source.facts, self.topology.exchange)
        self._compared = plan

    def require_position(self, state: State) -> None:
        """Checks that a position belongs to this dataset, as far as that is known before reading. May be called in any context.

        Args:
          state: result of `get_state` of an iterator.

        Raises:
          InputError: it is that of other data, or none.
        """
        worker = worker_of(self.topology)
        state = positions.of_worker(state, worker.index, worker.count)
        state = positions.unmarked(state, self._plan.source.facts)
        self._plan.at(state).source.start(state)

    def batches(self, *, steps: int) -> "DistributedDataset":
        """Returns a dataset that stacks `steps` batches into one. May be called in any context.

        Args:
          steps: number of batches per stack, for example the `steps` of one `Strategy.run_steps`.

        Returns:
          A dataset whose leaves have the shape `(steps, per_replica_batch, ...)` on each replica. The last stack has fewer
          steps if `steps` does not divide the number of batches.

        Raises:
          InvalidArgumentError: `steps` is not a positive integer.
        """
        steps = check_steps(steps)
        return DistributedDataset(
            self._plan, self._where, self._options, self._make_plan, steps=steps, origin=self._origin
        )

    @property
    def is_agreed(self) -> bool:
        """Whether a position in the data is that of all workers together, so that all must ask for it at the same time."""
        return self._plan.agreed

    def reduce(self, initial_state: T, reduce_func: Callable[[T, Any], T]) -> T:
        """Folds a function over all batches. May be called in cross-replica context or outside all scopes.

        Args:
          initial_state: state before the first batch.
          reduce_func: maps the state and a batch to the next state.

        Returns:
          The state after the last batch.

        Raises:
          InvalidArgumentError: `reduce_func` is not callable.
        """
        arguments.function("reduce_func", reduce_func, "dataset.reduce(0, lambda state, batch: state + 1)")
        return functools.reduce(reduce_func, self, initial_state)

    @property
    def shards(self) -> Sequence[WorkerShard]:
        """One `WorkerShard` per worker. Empty for a dataset made by `distribute_datasets_from_function`."""
        return tuple(self._plan.shards)


def distribute(
    dataset: Any, where: Callable[[], Topology], options: InputOptions, *, batch_size: int | None, drop_remainder: bool
) -> DistributedDataset:
    """Splits the batches of a dataset over the replicas.

    Args:
      dataset: see `Strategy.experimental_distribute_dataset`.
      where: see `DistributedDataset`.
      options: how the dataset is read.
      batch_size: global batch size in rows, for a dataset of single rows. None for a dataset of batches.
      drop_remainder: whether to drop a short last batch.

    Returns:
      The distributed dataset.

    Raises:
      InputError: the dataset cannot be split.
      InvalidArgumentError: an option applies only to dataset functions.
    """
    if isinstance(dataset, DistributedDataset):
        raise InputError(
            "experimental_distribute_dataset", "the dataset is already distributed.", "pass the original dataset"
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InvalidArgumentError(
            "experimental_distribute_dataset with InputReplicationMode.PER_REPLICA",
            "this method splits one dataset over all replicas.",
            "distribute_datasets_from_function, which makes one dataset per replica",
        )
    arguments.flag("drop_remainder", drop_remainder)

    def make_plan(topology: Topology) -> Plan:
        worker = worker_of(topology)
        make = _sources(topology, batch_size, drop_remainder=drop_remainder)
        divided = plan(dataset, make, options.auto_shard_policy, worker)
        divided.announce(worker)
        return divided

    return DistributedDataset(make_plan(where()), where, options, make_plan, origin=dataset)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any], where: Callable[[], Topology], options: InputOptions
) -> DistributedDataset:
    """Returns a distributed dataset of the per-replica batches that `dataset_fn` provides.

    Raises:
      InvalidArgumentError: `dataset_fn` is not callable.
      InputError: it returned something that is not a dataset of batches.
    """
    arguments.function("dataset_fn", dataset_fn, "lambda context: dataset.shard(context.num_input_pipelines, 0)")

    def make_plan(topology: Topology) -> Plan:
        worker = worker_of(topology)
        source = FunctionSource(dataset_fn, worker, options, topology.local_devices)
        return Plan(source, AutoShardPolicy.OFF, worker.count > 1, ())

    return DistributedDataset(make_plan(where()), where, options, make_plan)


def shards_of(dataset: Any, topology: Topology, options: InputOptions, batch_size: int | None) -> Sequence[WorkerShard]:
    """Returns one `WorkerShard` per worker for a dataset, distributed or not."""
    if isinstance(dataset, DistributedDataset):
        return dataset.shards
    make = _sources(topology, batch_size, drop_remainder=False)
    return plan(dataset, make, options.auto_shard_policy, worker_of(topology)).shards


def _sources(topology: Topology, batch_size: int | None, *, drop_remainder: bool) -> Callable[[Any], AbstractSource]:
    """Returns a function that converts a dataset to the source of the batches of these devices."""

    def make(dataset: Any) -> AbstractSource:
        return partial_source(
            lambda drop: source_of(dataset, batch_size, drop_remainder=drop),
            topology.shares.part,
            drop_remainder=drop_remainder,
        )

    return make


def check_options(options: object) -> InputOptions:
    """Returns `options`, or the default options for None.

    Raises:
      InvalidArgumentError: `options` is neither `InputOptions` nor None.
    """
    if not isinstance(options, (InputOptions, type(None))):
        hint = f"batch_size={options}" if arguments.is_integer(options, least=1) else "options=phalanx.InputOptions()"
        raise InvalidArgumentError(f"options={shown(options)}", "must be InputOptions or None.", hint)
    return options or InputOptions()
