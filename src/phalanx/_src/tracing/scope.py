# SPDX-License-Identifier: Apache-2.0
"""The scope of a traced function: its variables, gradients, means over rows, batches and records."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.collectives.gradient_path import Aggregation
from phalanx._src.collectives.local_updates import Applied, LocalUpdates, synchronizations
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.requirements import warn_if_whole
from phalanx._src.tracing import context, draws
from phalanx._src.tracing.access import VariableScope, num_replicas
from phalanx._src.tracing.batch_share import BatchShare
from phalanx._src.tracing.discovery import AbstractPass
from phalanx._src.tracing.draws import AbstractIterator
from phalanx._src.tracing.policy import describe, policy_of
from phalanx._src.tracing.records import Record
from phalanx._src.tracing.strategy import AbstractStrategy, Update, Updates
from phalanx._src.tracing.structure import add_once
from phalanx._src.tracing.update_sharding import dims_of_update
from phalanx.errors import InvalidArgumentError, NestedWriteError, VariableError
from phalanx.errors.frames import user_place


class LiftScope(VariableScope):
    """The scope of a traced function: what it does besides reading and writing variables.

    Args:
      current_pass: the pass that runs the function.
      mapped: whether the function runs under `shard_map`, for one of several replicas.

    Attributes:
      updates: optimizer updates that run after the program.
      aggregations: number of times that gradients were aggregated.
      records: what the function has recorded for summaries. None if records cannot leave it.
    """

    def __init__(self, current_pass: AbstractPass, *, mapped: bool = False) -> None:
        super().__init__(current_pass, mapped=mapped)
        self.updates: list[Update] = []
        self.records: list[Record] | None = []
        self.aggregations = 0

    def draw(self, iterator: AbstractIterator, *, is_optional: bool = False) -> tuple[Any] | None:
        """Returns the next batch of an iterator, in a 1-tuple, as inputs of the program. None if the iterator is at its end.

        Raises:
          ContextError: called in a replica function or in an inner trace.
        """
        # A single replica is not mapped. The context of the default strategy, outside all scopes, has a replica too.
        in_replica = context.depth() > 0 and context.current().replica is not None
        if self.mapped or in_replica or self.inner_traces.is_inside:
            raise draws.refuse_draw()
        return self.pass_.draw(iterator, is_optional=is_optional)

    @override
    def fold_seed(self, seed: jax.Array, state: Variable) -> jax.Array:
        add_once(state, self.pass_.notes.seeds)
        # All replicas hold the same state, so each folds in its number to draw its own numbers.
        return seed if num_replicas() == 1 else jax.random.fold_in(seed, lax.axis_index(REPLICA_AXIS))

    @override
    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        strategy = context.get_strategy()
        # Not again for the deferred update, which runs outside the replicas.
        topology = strategy.topology
        if topology.layout is not None and topology.is_chief and context.current().replica is not None:
            trained, read = compat.trained_by(optimizer, variables), [e.variable for e in self.entries.values()]
            warn_if_whole(topology.layout, _shapes(trained), _shapes(read), dict(topology.mesh.shape))
        deferred = (Updates.AFTER_PROGRAM, Updates.AFTER_REPLICAS) if self.mapped else (Updates.AFTER_PROGRAM,)
        if grads and strategy.updates in deferred:
            self._defer_gradients(strategy, optimizer, grads, variables)
            return
        add_once(optimizer, self.pass_.notes.optimizers)
        if self.free_writes:
            self._apply(optimizer, apply, grads, variables)
            return
        self.aggregations += 1
        local = strategy.local_updates
        if local is not None:
            compat.build_optimizer(optimizer, variables)
            _require_local(local, optimizer, compat.trained_by(optimizer, variables))
        trained = compat.trained_by(optimizer, variables)
        dims = self._dims_of_shards(strategy, optimizer, trained)
        full = None if num_replicas() == 1 else strategy.aggregate_gradients
        if dims:
            full = partial(strategy.divide_gradients, dims=[dims.get(id(v)) for v in trained])
        path = Aggregation(full, num_replicas(), strategy.compression, local).path(optimizer, grads, variables)
        grads, state = path.sum(_weight(grads), [self.get_current_value(v) for v in path.variables])
        self._update(path.variables, state)
        if dims:
            with self.updating(), compat.known_learning_rate(optimizer):
                self._apply_to_shards(optimizer, apply, grads, trained, dims)
        else:
            self._apply(optimizer, apply, grads, variables)
        if local is not None:
            self._synchronize(local, optimizer, compat.trained_by(optimizer, variables))

    def _dims_of_shards(
        self, strategy: AbstractStrategy, optimizer: keras.optimizers.Optimizer, trained: Sequence[Variable]
    ) -> dict[int, int]:
        """Returns the dims along which the replicas share the update of some variables and their slots, by id."""
        if not (self.mapped and strategy.topology.shards_updates):
            return {}
        compat.build_optimizer(optimizer, trained)
        return dims_of_update(strategy.topology, optimizer, trained)

    def _apply_to_shards(
        self,
        optimizer: keras.optimizers.Optimizer,
        apply: Callable[..., None],
        grads: Sequence[Any],
        trained: Sequence[Variable],
        dims: dict[int, int],
    ) -> None:
        """Applies an update of which each replica computes its shards of some variables and slots. Call it in update context.

        Args:
          optimizer: the optimizer.
          apply: applies it.
          grads: one gradient per variable, or None: of a shard if the variable has a dim in `dims`.
          trained: the variables.
          dims: see `_dims_of_shards`.
        """
        state = [(v, dims.get(id(v))) for v in (*trained, *optimizer.variables)]
        before = [self.get_current_value(v) if dim is None else self.entry(v).shard(dim) for v, dim in state]
        values = [(v, x) for (v, _), x in zip(state, before, strict=True)]
        # A plain scope of Keras, because the optimizer assigns shards, which do not have the shapes of the variables.
        with compat.shapes([(v, x.shape) for v, x in values]), keras.StatelessScope(values) as inner:
            apply(grads, trained)
        for (variable, dim), value in zip(state, before, strict=True):
            new = inner.get_current_value(variable)
            if new is value:  # The optimizer has not assigned it.
                continue
            if dim is None:
                variable.assign(new)
            else:
                self.inner_traces.values_change()
                self.entry(variable).put_shard(new, dim)

    def _apply(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        with self.updating():
            # The `apply` of a loss-scaling optimizer assigns variables inside `lax.cond`, which JAX does not allow.
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                compat.apply_stateless(optimizer, grads, variables)
            else:
                apply(grads, variables)

    def _synchronize(
        self, local: LocalUpdates, optimizer: keras.optimizers.Optimizer, trained: Sequence[Variable]
    ) -> None:
        """Synchronizes what is due after this replica has updated its variables."""
        written = [e.variable for e in self.entries.values() if e.written and e.policy.on_demand]
        full = context.get_strategy().aggregate_gradients
        for each in synchronizations(local, Applied(optimizer, trained, written, full, num_replicas())):
            values = [self.get_current_value(v) for v in each.variables]
            with self.updating():
                values = each.run(values)
            self._update(each.variables, values)

    def _defer_gradients(
        self, strategy: AbstractStrategy, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Any
    ) -> None:
        """Aggregates gradients, and defers the update of their variables."""
        if compat.store() is not None:
            # Slots that are found by name must exist while the store is open. The update runs later.
            compat.build_optimizer(optimizer, variables)
        trained = compat.trained_by(optimizer, variables)
        if len(grads) != len(trained):
            raise InvalidArgumentError(
                f"{type(optimizer).__name__}.apply was called with len(grads)={len(grads)}",
                f"the number of variables is {len(trained)}.",
                "pass one gradient per variable",
            )
        # In update context, and with one replica, gradients are equal on all replicas and need not be scattered.
        is_whole = self.free_writes > 0 or num_replicas() == 1
        dims = tuple(
            None if is_whole or g is None else _sharded_dim(strategy, v) for g, v in zip(grads, trained, strict=True)
        )
        self.defer_update(Update(optimizer, trained, list(self.aggregated(grads, dims)), dims))

    def defer_update(self, update: Update) -> None:
        """Defers an update until the program has ended. It then runs on the devices that hold the variables."""
        self.inner_traces.require_outside(
            f"{type(update.optimizer).__name__}.apply was called", "call strategy.run once per step"
        )
        self.updates.append(update)
        self._deferred.update(id(v) for v in (*update.variables, *update.optimizer.variables))

    def record(self, record: Record) -> None:
        """Adds a record to the outputs of the function.

        Raises:
          NestedWriteError: called in an inner trace, which the value cannot leave.
        """
        call, hint = f"phalanx.summary.{record.kind}({record.tag!r}, ...)", "return the value, and record it outside"
        self.inner_traces.require_outside(call, hint)
        if self.records is None:
            raise NestedWriteError(
                f"{call} at {user_place()}",
                "the call is inside a body of phalanx.scan, cond or while_loop, and a record cannot leave it.",
                hint,
            )
        self.records.append(record)

    def apply_update(self, strategy: AbstractStrategy, update: Update) -> None:
        """Applies an update that the replicas have deferred, in the cross-replica part of the program."""
        with context.enter(context.Mode(strategy, None)):
            update.optimizer.apply(update.gradients, update.variables)

    @override
    def aggregated(self, grads: Sequence[Any], dims: Sequence[int | None] = ()) -> Sequence[Any]:
        # In update context the gradients are aggregated already. A second sum would multiply them.
        if self.free_writes:
            return grads
        self.aggregations += 1
        grads = _weight(grads)
        if num_replicas() == 1:
            return grads
        strategy = context.get_strategy()
        if strategy.compression is not None:
            raise _refuse_stateless_apply("compression")
        if any(dim is not None for dim in dims):
            return strategy.divide_gradients(grads, dims)
        return strategy.aggregate_gradients(grads)

    def _update(self, variables: Sequence[Variable], values: Sequence[jax.Array]) -> None:
        with self.updating():
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    @override
    def check_stateless_apply(self) -> None:
        mode = context.current()
        if mode.replica is not None and mode.strategy.local_updates is not None and not self.free_writes:
            raise _refuse_stateless_apply("local_updates")

    @property
    @override
    def share(self) -> compat.AbstractBatchShare:
        return BatchShare(self)


def innermost() -> LiftScope | None:
    """Returns the scope of the function that is being traced, or None."""
    scope = compat.lift_scope()
    # `isinstance` of an abstract class is a call of Python, which most steps of `run` do not need.
    return scope if scope is not None and isinstance(scope, LiftScope) else None


def program_scope() -> LiftScope:
    """Returns the scope of the program that is being traced. Call it only while a program is traced."""
    scope = innermost()
    assert scope is not None
    return scope


def _refuse_stateless_apply(option: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"optimizer.stateless_apply under a strategy with {option}",
        "it names no variables, so the optimizer has no place for what the replicas have not sent.",
        "optimizer.apply(gradients, variables)",
    )


def _shapes(variables: Sequence[Variable]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the path by which a layout knows each variable, and its shape."""
    return [(compat.layout_path(v), tuple(v.shape)) for v in variables]


