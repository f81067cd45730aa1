# SPDX-License-Identifier: Apache-2.0
"""`Strategy`: the public verbs, over a few hooks that a strategy overrides."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import NoneType
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx import compat, context, lifting
from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.context import Mode
from phalanx.errors import ContextError, InvalidArgumentError, MixedStrategyError
from phalanx.function import Programs
from phalanx.input.distributed import DistributedDataset, ValueContext, distribute_values
from phalanx.options import ReduceOp, RunOptions
from phalanx.replicate import trace_run
from phalanx.state import components_of
from phalanx.strategies.extended import StrategyExtended
from phalanx.strategies.reduction import Axis, check_axis, check_components, gather_leaf, reduce_leaf
from phalanx.topology import Topology, device_name
from phalanx.values import DistributedValues, Mirrored, PerReplica, flatten, is_distributed, map_leaves
from phalanx.variables import initial_components, policy_of


class Strategy(ABC):
    """Where variables live and where replicas run.

    The verbs below are the same for all strategies. A strategy of your own overrides `topology`, and where it differs
    `cross_device_ops`, `cluster_resolver`, `aggregate_gradients` and `execute`.
    """

    def __init__(self) -> None:
        self._programs = Programs()
        self._cross_replica = Mode(self, None)

    # Hooks.

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """The devices of the replicas; None where values stay where they are."""

    @property
    def cross_device_ops(self) -> CrossDeviceOps | None:
        """How gradients cross devices; None where there is one replica."""
        return None

    @property
    def cluster_resolver(self) -> None:
        """The resolver of the cluster; None on one machine. May be called in any context."""
        return None

    def aggregate_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas, inside a program; None stays None."""
        assert self.cross_device_ops is not None
        given = [g for g in grads if g is not None]
        summed = iter(self.cross_device_ops.batch_reduce(ReduceOp.SUM, [(g, g) for g in given]))
        return [None if g is None else next(summed) for g in grads]

    def execute(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: RunOptions) -> Any:
        """Runs a replica function outside all programs."""

        def program(*args: Any, **kwargs: Any) -> Any:
            scope = lifting.innermost()
            assert scope is not None
            return trace_run(self, fn, args, kwargs, scope)

        token = context.push(self._cross_replica)
        try:
            return self._programs.call(fn, program, args, kwargs, eager=options.eager)
        finally:
            context.pop(token)

    # Verbs.

    @property
    @final
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are aggregated. May be called in any context."""
        return 1 if self.topology is None else self.topology.num_replicas

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
        if not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(f"args={args!r}", "positional arguments must be a list or a tuple.", "args=(x,)")
        if not callable(fn):
            raise InvalidArgumentError(f"fn={fn!r}", "is not callable.", "strategy.run(step, args=(batch,))")
        if not isinstance(options, (RunOptions, NoneType)):
            raise InvalidArgumentError(
                f"options={options!r}", "must be RunOptions or None.", "options=RunOptions(eager=True)"
            )
        context.require_cross_replica(
            "Strategy.run", self, "call the function itself: you are inside a replica already"
        )
        context.require_not_running("Strategy.run", "strategy.reduce or strategy.extended.update")
        scope = lifting.innermost()
        if scope is None:
            return self.execute(fn, tuple(args), kwargs or {}, options or RunOptions())
        if options is not None and options.eager:
            raise ContextError(
                "RunOptions(eager=True) in phalanx.function",
                "the step around it is compiled.",
                "call strategy.run outside phalanx.function",
            )
        return trace_run(self, fn, args, kwargs or {}, scope)

    @final
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
        leaf = lambda x: reduce_leaf(op, x, axis, self.num_replicas_in_sync)  # noqa: E731
        if axis is None and self.num_replicas_in_sync == 1:
            return map_leaves(leaf, value)
        return self._in_program(("reduce", op, axis), lambda v: map_leaves(leaf, v), value)

    @final
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
        check_axis(axis)
        check_components(flatten(value)[0])
        padded = [
            x.rows for x in jax.tree.leaves(value, is_leaf=is_distributed) if isinstance(x, PerReplica) and x.rows
        ]
        if padded and lifting.innermost() is not None:
            raise ContextError(
                "Strategy.gather of a padded batch in phalanx.function",
                "no program knows how many rows are real.",
                "gather outside phalanx.function",
            )
        leaf = lambda x: gather_leaf(x, axis, self.num_replicas_in_sync)  # noqa: E731
        whole = self._in_program(("gather", axis), lambda v: map_leaves(leaf, v), value)
        return jax.tree.map(_real_rows, value, whole, is_leaf=is_distributed) if padded else whole

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
        n = self.num_replicas_in_sync
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
          InvalidArgumentError: the replicas' pytrees, or shapes beyond dim 0, differ.
        """
        context.require_cross_replica(
            "experimental_distribute_values_from_function", self, "compute the value in the replica function"
        )
        context.require_not_running("experimental_distribute_values_from_function", "make the value outside the step")
        n = self.num_replicas_in_sync
        values = [value_fn(ValueContext(i, n)) for i in range(n)]
        return values[0] if self.topology is None or n == 1 else distribute_values(values, self.topology)

    @final
    def experimental_distribute_dataset(
        self, dataset: Any, options: None = None, *, batch_size: int | None = None
    ) -> "DistributedDataset | Any":
        """Splits every global batch of `dataset` into per-replica batches. In cross-replica context or outside all scopes.

        Args:
          dataset: an iterable of batches, each a pytree of arrays `(global_batch, ...)`; or, with `batch_size`, one pytree of
            arrays `(rows, ...)`.
          options: must be None.
          batch_size: the global batch size, for a pytree of arrays.

        Returns:
          A `DistributedDataset`; under the default strategy an iterable of the batches as they are.

        Raises:
          InputError: data that cannot be split.
          ContextError: called in replica context.
        """
        context.require_cross_replica(
            "experimental_distribute_dataset", self, "distribute the dataset outside the replica function"
        )
        context.require_not_running("experimental_distribute_dataset", "distribute it outside the step")
        if options is not None:
            raise InvalidArgumentError(f"options={options!r}", "there are no input options yet.", "leave them out")
        return DistributedDataset(dataset, self.topology, batch_size=batch_size)

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
        return Mirrored(tree if self.topology is None else jax.device_put(tree, self.topology.replicated))

    def _in_program(self, key: Any, fn: Callable[[Any], Any], value: Any) -> Any:
        if lifting.innermost() is not None:
            return fn(value)
        with context.enter(self._cross_replica):
            return self._programs.call(self._programs, fn, (value,), {}, key=key)

    def _content(self, value: Any) -> Any:
        """Returns a variable as the distributed value it is; other values as they are."""
        if not isinstance(value, keras.Variable):
            return value
        n, scope = self.num_replicas_in_sync, lifting.innermost()
        if n == 1 or not policy_of(value).on_read or (scope is not None and scope.mapped):
            return value.value
        parts = components_of(value) if scope is None else scope.entry(value).components
        return PerReplica(initial_components(value, value.value, n) if parts is None else parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Returns a strategy over the same devices, with programs of its own."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _programs=Programs(), _cross_replica=Mode(other, None))
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


class Scope:
    """The context manager that `Strategy.scope` returns."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._open: list[ExitStack] = []

    def __enter__(self) -> Strategy:
        _require_enterable(self._strategy)
        with ExitStack() as stack:
            if self._strategy.topology is not None:
                stack.enter_context(context.enter(Mode(self._strategy, None)))
                stack.enter_context(compat.variable_layout(self._strategy.topology.replicated))
            self._open.append(stack.pop_all())
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        self._open.pop().__exit__(*exception)


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


def _real_rows(value: Any, whole: Any) -> Any:
    if not isinstance(value, PerReplica) or value.rows is None:
        return whole
    return whole[np.flatnonzero(np.asarray(value.rows.mask))]
