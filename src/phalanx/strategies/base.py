# SPDX-License-Identifier: Apache-2.0
"""`Strategy`: the public verbs, over a few hooks that a strategy overrides."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import NoneType
from typing import Any, NoReturn, final
from weakref import WeakSet

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.errors import ContextError, InvalidArgumentError, MixedStrategyError, arguments, shown
from phalanx.errors.frames import boundary, hide
from phalanx.input.distributed import DistributedDataset, check_options, distribute, distribute_from_function, shards_of
from phalanx.input.iterator import DistributedIterator, check_steps
from phalanx.input.placement import ValueContext, components, distribute_values
from phalanx.input.sharding import WorkerShard
from phalanx.input.sources.functions import InputContext
from phalanx.input.sources.records import NumpyDataset
from phalanx.mesh.arrays import is_array
from phalanx.mesh.devices import Held, device_name
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.mesh.topology import Topology
from phalanx.mesh.values import DistributedValues, Mirrored, PerReplica, RowMask, flatten, is_distributed, map_leaves
from phalanx.options import CommunicationOptions, InputOptions, ReduceOp, RunOptions
from phalanx.programs.cache import Programs
from phalanx.programs.replicas import trace_run
from phalanx.programs.state import components_of
from phalanx.strategies.extended import StrategyExtended
from phalanx.strategies.reduction import (
    Axis,
    check_axis,
    check_components,
    check_dim,
    check_mergeable,
    gather_leaf,
    reduce_leaf,
)
from phalanx.tracing import context
from phalanx.tracing.context import Mode
from phalanx.tracing.policy import check_variable, initial_components, policy_of
from phalanx.tracing.scope import innermost
from phalanx.tracing.strategy import AbstractStrategy, Update, check_strategy

_numbers = itertools.count()
_living: "WeakSet[Strategy]" = WeakSet()

_DEFAULT_OPTIONS = RunOptions()


class Strategy(AbstractStrategy):
    """Where variables live and where replicas run.

    The verbs below are the same for all strategies. A strategy of your own overrides `topology`, and where it differs
    `storage` and `apply_update`, `cross_device_ops`, `communication_options`, `cluster_resolver`, `aggregate_gradients` and
    `execute`.
    """

    def __init__(self) -> None:
        self._programs = Programs()
        self._cross_replica = Mode(self, None)
        self._number = next(_numbers)
        _living.add(self)

    @property
    @final
    def number(self) -> int:
        """Which strategy of this process it is: variables know the one in whose scope they were made. In any context."""
        return self._number

    # Hooks.

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """The devices of the replicas; None where values stay where they are."""

    @property
    def storage(self) -> Topology | None:
        """Where variables live between programs: on the devices of the replicas, unless a strategy has another place."""
        return self.topology

    @property
    def cross_device_ops(self) -> CrossDeviceOps | None:
        """How gradients cross devices; None where there is one replica."""
        return None

    @property
    def communication_options(self) -> CommunicationOptions | None:
        """Hints for the all-reduce of gradients."""
        return None

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster; None on one machine. May be called in any context."""
        return None

    @property
    def requires_static_shapes(self) -> bool:
        """Whether `extended.experimental_require_static_shapes` says that shapes must not depend on values. In any context."""
        return False

    @property
    def tasks(self) -> tuple[str, ...]:
        """Where else than on this process's devices it computes and holds variables. May be called in any context."""
        return ()

    def held(self, variable: compat.Variable) -> list[Held]:
        """Returns who holds which part of a variable, as far as this process knows. May be called in any context.

        Raises:
          InvalidArgumentError: it is not a variable.
        """
        check_variable("variable", variable, "strategy.held(variable)")
        value = compat.raw_value(variable)
        shards = value.addressable_shards if isinstance(value, jax.Array) else []
        return [Held(device_name(s.device), s.index, s.data.nbytes) for s in sorted(shards, key=lambda s: s.device.id)]

    def aggregate_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas, inside a program; None stays None."""
        assert self.cross_device_ops is not None
        given = [g for g in grads if g is not None]
        pairs = [(g, g) for g in given]
        summed = iter(self.cross_device_ops.batch_reduce(ReduceOp.SUM, pairs, self.communication_options))
        return [None if g is None else next(summed) for g in grads]

    @final
    def divide_gradients(self, grads: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Sums gradients over the replicas, inside a program; each replica gets its part along a dim, or where that is None the whole."""
        if self._merging_ops is not None:
            sums = self.aggregate_gradients(grads)
            return [x if dim is None else self._part_of_replica(x, dim) for x, dim in zip(sums, dims, strict=True)]
        whole = self.aggregate_gradients([g if dim is None else None for g, dim in zip(grads, dims, strict=True)])
        part = lambda g, dim: lax.psum_scatter(g, REPLICA_AXIS, scatter_dimension=dim, tiled=True)  # noqa: E731
        return [w if dim is None else part(g, dim) for w, g, dim in zip(whole, grads, dims, strict=True)]

    def _part_of_replica(self, value: jax.Array, dim: int) -> jax.Array:
        parts = jnp.split(value, self.num_replicas_in_sync, dim)
        return lax.select_n(lax.axis_index(REPLICA_AXIS), *parts)

    def apply_update(self, update: Update) -> None:
        """Does an optimizer's update that a program has left, where `storage` is another place. Outside all programs, in any context."""
        raise NotImplementedError

    def execute(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: RunOptions) -> Any:
        """Runs a replica function outside all programs."""

        def program(*args: Any, **kwargs: Any) -> Any:
            scope = innermost()
            assert scope is not None
            return trace_run(self, fn, args, kwargs or {}, scope)

        if options.eager and self.topology is not None and self.topology.axes:
            raise InvalidArgumentError(
                "RunOptions(eager=True), or run_eagerly=True of Keras",
                f"a replica has {self.topology.devices_per_replica} devices, and only a compiled program is divided between them.",
                "phalanx.OneDeviceStrategy(...) to look into a step; jax.debug.print to print in it",
            )
        return context.call_in(self._cross_replica, self._programs.call, fn, program, args, kwargs, eager=options.eager)

    # Verbs.

    @property
    @final
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are aggregated. May be called in any context."""
        return 1 if self.topology is None else self.topology.num_replicas

    @property
    @final
    def defers_updates(self) -> bool:
        """Whether optimizers update variables when all replicas have done their part of a step. May be called in any context."""
        return self.lends_variables or (self.topology is not None and self.topology.divides_over_replicas)

    @property
    @final
    def lends_variables(self) -> bool:
        """Whether the replicas get copies of variables for a step, which live elsewhere. May be called in any context."""
        # Not whether they differ now: a strategy may make its topology anew each time it is asked.
        return type(self).storage is not Strategy.storage

    @property
    @final
    def extended(self) -> StrategyExtended:
        """More methods, under the names of tf.distribute. May be called in any context."""
        return StrategyExtended(self)

    def scope(self) -> "Scope":
        """Returns a context manager in which this strategy is current and new Keras variables are its own.

        Must be called in cross-replica context or outside all scopes; the same strategy's scopes nest.

        Raises:
          MixedStrategyError: another strategy is current.
          ContextError: entered inside a replica function.

        Example:
          >>> import keras, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> with strategy.scope():
          ...     v = keras.Variable(1.0)
          >>> len(v.value.devices())
          2
        """
        return Scope(self)

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn` once for every replica, as one compiled program. In cross-replica context or outside all scopes.

        `fn` may read and assign Keras variables. A `PerReplica` among its arguments gives each replica its own component;
        a `Mirrored` is unwrapped; other arrays and numbers are the same on all replicas.

        Args:
          fn: the replica function.
          args: its arguments: pytrees.
          kwargs: its keyword arguments.
          options: how to execute it.

        Returns:
          What `fn` returns, with a `PerReplica` for every array in it, and a `Mirrored` for every `Mirrored`. With one
          replica, what `fn` returns.

        Raises:
          InvalidArgumentError: `args` is neither a list nor a tuple.
          ContextError: called in replica context.

        Example:
          >>> import phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def fn(x):
          ...     return x * phalanx.get_replica_context().replica_id_in_sync_group
          >>> [float(x) for x in strategy.run(fn, args=(10.0,)).values]
          [0.0, 10.0]
        """
        # What `boundary` does, less the call, and checks that are looked at here: a step has few calls to spare.
        try:
            if not isinstance(args, (list, tuple)) or kwargs is not None:
                args, kwargs = arguments.of_call(args, kwargs)
            if not callable(fn):
                raise InvalidArgumentError(f"fn={shown(fn)}", "is not callable.", "strategy.run(step, args=(batch,))")
            if not isinstance(options, (RunOptions, NoneType)):
                raise InvalidArgumentError(
                    f"options={shown(options)}", "must be RunOptions or None.", "options=RunOptions(eager=True)"
                )
            if context.depth():
                context.require_cross_replica(
                    "Strategy.run", self, "call the function itself: you are inside a replica already"
                )
                context.require_not_running("Strategy.run", "strategy.reduce or strategy.extended.update")
            scope = innermost()
            if scope is None:
                return self.execute(fn, tuple(args), kwargs or {}, options or _DEFAULT_OPTIONS)
            if options is not None and options.eager:
                raise ContextError(
                    "RunOptions(eager=True) in phalanx.function",
                    "the step around it is compiled.",
                    "call strategy.run outside phalanx.function",
                )
            return trace_run(self, fn, args, kwargs or {}, scope)
        except Exception as e:
            hide(e)
            raise

    @final
    @boundary
    def run_steps(self, fn: Callable[..., Any], iterator: DistributedIterator, steps: int) -> Any:
        """Runs `fn(batch)` for the next `steps` batches, as one compiled program. In cross-replica context or outside all scopes.

        It does what as many calls of `run` do, with one dispatch. Where fewer batches are left it does those, with the same
        program. Under the default strategy the calls are made one by one, and end before a batch of another size.

        Args:
          fn: the replica function of one step. As in `run`, it may read and assign Keras variables.
          iterator: of a dataset that this strategy distributed.
          steps: how many steps.

        Returns:
          What `fn` returns, stacked: a `PerReplica` whose components are `[steps, ...]` for every array.

        Raises:
          OutOfRangeError: the iterator has no further batch.
          InvalidArgumentError: `steps` is no positive integer, or `iterator` no distributed iterator.
          ContextError: called in replica context, or while a step is traced.

        Example:
          >>> import numpy as np, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> iterator = iter(strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=2))
          >>> sums = strategy.run_steps(lambda batch: batch.sum(), iterator, 4)
          >>> strategy.reduce("SUM", sums, axis=None).tolist()
          [1.0, 5.0, 9.0, 13.0]
        """
        context.require_cross_replica("Strategy.run_steps", self, "phalanx.scan inside the replica function")
        context.require_not_running("Strategy.run_steps", "strategy.run_steps outside merge_call")
        if not isinstance(iterator, DistributedIterator):
            raise InvalidArgumentError(
                f"iterator={shown(iterator)}",
                "must be an iterator of a distributed dataset.",
                "iter(strategy.experimental_distribute_dataset(dataset))",
            )
        arguments.function("fn", fn, "strategy.run_steps(step, iterator, 16)")
        check_steps(steps)
        if self.topology is None or self.defers_updates:
            results = [self.run(fn, args=(batch,)) for batch in iterator.next_alike(steps)]
            return jax.tree.map(lambda *xs: _stacked(xs), *results, is_leaf=is_distributed)
        batches, count = iterator.next_steps(steps)

        def program(batches: Any, count: Any) -> Any:
            scope = innermost()
            assert scope is not None
            return trace_run(self, fn, (batches,), {}, scope, steps=count)

        results = context.call_in(
            self._cross_replica, self._programs.call, fn, program, (batches, count), {}, key="run_steps"
        )
        return results if count == steps else map_leaves(lambda x: _first_steps(x, count), results)

    @final
    @boundary
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Makes one value of a per-replica one. In cross-replica context or outside all scopes.

        Args:
          reduce_op: SUM or MEAN.
          value: a pytree of `PerReplica` values, or of variables.
          axis: None reduces over the replicas, element by element; a dim or a tuple of dims is reduced in each replica
            too. A mean over rows is the sum of all real rows divided by their number, however they are spread.

        Returns:
          A pytree of arrays.

        Raises:
          ContextError: called in replica context.
          ReduceOpError: an unknown operation, a dim that is not there, or the sum of a value that is not per replica.
          InputError: components with different numbers of rows, and `axis` is not 0.

        Example:
          >>> import phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> import numpy as np
          >>> value = strategy.experimental_distribute_values_from_function(
          ...     lambda c: np.float32([[1, 1, 1], [4]][c.replica_id_in_sync_group]))
          >>> float(strategy.reduce("MEAN", value, axis=0))
          1.75
        """
        op = ReduceOp.parse(reduce_op)
        context.require_cross_replica(
            "Strategy.reduce", self, f'phalanx.get_replica_context().all_reduce("{op.value}", value)'
        )
        check_axis(axis)
        check_components(flatten(value)[0])
        value = map_leaves(self._content, value)
        leaf = lambda x: self._reduce_leaf(op, x, axis)  # noqa: E731
        if axis is None and self.num_replicas_in_sync == 1:
            return map_leaves(leaf, value)
        return self.in_program(("reduce", op, axis), lambda v: map_leaves(leaf, v), value)

    @property
    def _merging_ops(self) -> CrossDeviceOps | None:
        """The operations that every reduction goes through; None where each may add as it likes."""
        ops = self.cross_device_ops
        return None if ops is None or ops.adds else ops

    def _reduce_leaf(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        ops, n = self._merging_ops, self.num_replicas_in_sync
        if ops is None or not isinstance(value, PerReplica):
            return reduce_leaf(op, value, axis, n, ops)
        check_mergeable(value, axis)
        return self.merged(lambda x: reduce_leaf(op, x, axis, n, ops), value)

    def merged(self, fn: Callable[..., Any], *values: PerReplica) -> Any:
        """Returns what `fn` makes of values in a merge function of all replicas. Inside a program, outside its replicas."""

        def replica_fn(*local: Any) -> Mirrored:
            replica = context.get_replica_context()
            assert replica is not None
            return Mirrored(replica.merge_call(lambda _, *merging: fn(*merging), args=local))

        scope = innermost()
        assert scope is not None
        return trace_run(self, replica_fn, values, {}, scope).value

    @final
    @boundary
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of a per-replica value, in replica order. In cross-replica context or outside all scopes.

        Args:
          value: a pytree of `PerReplica` values; other values stay as they are.
          axis: the dim along which to concatenate. Along dim 0 components may have different numbers of rows, and padded
            rows are left out.

        Returns:
          A pytree of arrays.

        Raises:
          ContextError: called in replica context; or in `phalanx.function` on a padded batch, whose number of real rows no
            program knows.
          ReduceOpError: a leaf has no such dim.

        Example:
          >>> import jax.numpy as jnp, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> value = strategy.run(lambda: jnp.ones(2) * phalanx.get_replica_context().replica_id_in_sync_group)
          >>> strategy.gather(value, axis=0)
          Array([0., 0., 1., 1.], dtype=float32)
        """
        context.require_cross_replica("Strategy.gather", self, "phalanx.get_replica_context().all_gather(value, axis)")
        check_dim(axis)
        check_components(flatten(value)[0])
        padded = [
            x.rows for x in jax.tree.leaves(value, is_leaf=is_distributed) if isinstance(x, PerReplica) and x.rows
        ]
        if padded and innermost() is not None:
            raise ContextError(
                "Strategy.gather of a padded batch in phalanx.function",
                "no program knows how many rows are real.",
                "gather outside phalanx.function",
            )
        leaf = lambda x: gather_leaf(x, axis, self.num_replicas_in_sync)  # noqa: E731
        value = map_leaves(_checked_array, value)
        whole = self.in_program(("gather", axis), lambda v: map_leaves(leaf, v), value)
        if not padded:
            return whole
        masks = jax.tree.map(_mask_of, value, is_leaf=is_distributed)
        masks = self.in_program(
            ("gather", 0), lambda v: map_leaves(lambda x: gather_leaf(x, 0, self.num_replicas_in_sync), v), masks
        )
        return jax.tree.map(_real_rows, value, whole, masks, is_leaf=is_distributed)

    @final
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of this process's replicas, in replica order. In cross-replica context or outside all scopes.

        Args:
          value: a distributed value, a variable, or a pytree of them.

        Returns:
          One value, or one pytree, for each local replica; `(value,)` for a value that is not distributed.

        Raises:
          ContextError: called in replica context.
        """
        context.require_cross_replica(
            "experimental_local_results", self, "you are in one replica already: use the value itself"
        )
        if isinstance(value, keras.Variable):
            value = self._content(value)
            # Copies, for the next step is given the arrays themselves.
            mirrored = not isinstance(value, PerReplica) and self.num_replicas_in_sync > 1
            value = Mirrored(jnp.copy(value)) if mirrored else jax.tree.map(jnp.copy, value)
        if isinstance(value, DistributedValues):
            return value.values
        leaves, tree = flatten(value)
        if not any(isinstance(x, DistributedValues) for x in leaves):
            return (value,)
        n = 1 if self.topology is None else len(self.topology.local_devices)
        parts = [x.values if isinstance(x, DistributedValues) else (x,) * n for x in leaves]
        return tuple(tree.unflatten(p) for p in zip(*parts, strict=True))

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
        if self.topology is None:
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

    @final
    def replicate(self, tree: Any) -> Mirrored:
        """Places a pytree of arrays on all replicas, for functions that take and return their state.

        In cross-replica context or outside all scopes.

        Args:
          tree: a pytree of arrays, for example the parameters and the optimizer state of optax.

        Returns:
          A `Mirrored` of it, to pass to `run`.

        Raises:
          ContextError: called in replica context.
        """
        context.require_cross_replica(
            "Strategy.replicate", self, "return phalanx.Mirrored(tree) from the replica function"
        )
        context.require_not_running("Strategy.replicate", "place the tree outside the step")
        tree = primitives.checked_arrays(tree)
        return Mirrored(tree if self.topology is None else self.topology.put_replicated(tree))

    def _require_distributing(self, method: str) -> None:
        context.require_cross_replica(method, self, "distribute the dataset outside the replica function")
        context.require_not_running(method, "distribute it outside the step")

    def in_program(self, key: Any, fn: Callable[[Any], Any], value: Any) -> Any:
        """Returns `fn(value)`, computed in the program that is traced, or in one of its own under that key. In cross-replica context."""
        on_all = lambda v: self.on_all_workers(fn(v))  # noqa: E731
        if innermost() is not None:
            return on_all(value)
        return context.call_in(self._cross_replica, self._programs.call, self._programs, on_all, (value,), {}, key=key)

    def on_all_workers(self, tree: Any) -> Any:
        """Gives every process the whole of each array. Inside a program."""
        if self.topology is None or self.topology.num_workers == 1:
            return tree
        whole = self.topology.replicated
        place = lambda x: jax.lax.with_sharding_constraint(x, whole) if isinstance(x, jax.Array) else x  # noqa: E731
        return jax.tree.map(place, tree)

    def _content(self, value: Any) -> Any:
        """Returns a variable as the distributed value it is; other values as they are."""
        if not isinstance(value, keras.Variable):
            return _checked_array(value)
        n, scope = self.num_replicas_in_sync, innermost()
        if n == 1 or not policy_of(value).on_read or (scope is not None and scope.mapped):
            return value.value
        parts = components_of(value) if scope is None else scope.components(value, n)
        return PerReplica(initial_components(value, value.value, n) if parts is None else parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Returns a strategy over the same devices, with programs of its own."""
        other = object.__new__(type(self))
        other.__dict__.update(
            self.__dict__, _programs=Programs(), _cross_replica=Mode(other, None), _number=next(_numbers)
        )
        return other

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"pickle of {self!r}", "it holds devices of this process.", "make the strategy in the process that uses it"
        )

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"copy.copy({self!r})", "two strategies would share the same programs.", "make another strategy"
        )

    def __repr__(self) -> str:
        names = [] if self.topology is None else list(map(device_name, self.topology.devices))
        return f"{type(self).__name__}({names})"


