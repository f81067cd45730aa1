# SPDX-License-Identifier: Apache-2.0
"""`strategy.extended`: a thin view for code written against tf.distribute's."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import jax
import keras

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.collectives.cross_device import check_destinations, checked_options, checked_pairs
from phalanx.errors import ContextError, InvalidArgumentError, arguments
from phalanx.mesh.devices import device_name
from phalanx.mesh.values import DistributedValues, Mirrored, PerReplica, ReplicaLocal
from phalanx.options import CommunicationOptions, ReduceOp
from phalanx.strategies.reduction import check_components, reduce_leaf
from phalanx.tracing import context
from phalanx.tracing.policy import check_variable, describe
from phalanx.tracing.scope import innermost
from phalanx.tracing.strategy import AbstractStrategy, check_strategy


@final
class StrategyExtended:
    """The methods of `tf.distribute.StrategyExtended`. In cross-replica context: a scope or a merge function.

    Args:
      container_strategy: the strategy it belongs to.

    Raises:
      InvalidArgumentError: it is not a strategy.
    """

    def __init__(self, container_strategy: AbstractStrategy) -> None:
        check_strategy("container_strategy", container_strategy, "strategy.extended")
        self._strategy = container_strategy

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduces a per-replica value and leaves the result with every replica.

        Args:
          reduce_op: SUM or MEAN.
          value: a `PerReplica`, or an argument of a merge function.
          destinations: a value, a variable or a device name.
          options: hints for this call.

        Returns:
          In a merge function an array; elsewhere a `Mirrored` (with one replica an array).

        Raises:
          ContextError: called in replica context.
          InvalidArgumentError: no destinations.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several values at once, which lets them share buffers. See `reduce_to`."""
        op = ReduceOp.parse(reduce_op)
        context.require_cross_replica(
            "reduce_to", self._strategy, f'get_replica_context().all_reduce("{op.value}", value)'
        )
        values, options = [v for v, _ in checked_pairs(value_destination_pairs)], checked_options(options)
        ops, n = self._strategy.cross_device_ops, self._strategy.num_replicas_in_sync
        primitives.check_arrays([v for v in values if not isinstance(v, DistributedValues)])
        if ops is None or not any(isinstance(v, (PerReplica, ReplicaLocal)) for v in values):
            return [reduce_leaf(op, v, None, n) for v in values]
        merge = lambda *local: ops.batch_reduce(op, [(v, v) for v in local], options)  # noqa: E731
        if any(isinstance(v, ReplicaLocal) for v in values):
            return merge(*values)
        check_components(values)
        merged = lambda local: self._strategy.merged(merge, *local)  # noqa: E731
        return list(map(Mirrored, self._strategy.in_program(("reduce_to", op, options), merged, values)))

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Gives every replica the value: an array becomes `Mirrored`; a number stays as it is."""
        context.require_cross_replica("broadcast_to", self._strategy, "a replica function has the value already")
        check_destinations(destinations)
        if not isinstance(tensor, DistributedValues):
            primitives.check_arrays(tensor)
        if isinstance(tensor, (int, float, complex)) or innermost() is not None:
            return tensor
        return self._strategy.replicate(tensor)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`Strategy.run` under its older name."""
        return self._strategy.run(fn, args, kwargs)

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` in update context, where assignments are free.

        Args:
          var: the variable to update.
          fn: assigns to it; its arguments must be equal on all replicas.
          args: more arguments for it.
          kwargs: keyword arguments for it.
          group: whether to return one result, or a tuple with one per replica of this process. `fn` is called once.

        Raises:
          ContextError: called in replica context, or with an argument that differs between replicas.
          InvalidArgumentError: `var` is not a variable, `fn` is not callable, or `args` is neither a list nor a tuple.
        """
        context.require_cross_replica("extended.update", self._strategy, "get_replica_context().merge_call(fn)")
        check_variable("var", var, "strategy.extended.update(variable, fn, args=(value,))")
        arguments.function("fn", fn, "lambda variable, value: variable.assign(value)")
        args, kwargs = arguments.of_call(args, kwargs)
        for value in jax.tree.leaves((args, kwargs or {}), is_leaf=_is_per_replica):
            if _is_per_replica(value):
                raise ContextError(
                    f"extended.update of {describe(var)}",
                    "an argument differs between replicas, and so would the variable.",
                    "strategy.extended.reduce_to(op, value, var) first",
                )
        args, kwargs = jax.tree.map(_unwrapped, (tuple(args), kwargs or {}), is_leaf=_is_mirrored)
        scope = innermost()
        with nullcontext() if scope is None else scope.updating():
            result = fn(var, *args, **kwargs)
        if arguments.flag("group", group):
            return result
        topology = self._strategy.topology
        copies = 1 if self._strategy.lends_variables else len(topology.local_replicas)
        return (result,) * copies

    def colocate_vars_with(self, colocate_with_variable: keras.Variable) -> AbstractContextManager[None]:
        """Returns a context manager for variables that belong where another one lives; all of a strategy's do.

        Raises:
          InvalidArgumentError: that variable was not made in this strategy's scope.
        """
        check_variable("colocate_with_variable", colocate_with_variable, "colocate_vars_with(variable)")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"colocate_vars_with({describe(colocate_with_variable)})",
                "it was not made in this strategy's scope.",
                "with strategy.scope(): v = keras.Variable(...)",
            )
        return nullcontext()

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Returns whether `v` was made in this strategy's scope."""
        number = compat.maker_of(check_variable("v", v, "variable_created_in_scope(variable)"))
        return not self._strategy.topology.has_devices if number is None else number == self._strategy.number

    def value_container(self, value: Any) -> Any:
        """Returns the variable that `value` is a component of: itself, for variables have no components of their own."""
        return value

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of this process's devices that run replicas, in replica order: of each replica the first."""
        topology = self._strategy.topology
        if not topology.has_devices:
            raise ContextError(
                "worker_devices of the default strategy",
                "it does not place anything.",
                'phalanx.OneDeviceStrategy("cpu:0")',
            )
        return topology.local_names

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables, in replica order, of each replica the first; or of their one device."""
        storage = self._strategy.storage
        if not self._strategy.lends_variables:
            return self.worker_devices
        return tuple(map(device_name, storage.first_devices))

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether `run` says that it needs static shapes; every compiled program does."""
        return self._strategy.requires_static_shapes

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: the first of several."""
        return self._is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: the first of several."""
        return self._is_chief

    @property
    def _is_chief(self) -> bool:
        return self._strategy.topology.worker_index == 0


def _is_per_replica(value: object) -> bool:
    return isinstance(value, (PerReplica, ReplicaLocal))


def _is_mirrored(value: object) -> bool:
    return isinstance(value, Mirrored)


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Mirrored) else value
