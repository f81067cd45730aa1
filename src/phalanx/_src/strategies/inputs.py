# SPDX-License-Identifier: Apache-2.0
"""The methods of a strategy that distribute datasets and values."""

import weakref
from collections.abc import Callable
from typing import Any, final

import jax

from phalanx._src.input.distributed import DistributedDataset, check_options, distribute, distribute_from_function
from phalanx._src.input.placement import ValueContext, components, distribute_values
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.input.sources.records import NumpyDataset
from phalanx._src.mesh.arrays import is_array
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import InputOptions
from phalanx._src.tracing import context
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.typing import PyTree


class AbstractInputs(AbstractStrategy):
    """Distributes datasets, and values with one component per replica."""

    @final
    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> PyTree:
        """Builds a per-replica value from one function call per replica.

        Call it in cross-replica context or outside all scopes.

        Args:
          value_fn: takes a `ValueContext` and returns the component of one replica, a pytree. The arrays of different
            replicas may have different numbers of rows.

        Returns:
          A pytree of `PerReplica` values. With one replica, the return value of `value_fn`.

        Raises:
          ContextError: called in replica context.
          InvalidArgumentError: the pytrees of the replicas differ in structure or in a dim other than dim 0, or a
            component is a distributed value.

        Example:
          >>> import numpy as np, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> value = strategy.experimental_distribute_values_from_function(
          ...     lambda context: np.float32(context.replica_id_in_sync_group))
          >>> [float(x) for x in value.values]
          [0.0, 1.0]
        """
        context.require_cross_replica(
            "experimental_distribute_values_from_function", self, "compute the value in the replica function"
        )
        context.require_not_running("experimental_distribute_values_from_function", "build the value outside the step")
        arguments.function("value_fn", value_fn, "lambda context: np.float32(context.replica_id_in_sync_group)")
        n = self.num_replicas_in_sync
        if not self.topology.has_devices:
            return value_fn(ValueContext(0, n))
        if n == 1:
            place = lambda x: self.topology.put_replicated(x) if is_array(x) else x  # noqa: E731
            return jax.tree.map(place, components(value_fn(ValueContext(0, n))))
        replicas = self.topology.local_replicas
        return distribute_values([components(value_fn(ValueContext(i, n))) for i in replicas], self.topology)

    def _where(self) -> Callable[[], Topology]:
        """Returns a function that returns the devices of this strategy, without keeping the strategy alive."""
        # A dataset asks again for each iteration, because the strategy of an elastic group moves to other devices.
        reference, last = weakref.ref(self), self.topology

        def where() -> Topology:
            strategy = reference()
            # A dataset may outlive its strategy, and then stays on the devices that it began with.
            return last if strategy is None else strategy.topology

        return where

    @final
    def experimental_distribute_dataset(
        self,
        dataset: object,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> DistributedDataset:
        """Splits every global batch of a dataset over the replicas.

        Call it in cross-replica context or outside all scopes. No row is dropped or repeated. The shares of the replicas differ by at
        most one row. A batch of another size has its own program.

        Args:
          dataset: a dataset of global batches, which are pytrees of arrays `(global_batch, ...)`: a Grain `MapDataset`,
            `IterDataset` or `DataLoader`, a Keras `PyDataset`, a torch `DataLoader`, a `tf.data.Dataset`, an iterable,
            or a function that returns an iterator. With `batch_size`, a dataset of single rows: a pytree of arrays
            `(rows, ...)`, a Grain dataset, a Hugging Face or torch dataset, `phalanx.data.from_files`, an object with
            `len` and `[]`, or an iterable.
          options: how to read the dataset, and how to shard it over workers.
          batch_size: the global batch size in rows, for a dataset of single rows.
          drop_remainder: whether to drop a short last batch.

        Returns:
          A `DistributedDataset`. Under the default strategy its batches are those of `dataset`.

        Raises:
          InputError: the data cannot be divided.
          InvalidArgumentError: `batch_size` is not a positive integer.
          ContextError: called in replica context.

        Example:
          >>> import numpy as np, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> dataset = strategy.experimental_distribute_dataset(np.arange(6), batch_size=4)
          >>> [[x.tolist() for x in batch.values] for batch in dataset]
          [[[0, 1], [2, 3]], [[4], [5]]]
        """
        self._require_distributing("experimental_distribute_dataset")
        options = check_options(options)
        return distribute(dataset, self._where(), options, batch_size=batch_size, drop_remainder=drop_remainder)

    @final
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes datasets of per-replica batches, without splitting batches.

        Call it in cross-replica context or outside all scopes.

        Args:
          dataset_fn: takes an `InputContext` and returns a dataset. It is called immediately, once per worker, and the
            replicas of the worker take the batches in turn. With InputReplicationMode.PER_REPLICA it is called once per
            replica.
          options: how to read the dataset.

        Returns:
          A `DistributedDataset`.

        Raises:
          InputError: `dataset_fn` did not return a dataset of batches.
          ContextError: called in replica context.
        """
        self._require_distributing("distribute_datasets_from_function")
        return distribute_from_function(dataset_fn, self._where(), check_options(options))

    @final
    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Calls `distribute_datasets_from_function`, under its older name.

        Call it in cross-replica context or outside all scopes.
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    @final
    def make_experimental_numpy_dataset(self, numpy_input: PyTree, session: None = None) -> NumpyDataset:
        """Returns a dataset of the rows of arrays, to be batched and distributed.

        Call it in cross-replica context or outside all scopes.

        Args:
          numpy_input: a pytree of arrays `(rows, ...)`. A list counts as one array.
          session: must be None. It exists for code written for TensorFlow 1.

        Returns:
          A dataset of single rows, with a method `batch`.

        Raises:
          InputError: the arrays have different numbers of rows.
          InvalidArgumentError: `session` is not None.

        Example:
          >>> import numpy as np, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> dataset = strategy.make_experimental_numpy_dataset(np.arange(10)).batch(4)
          >>> len(strategy.experimental_distribute_dataset(dataset))
          3
        """
        if session is not None:
            raise InvalidArgumentError(
                f"session={shown(session)}",
                "must be None: Phalanx has no sessions.",
                "make_experimental_numpy_dataset(numpy_input)",
            )
        self._require_distributing("make_experimental_numpy_dataset")
        return NumpyDataset(numpy_input)

    def _require_distributing(self, method: str) -> None:
        context.require_cross_replica(method, self, "distribute the dataset outside the replica function")
        context.require_not_running(method, "distribute the dataset outside the step")
