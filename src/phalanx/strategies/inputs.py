# SPDX-License-Identifier: Apache-2.0
"""The verbs of a strategy that distribute data."""

from collections.abc import Callable
from typing import Any, final

import jax

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.input.distributed import DistributedDataset, check_options, distribute, distribute_from_function
from phalanx.input.placement import ValueContext, components, distribute_values
from phalanx.input.sources.functions import InputContext
from phalanx.input.sources.records import NumpyDataset
from phalanx.mesh.arrays import is_array
from phalanx.options import InputOptions
from phalanx.tracing import context
from phalanx.tracing.strategy import AbstractStrategy


class AbstractInputs(AbstractStrategy):
    """What a strategy makes of datasets and of values for each replica."""

    @final
    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes a per-replica value. In cross-replica context or outside all scopes.

        Args:
          value_fn: gets a `ValueContext` and returns one replica's component: a pytree. Arrays may have different numbers
            of rows.

        Returns:
          A pytree of `PerReplica`; with one replica what `value_fn` returns.

        Raises:
          ContextError: called in replica context.
          InvalidArgumentError: the replicas' pytrees, or shapes beyond dim 0, differ; or a component is a distributed value.
        """
        context.require_cross_replica(
            "experimental_distribute_values_from_function", self, "compute the value in the replica function"
        )
        context.require_not_running("experimental_distribute_values_from_function", "make the value outside the step")
        arguments.function("value_fn", value_fn, "lambda context: np.float32(context.replica_id_in_sync_group)")
        n = self.num_replicas_in_sync
        if not self.topology.has_devices:
            return value_fn(ValueContext(0, n))
        if n == 1:
            place = lambda x: self.topology.put_replicated(x) if is_array(x) else x  # noqa: E731
            return jax.tree.map(place, components(value_fn(ValueContext(0, n))))
        own = self.topology.local_replicas
        return distribute_values([components(value_fn(ValueContext(i, n))) for i in own], self.topology)

    @final
    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> DistributedDataset:
        """Divides every global batch of a dataset over the replicas. In cross-replica context or outside all scopes.

        No row is dropped or doubled: where a batch cannot be divided, or the last one is short, it is padded and carries
        a mask, in one layout for all batches, so that one compiled step takes them all.

        Args:
          dataset: of global batches, pytrees of arrays `(global_batch, ...)`: a Grain `MapDataset`, `IterDataset` or
            `DataLoader`, a Keras `PyDataset`, a torch `DataLoader`, a `tf.data.Dataset`, an iterable, or a function that
            returns an iterator. With `batch_size` of single rows: a pytree of arrays `(rows, ...)`, a Grain dataset, a Hugging
            Face or torch dataset, `phalanx.data.from_files`, an object with `len` and `[]`, an iterable.
          options: how it is read, and how it is divided between workers.
          batch_size: the global batch size, for a dataset of single rows.
          drop_remainder: whether to leave out a short last batch.

        Returns:
          A `DistributedDataset`; under the default strategy one of the batches as they are.

        Raises:
          InputError: data that cannot be divided.
          InvalidArgumentError: a batch size that is no positive integer.
          ContextError: called in replica context.
        """
        self._require_distributing("experimental_distribute_dataset")
        options = check_options(options)
        return distribute(dataset, self.topology, options, batch_size=batch_size, drop_remainder=drop_remainder)

    @final
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes datasets of per-replica batches, without dividing anything. In cross-replica context or outside all scopes.

        Args:
          dataset_fn: gets an `InputContext` and returns a dataset. It is called at once, for each worker; the worker's
            replicas take its batches in turn. With InputReplicationMode.PER_REPLICA it is called for each replica.
          options: how it is read.

        Returns:
          A `DistributedDataset`.

        Raises:
          InputError: what it returned is no dataset of batches.
          ContextError: called in replica context.
        """
        self._require_distributing("distribute_datasets_from_function")
        return distribute_from_function(dataset_fn, self.topology, check_options(options))

    @final
    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """`distribute_datasets_from_function` under its older name. In cross-replica context or outside all scopes."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    @final
    def make_experimental_numpy_dataset(self, numpy_input: Any, session: None = None) -> NumpyDataset:
        """Makes a dataset of rows of arrays, to be batched and distributed. In cross-replica context or outside all scopes.

        Args:
          numpy_input: a pytree of arrays `(rows, ...)`; a list is one array.
          session: must be None; it is there for code written for TensorFlow 1.

        Raises:
          InputError: arrays with different numbers of rows.
          InvalidArgumentError: a session.

        Example:
          >>> import numpy as np, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> dataset = strategy.make_experimental_numpy_dataset(np.arange(10)).batch(4)
          >>> len(strategy.experimental_distribute_dataset(dataset))
          3
        """
        if session is not None:
            raise InvalidArgumentError(f"session={shown(session)}", "there are no sessions here.", "leave it out")
        self._require_distributing("make_experimental_numpy_dataset")
        return NumpyDataset(numpy_input)

    def _require_distributing(self, method: str) -> None:
        context.require_cross_replica(method, self, "distribute the dataset outside the replica function")
        context.require_not_running(method, "distribute it outside the step")
