# SPDX-License-Identifier: Apache-2.0
"""`strategy.extended`: a thin view with the methods of `tf.distribute.StrategyExtended`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, final

import jax
import keras
from jax.typing import ArrayLike

from phalanx._src import compat
from phalanx._src.collectives import primitives
from phalanx._src.collectives.cross_device import check_destinations, checked_options, checked_pairs
from phalanx._src.mesh.devices import device_name
from phalanx._src.mesh.values import DistributedValues, Mirrored, ReplicaLocal, differs, is_equal_everywhere, unwrapped
from phalanx._src.options import CommunicationOptions, ReduceOp
from phalanx._src.strategies.reduction import check_components, reduce_leaf
from phalanx._src.tracing import context
from phalanx._src.tracing.policy import check_variable, describe
from phalanx._src.tracing.scope import innermost
from phalanx._src.tracing.strategy import AbstractStrategy, Updates, check_strategy
from phalanx.errors import ContextError, InvalidArgumentError, arguments
from phalanx.typing import PyTree

T = TypeVar("T")


@final
class StrategyExtended:
    """The methods of `tf.distribute.StrategyExtended`. `Strategy.extended` creates it.

    Its methods may be called in cross-replica context: in a scope or a merge function, or outside all scopes.

    Args:
      container_strategy: the strategy on which the methods operate.

    Raises:
      InvalidArgumentError: `container_strategy` is not a strategy.

    Source: tf.distribute.StrategyExtended.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     v = keras.Variable(1.0)
      >>> _ = strategy.extended.update(v, lambda v, value: v.assign_add(value), args=(2.0,))
      >>> float(v.value), strategy.extended.worker_devices
      (3.0, ('cpu:0', 'cpu:1'))
    """

    def __init__(self, container_strategy: AbstractStrategy) -> None:
        check_strategy("container_strategy", container_strategy, "strategy.extended")
        self._strategy = container_strategy

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """Reduces a per-replica value. Every replica gets the result. Call it in cross-replica context.

        Args:
          reduce_op: SUM or MEAN.
          value: a `PerReplica`, or an argument of a merge function.
          destinations: a value, a variable or a device name.
          options: hints for this call.

        Returns:
          An array in a merge function or with one replica, otherwise a `Mirrored`.

        Raises:
          ContextError: called in replica context.
          InvalidArgumentError: `destinations` is not a destination.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several values at once, so that they can share buffers. See `reduce_to`."""
        op = ReduceOp.parse(reduce_op)
        context.require_cross_replica(
            "reduce_to", self._strategy, f'get_replica_context().all_reduce("{op.value}", value)'
        )
        values, options = [v for v, _ in checked_pairs(value_destination_pairs)], checked_options(options)
        ops, n = self._strategy.cross_device_ops, self._strategy.num_replicas_in_sync
        primitives.check_arrays([v for v in values if not isinstance(v, DistributedValues)])
        if ops is None or not any(map(differs, values)):
            return [reduce_leaf(v, op, None, n) for v in values]

        def merge(*local: ArrayLike) -> list[jax.Array]:
            return ops.batch_reduce(op, [(v, v) for v in local], options)

        # In a merge function, this code already is a part of the program of the replicas.
        if any(isinstance(v, ReplicaLocal) for v in values):
            return merge(*values)
        check_components(values)
        merged = lambda local: self._strategy.merged(merge, *local)  # noqa: E731
        return list(map(Mirrored, self._strategy.in_program(("reduce_to", op, options), merged, values)))

    def broadcast_to(self, tensor: PyTree, destinations: object) -> PyTree:
        """Copies a value to every replica. Call it in cross-replica context.

        Args:
          tensor: an array, a distributed value or a number.
          destinations: a value, a variable or a device name.

        Returns:
          A number unchanged, and any other value as a `Mirrored`. Inside a program, `tensor` unchanged.

        Raises:
          ContextError: called in replica context.
          InvalidArgumentError: `destinations` is not a destination.
          TraceError: `tensor` was kept from another step.
        """
        context.require_cross_replica(
            "broadcast_to", self._strategy, "use the value directly: the replica function already has it"
        )
        check_destinations(destinations)
        if not isinstance(tensor, DistributedValues):
            primitives.check_arrays(tensor)
        # In a program every replica has the value already, and a Python number needs no device.
        if isinstance(tensor, (int, float, complex)) or innermost() is not None:
            return tensor
        return self._strategy.replicate(tensor)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> PyTree:
        """Calls `Strategy.run`, under its older name."""
        return self._strategy.run(fn, args, kwargs)

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` once, in update context, where `var` may be assigned without aggregation.

        Call it in cross-replica context.

        Args:
          var: the variable to update.
          fn: the function that assigns the variable.
          args: further positional arguments of `fn`, which must be equal on all replicas.
          kwargs: keyword arguments of `fn`, which must be equal on all replicas.
          group: whether to return one result, or a tuple with one result per replica of this process.

        Returns:
          The return value of `fn`, or a tuple of it.

        Raises:
          ContextError: called in replica context, or with an argument that differs between replicas.
          InvalidArgumentError: `var` is not a variable, `fn` is not callable, or `args` is neither a list nor a tuple.
        """
        context.require_cross_replica("extended.update", self._strategy, "get_replica_context().merge_call(fn)")
        check_variable("var", var, "strategy.extended.update(variable, fn, args=(value,))")
        arguments.function("fn", fn, "lambda variable, value: variable.assign(value)")
        args, kwargs = arguments.of_call(args, kwargs)
        for value in jax.tree.leaves((args, kwargs or {}), is_leaf=differs):
            if differs(value):
                raise ContextError(
                    f"extended.update({describe(var)}, ...)",
                    "an argument differs between replicas, so the variable would differ too.",
                    "strategy.extended.reduce_to(op, value, var) first",
                )
        args, kwargs = jax.tree.map(unwrapped, (tuple(args), kwargs or {}), is_leaf=is_equal_everywhere)
        scope = innermost()
        # Outside programs the variable has one value, so there is nothing to aggregate.
        with nullcontext() if scope is None else scope.updating():
            result = fn(var, *args, **kwargs)
        if arguments.flag("group", group):
            return result
        topology = self._strategy.topology
        # Separate storage holds one copy of a variable, not one per replica.
        copies = 1 if self._strategy.updates is Updates.AFTER_PROGRAM else len(topology.local_replicas)
        return (result,) * copies

    def colocate_vars_with(self, colocate_with_variable: keras.Variable) -> AbstractContextManager[None]:
        """Returns a context manager that creates variables on the devices of another variable.

        It has no effect, because all variables of a strategy live on the same devices. May be called in any context.

        Raises:
          InvalidArgumentError: `colocate_with_variable` was not created in the scope of this strategy.
        """
        check_variable("colocate_with_variable", colocate_with_variable, "colocate_vars_with(variable)")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"colocate_vars_with({describe(colocate_with_variable)})",
                "the variable was not created in the scope of this strategy.",
                "with strategy.scope(): v = keras.Variable(...)",
            )
        return nullcontext()

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Returns whether the variable `v` was created in the scope of this strategy. May be called in any context."""
        number = compat.maker_of(check_variable("v", v, "variable_created_in_scope(variable)"))
        # A variable without a number was created outside all scopes, that is, under the default strategy.
        return not self._strategy.topology.has_devices if number is None else number == self._strategy.number

    def value_container(self, value: T) -> T:
        """Returns `value` unchanged: components of variables are not variables. May be called in any context."""
        return value

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The name of the first device of each local replica, in replica order. May be called in any context."""
        topology = self._strategy.topology
        if not topology.has_devices:
            raise ContextError(
                "extended.worker_devices of the default strategy",
                "the default strategy has no devices, because it does not place values.",
                'phalanx.OneDeviceStrategy("cpu:0")',
            )
        return topology.local_names

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables. May be called in any context.

        For variables on the replicas, the first device of each replica of this process, in replica order.
        """
        storage = self._strategy.storage
        if self._strategy.updates is not Updates.AFTER_PROGRAM:
            return self.worker_devices
        return tuple(map(device_name, storage.first_devices))

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether the strategy declares that it needs static shapes, as in tf.distribute. May be called in any context.

        Every compiled program needs static shapes, whatever the value is.
        """
        return self._strategy.requires_static_shapes

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process, the first of several, writes checkpoints. May be called in any context."""
        return self._is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process, the first of several, writes summaries. May be called in any context."""
        return self._is_chief

    @property
    def _is_chief(self) -> bool:
        return self._strategy.topology.is_chief
