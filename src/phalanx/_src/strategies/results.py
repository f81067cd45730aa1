# SPDX-License-Identifier: Apache-2.0
"""The methods of a strategy that combine the components of distributed values."""

from collections.abc import Callable
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import keras

from phalanx._src import compat
from phalanx._src.collectives import primitives
from phalanx._src.collectives.cross_device import CrossDeviceOps
from phalanx._src.mesh.values import DistributedValues, Mirrored, PerReplica, differs, flatten, map_leaves
from phalanx._src.options import ReduceOp
from phalanx._src.programs.replicas import trace_run
from phalanx._src.programs.slots import components_of
from phalanx._src.strategies.reduction import (
    Axis,
    check_components,
    check_dim,
    check_mergeable,
    checked_axis,
    gather_leaf,
    reduce_leaf,
)
from phalanx._src.tracing import context
from phalanx._src.tracing.policy import initial_components, policy_of
from phalanx._src.tracing.scope import innermost
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx._src.typed_jax import with_sharding_constraint
from phalanx.errors.frames import boundary
from phalanx.typing import PyTree

T = TypeVar("T")


class AbstractResults(AbstractStrategy):
    """Reduces, gathers and unpacks values that differ between replicas."""

    @final
    @boundary
    def reduce(self, reduce_op: ReduceOp | str, value: PyTree, axis: Axis) -> PyTree:
        """Reduces per-replica values over the replicas. Call it in cross-replica context or outside all scopes.

        Sums have the dtypes of `jnp.sum`, and means those of `jnp.mean`.

        Args:
          reduce_op: SUM or MEAN.
          value: a pytree of `PerReplica` values or variables.
          axis: None reduces element by element over the replicas. A dim or a tuple of dims is reduced within each
            replica, too. A mean over rows is the sum of all real rows divided by their number, regardless of how the
            rows are distributed.

        Returns:
          A pytree of arrays.

        Raises:
          ContextError: called in replica context.
          ReduceOpError: the operation is unknown, a dim does not exist, a value is of bools, or a value to be summed is not per
            replica.
          InputError: the components have different numbers of rows, and `axis` does not include dim 0.

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
        axis = checked_axis(axis)
        check_components(flatten(value)[0])
        value = map_leaves(self._content, value)
        leaf = lambda x: self._reduce_leaf(op, x, axis)  # noqa: E731
        # One component is its own sum and mean, so no program is dispatched.
        if axis is None and self.num_replicas_in_sync == 1:
            return map_leaves(leaf, value)
        return self.in_program(("reduce", op, axis), lambda v: map_leaves(leaf, v), value)

    @property
    def _merging_ops(self) -> CrossDeviceOps | None:
        """The cross-device operations that every reduction must use. None if any sum gives the same result."""
        ops = self.cross_device_ops
        return None if ops is None or ops.adds else ops

    def _reduce_leaf(self, op: ReduceOp, value: object, axis: Axis) -> PyTree:
        ops, n = self._merging_ops, self.num_replicas_in_sync
        if ops is None or not isinstance(value, PerReplica):
            return reduce_leaf(value, op, axis, n, ops)
        check_mergeable(value, axis)
        # These operations work only between the replicas of a running program.
        return self.merged(lambda x: reduce_leaf(x, op, axis, n, ops), value)

    def merged(self, fn: Callable[..., Any], *values: PerReplica) -> PyTree:
        """Returns `fn(*values)`, computed in a merge function of all replicas.

        Called inside a program, in cross-replica context.
        """

        def replica_fn(*local: PyTree) -> Mirrored:
            return Mirrored(context.require_replica().merge_call(lambda _, *merging: fn(*merging), args=local))

        return trace_run(self, replica_fn, values, {}).value

    @final
    @boundary
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the components of a per-replica value, in replica order.

        Call it in cross-replica context or outside all scopes.

        Args:
          value: a pytree of `PerReplica` values. Other values are returned unchanged.
          axis: the dim along which to concatenate. The components may have different sizes in it.

        Returns:
          A pytree of arrays.

        Raises:
          ContextError: called in replica context.
          ReduceOpError: a leaf does not have the dim `axis`.
          InputError: the components have different sizes in another dim.

        Example:
          >>> import jax.numpy as jnp, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> value = strategy.run(lambda: jnp.ones(2) * phalanx.get_replica_context().replica_id_in_sync_group)
          >>> strategy.gather(value, axis=0)
          Array([0., 0., 1., 1.], dtype=float32)
        """
        context.require_cross_replica("Strategy.gather", self, "phalanx.get_replica_context().all_gather(value, axis)")
        axis = check_dim(axis)
        check_components(flatten(value)[0])
        leaf = lambda x: gather_leaf(x, axis, self.num_replicas_in_sync)  # noqa: E731
        value = map_leaves(_checked_array, value)
        return self.in_program(("gather", axis), lambda v: map_leaves(leaf, v), value)

    @final
    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns the components of the replicas of this process, in replica order.

        Call it in cross-replica context or outside all scopes. Each array is on the device of its replica, but not committed to
        it, so that components can be combined: `sum(results)` and `jnp.stack(results)` copy them to JAX's default device.

        Args:
          value: a distributed value, a variable, or a pytree of them.

        Returns:
          A tuple with one value or pytree per local replica. `(value,)` if `value` is not distributed.

        Raises:
          ContextError: called in replica context.

        Example:
          >>> import phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> value = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group + 1)
          >>> [int(x) for x in strategy.experimental_local_results(value)]
          [1, 2]
        """
        context.require_cross_replica(
            "experimental_local_results", self, "use the value directly, because this code already runs in a replica"
        )
        if isinstance(value, keras.Variable):
            value = self._content(value)
            # Copies them, because the next step donates the arrays of the variable.
            mirrored = not differs(value) and self.num_replicas_in_sync > 1
            value = Mirrored(jnp.copy(value)) if mirrored else jax.tree.map(jnp.copy, value)
        if isinstance(value, DistributedValues):
            return value.values
        leaves, tree = flatten(value)
        if not any(isinstance(x, DistributedValues) for x in leaves):
            return (value,)
        n = len(self.topology.local_replicas)
        parts = [x.values if isinstance(x, DistributedValues) else (x,) * n for x in leaves]
        return tuple(tree.unflatten(p) for p in zip(*parts, strict=True))

    def on_all_workers(self, tree: PyTree) -> PyTree:
        """Replicates each array, so that every process can read the whole array. Called inside a program."""
        if self.topology.num_workers == 1 and self.storage is self.topology:
            return tree
        whole = self.topology.replicated
        place = lambda x: with_sharding_constraint(x, whole) if isinstance(x, jax.Array) else x  # noqa: E731
        return jax.tree.map(place, tree)

    def _content(self, value: PyTree) -> PyTree:
        """Returns the value of a variable (a `PerReplica` if its components differ), and other values unchanged."""
        if not isinstance(value, keras.Variable):
            return _checked_array(value)
        n, scope = self.num_replicas_in_sync, innermost()
        # In a merge function, a read gives the combined value of an on-read variable.
        if n == 1 or not policy_of(value).on_read or (scope is not None and scope.mapped):
            return value.value
        parts = components_of(value) if scope is None else scope.components(value, n)
        # The parts do not exist before the first program, and after an assignment outside of programs.
        return PerReplica(initial_components(value, value.value, n) if parts is None else parts)


def _checked_array(value: T) -> T:
    if isinstance(value, jax.Array):
        compat.require_live_outside_steps(value)
        primitives.check_arrays(value)
    return value
