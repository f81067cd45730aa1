# SPDX-License-Identifier: Apache-2.0
"""The verbs of a strategy that make one value of what the replicas hold."""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx.collectives import primitives
from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.errors import ContextError
from phalanx.errors.frames import boundary
from phalanx.mesh.values import DistributedValues, Mirrored, PerReplica, flatten, is_distributed, map_leaves
from phalanx.options import ReduceOp
from phalanx.programs.replicas import trace_run
from phalanx.programs.state import components_of
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
from phalanx.tracing.policy import initial_components, policy_of
from phalanx.tracing.scope import innermost
from phalanx.tracing.strategy import AbstractStrategy


class AbstractResults(AbstractStrategy):
    """What a strategy makes of values that differ between replicas."""

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
        n = len(self.topology.local_replicas)
        parts = [x.values if isinstance(x, DistributedValues) else (x,) * n for x in leaves]
        return tuple(tree.unflatten(p) for p in zip(*parts, strict=True))

    def on_all_workers(self, tree: Any) -> Any:
        """Gives every process the whole of each array. Inside a program."""
        if self.topology.num_workers == 1:
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


def _checked_array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        primitives.check_arrays(value)
    return value


def _mask_of(value: Any) -> Any:
    """Returns which rows of a padded value are real, as a per-replica value; something else for other values."""
    return PerReplica(value.rows.mask) if isinstance(value, PerReplica) and value.rows else 0


def _real_rows(value: Any, whole: Any, mask: Any) -> Any:
    return whole[np.flatnonzero(np.asarray(mask))] if isinstance(value, PerReplica) and value.rows else whole