def living_strategies() -> tuple[Strategy, ...]:
    """Returns all strategies of this process that somebody holds."""
    return tuple(_living)


class Scope:
    """The context manager that `Strategy.scope` returns."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._open: list[ExitStack] = []

    def __enter__(self) -> Strategy:
        _require_enterable(self._strategy)
        with ExitStack() as stack:
            if self._strategy.storage is not None:
                stack.enter_context(context.enter(Mode(self._strategy, None)))
                home = self._strategy.storage.of_new_variables
                if home is not None:
                    stack.enter_context(compat.variable_layout(home.sharding_of, home.mesh))
            self._open.append(stack.pop_all())
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        self._open.pop().__exit__(*exception)


def explain_sharding(
    dataset: Any, strategy: Strategy, options: InputOptions | None = None, *, batch_size: int | None = None
) -> Sequence[WorkerShard]:
    """Returns what each worker of a strategy reads of a dataset. May be called in any context.

    Args:
      dataset: what is passed to `Strategy.experimental_distribute_dataset`, or what it returned.
      strategy: the strategy.
      options: those that are passed beside it.
      batch_size: likewise.

    Raises:
      InputError: the dataset cannot be divided.
      InvalidArgumentError: `strategy` is not a strategy.

    Example:
      >>> import numpy as np, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> for shard in phalanx.explain_sharding(np.arange(100), strategy, batch_size=8):
      ...     print(shard)
      worker 0 of 1 reads all records of 100 (DATA)
    """
    check_strategy("strategy", strategy, "explain_sharding(dataset, strategy)")
    return shards_of(dataset, strategy.topology, check_options(options), batch_size)


def _require_enterable(strategy: Strategy) -> None:
    if not context.depth():
        return
    mode = context.current()
    if mode.strategy is not strategy and strategy.topology is None:
        raise ContextError(
            "the default strategy's scope", f"inside the scope of {mode.strategy!r}.", "leave that scope first"
        )
    if mode.strategy is not strategy:
        raise MixedStrategyError(
            f"the scope of {strategy!r}",
            f"inside that of {mode.strategy!r}; one strategy at a time.",
            "leave the other scope first",
        )
    if mode.replica is not None:
        raise ContextError(
            "Strategy.scope in replica context",
            "it is for cross-replica context.",
            "phalanx.get_replica_context().merge_call(fn)",
        )


def _stacked(results: Sequence[Any]) -> Any:
    """Returns what one `run` after the other returned as `run_steps` stacks it."""
    first = results[0]
    if isinstance(first, Mirrored):
        return Mirrored(jax.tree.map(lambda *xs: jnp.stack(xs), *(r.value for r in results)))
    if not isinstance(first, PerReplica):
        return jnp.stack(results)
    batch = first.batch and _stacked_masks([r.batch for r in results])
    return PerReplica(jnp.stack([r.data for r in results], axis=1), batch if first.rows else None, batch)


def _stacked_masks(rows: Sequence[RowMask]) -> RowMask:
    return RowMask(jnp.stack([r.mask for r in rows], axis=1), jnp.stack([r.count for r in rows]))


def _first_steps(value: Any, count: int) -> Any:
    """Returns the first steps of what `run_steps` stacked."""
    if isinstance(value, Mirrored):
        return Mirrored(jax.tree.map(lambda x: x[:count], value.value))
    if not isinstance(value, PerReplica):
        return value[:count] if isinstance(value, jax.Array) else value
    batch = value.batch and RowMask(value.batch.mask[:, :count], value.batch.count[:count])
    return PerReplica(value.data[:, :count], batch if value.rows else None, batch)


def _checked_array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        primitives.check_arrays(value)
    return value


def _mask_of(value: Any) -> Any:
    """Returns which rows of a padded value are real, as a per-replica value; something else for other values."""
    return PerReplica(value.rows.mask) if isinstance(value, PerReplica) and value.rows else 0


def _real_rows(value: Any, whole: Any, mask: Any) -> Any:
    return whole[np.flatnonzero(np.asarray(mask))] if isinstance(value, PerReplica) and value.rows else whole