def _require_local(local: LocalUpdates, optimizer: keras.optimizers.Optimizer, trained: Sequence[Variable]) -> None:
    """Checks that each replica can train on its own.

    Raises:
      InvalidArgumentError: the optimizer scales its loss.
      VariableError: the replicas do not have their own values of a trained variable.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} under a strategy with local_updates={type(local).__name__}",
            "replicas whose gradients overflow would skip updates that the others make.",
            "the dtype policy mixed_bfloat16, whose losses need no scale",
        )
    for variable in trained:
        if not policy_of(variable).on_demand:
            raise VariableError(
                f"{describe(variable)} under a strategy with local_updates={type(local).__name__}",
                "a replica cannot have its own value of it, because it was created outside the scope, or with an "
                "aggregation other than the mean.",
                "with strategy.scope(): model = make_model()",
            )


def _sharded_dim(strategy: AbstractStrategy, variable: Variable) -> int | None:
    """Returns the dim along which the replicas hold shards of a variable and of its gradient. None if they hold the whole."""
    return strategy.topology.divided_dim(compat.layout_path(variable), variable.shape)


def _weight(grads: Sequence[Any]) -> Sequence[Any]:
    """Weights gradients of means over this replica's rows, such that the sum over the replicas is that of the global mean.

    A replica without rows has no gradients, whatever it has computed.
    """
    mode = context.current()
    if mode.replica is None:
        return grads
    if mode.averaging:
        weight = jnp.asarray(mode.replica.weight)
        grads = [None if g is None else g * weight.astype(g.dtype) for g in grads]
    rows = mode.replica.rows
    return grads if rows is None else [None if g is None else rows.with_rows(g) for g in grads]
