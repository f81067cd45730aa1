# SPDX-License-Identifier: Apache-2.0
"""Datasets whose batches are divided over the replicas, and their iterators."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

from phalanx.errors import (
    CardinalityError,
    InputError,
    InvalidArgumentError,
    arguments,
    shown,
)
from phalanx.input.iterator import DistributedIterator, T, check_steps, require_outside_programs, worker_of
from phalanx.input.lockstep import require_same_data
from phalanx.input.sharding import Plan, WorkerShard, plan
from phalanx.input.sources.adapt import source_of
from phalanx.input.sources.base import UNKNOWN
from phalanx.input.sources.functions import FunctionSource, InputContext
from phalanx.mesh.topology import Topology
from phalanx.options import AutoShardPolicy, InputOptions, InputReplicationMode


@final
class DistributedDataset:
    """Global batches, divided over the replicas. `Strategy.experimental_distribute_dataset` makes it.

    Each pass reads the dataset from its beginning. Its batches are pytrees of `PerReplica`; with one replica of arrays,
    or, where a batch may be short, of `PerReplica` that act as the array of their rows.

    Args:
      plan: which worker reads what.
      topology: the replicas' devices. Without devices, batches stay as they are.
      options: how it is read.
      steps: how many batches are stacked into one.

    Example:
      >>> import numpy as np, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
      >>> [[x.tolist() for x in batch.values] for batch in dataset]
      [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    """

    def __init__(self, plan: Plan, topology: Topology, options: InputOptions, *, steps: int | None = None) -> None:
        self._plan, self._topology, self._options, self._steps = plan, topology, options, steps
        self._untouched: DistributedIterator | None = None

    def __iter__(self) -> "DistributedIterator":
        require_outside_programs("iter(dataset)")
        iterator, self._untouched = self._untouched, None
        return iterator or DistributedIterator(self._plan, self._topology, self._options, steps=self._steps)

    def __len__(self) -> int:
        if self.cardinality < 0:
            raise CardinalityError(
                "len of a distributed dataset",
                f"its cardinality is {self.cardinality}: {'unknown' if self.cardinality == UNKNOWN else 'infinite'}.",
                "for batch in dataset",
            )
        return self.cardinality

    @property
    def topology(self) -> Any:
        """The devices for which batches are divided; None under the default strategy."""
        return self._topology

    @property
    def cardinality(self) -> int:
        """How many batches it has: -1 for infinitely many, -2 where that is unknown. May be read in any context."""
        count = UNKNOWN if self._plan.agreed else self._plan.source.facts.num_batches
        return count if count < 0 or self._steps is None else math.ceil(count / self._steps)

    @property
    def element_spec(self) -> Any:
        """What one replica gets of a batch: a pytree of `jax.ShapeDtypeStruct`. Outside programs: it reads a batch.

        Raises:
          InputError: it is empty.
        """
        if self._untouched is None:
            self._untouched = iter(self)
        return self._untouched.element_spec

    def require_same(self) -> None:
        """Makes sure that the workers divide the same data, as far as that is known before it is read. All must call it.

        In cross-replica context or outside all scopes.

        Raises:
          InputError: they have different numbers of rows or batches.
        """
        if not self._plan.agreed and worker_of(self._topology).count > 1:
            require_same_data(self._plan.source.facts, self._topology.exchange)

    def batches(self, *, steps: int) -> "DistributedDataset":
        """Returns the same batches, `steps` of them stacked into one: a replica's leaves are `[steps, per_replica_batch, ...]`.

        The last one has as many steps as are left. May be called in any context.

        Args:
          steps: how many batches, for example those of one `Strategy.run_steps`.

        Raises:
          InvalidArgumentError: `steps` is no positive integer.
        """
        return DistributedDataset(self._plan, self._topology, self._options, steps=check_steps(steps))

    def reduce(self, initial_state: T, reduce_func: Callable[[T, Any], T]) -> T:
        """Returns `reduce_func(... reduce_func(initial_state, first batch) ..., last batch)`.

        In cross-replica context or outside all scopes.

        Args:
          initial_state: what to begin with.
          reduce_func: maps the state and a batch to the next state.

        Raises:
          InvalidArgumentError: `reduce_func` is not callable.
        """
        arguments.function("reduce_func", reduce_func, "dataset.reduce(0, lambda state, batch: state + 1)")
        return functools.reduce(reduce_func, self, initial_state)

    @property
    def shards(self) -> Sequence[WorkerShard]:
        """What each worker reads."""
        return tuple(self._plan.shards)


def distribute(
    dataset: Any,
    topology: Topology,
    options: InputOptions,
    *,
    batch_size: int | None,
    drop_remainder: bool,
) -> DistributedDataset:
    """Divides the batches of a dataset over the replicas.

    Args:
      dataset: see `Strategy.experimental_distribute_dataset`.
      topology: the replicas' devices. Without devices, batches stay as they are.
      options: how it is read.
      batch_size: the global batch size, for a dataset of single rows.
      drop_remainder: whether to leave out a short last batch.

    Raises:
      InputError: it cannot be divided.
      InvalidArgumentError: options that are for dataset functions.
    """
    if isinstance(dataset, DistributedDataset):
        raise InputError(
            "experimental_distribute_dataset", "this dataset is distributed already.", "pass the original dataset"
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InvalidArgumentError(
            "experimental_distribute_dataset with InputReplicationMode.PER_REPLICA",
            "there is one dataset for all replicas.",
            "distribute_datasets_from_function, which makes one for each",
        )
    arguments.flag("drop_remainder", drop_remainder)
    worker = worker_of(topology)
    make = functools.partial(source_of, batch_size=batch_size, drop_remainder=drop_remainder)
    divided = plan(dataset, make, options.auto_shard_policy, worker)
    divided.announce(worker)
    return DistributedDataset(divided, topology, options)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any], topology: Topology, options: InputOptions
) -> DistributedDataset:
    """Makes a distributed dataset of the datasets of per-replica batches that a function returns."""
    arguments.function("dataset_fn", dataset_fn, "lambda context: dataset.shard(context.num_input_pipelines, 0)")
    worker = worker_of(topology)
    devices = topology.local_devices
    source = FunctionSource(dataset_fn, worker, options, devices)
    return DistributedDataset(Plan(source, AutoShardPolicy.OFF, worker.count > 1, ()), topology, options)


def shards_of(dataset: Any, topology: Topology, options: InputOptions, batch_size: int | None) -> Sequence[WorkerShard]:
    """Returns what each worker reads of a dataset, or of a distributed one."""
    if isinstance(dataset, DistributedDataset):
        return dataset.shards
    make = functools.partial(source_of, batch_size=batch_size)
    return plan(dataset, make, options.auto_shard_policy, worker_of(topology)).shards


def check_options(options: Any) -> InputOptions:
    """Returns input options; the default ones for None.

    Raises:
      InvalidArgumentError: it is something else.
    """
    if not isinstance(options, (InputOptions, type(None))):
        raise InvalidArgumentError(
            f"options={shown(options)}", "must be InputOptions or None.", "options=phalanx.InputOptions()"
        )
    return options or InputOptions()
