# SPDX-License-Identifier: Apache-2.0
"""The scope in which a traced function reads and writes Keras variables.

A variable becomes an input of the trace when the function first uses it, and an output if the function writes it. So users need
not list the variables of a function.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from typing_extensions import override

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.collectives.compression import Compression
from phalanx.compat import Variable
from phalanx.errors import InvalidArgumentError, NestedWriteError, VariableError
from phalanx.errors.frames import user_place
from phalanx.mesh.annotated import get_opaque_trace_state, make_user_context
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.options import ReduceOp
from phalanx.tracing import averages, context, draws
from phalanx.tracing.boundary import combine, combined, first_component
from phalanx.tracing.compressed import CompressedSum
from phalanx.tracing.discovery import AbstractPass, Entry
from phalanx.tracing.draws import AbstractIterator
from phalanx.tracing.local_updates import Applied, LocalUpdates, gradients_of, synchronizations
from phalanx.tracing.policy import Combine, Write, describe, policy_of, refuse_write
from phalanx.tracing.records import Record
from phalanx.tracing.strategy import AbstractStrategy, Update, Updates
from phalanx.tracing.structure import add_once
from phalanx.typing import PyTree

# JAX caches traces of inner functions (under `jax.jit`, and bodies of `jax.lax` loops) by their input shapes and by this context.
# Without the context, a function that closes over a variable would run with the tracers of an earlier program.
# https://github.com/jax-ml/jax/pull/38473 describes the same problem for plain closures.
_trace_key = make_user_context()

# Keys that can be used again, because no inner trace under them has read a variable. A new key per program would fill JAX's
# caches with a copy of every jnp function per model.
_free_keys: list[object] = []


class LiftScope(compat.AbstractLiftScope):
    """The scope in which a traced function reads and writes variables.

    Args:
      current_pass: the pass that runs the function.
      mapped: whether the function runs under `shard_map`, for one of several replicas.

    Attributes:
      pass_: the pass that runs the function.
      mapped: whether the function runs under `shard_map`.
      entries: the variables that were used so far, by id.
      tapes: one function per gradient tape that records. It watches variables that are used for the first time.
      updates: optimizer updates that run after the program.
      aggregations: number of times that gradients were aggregated.
      records: what the function has recorded for summaries. None if records cannot leave it.
    """

    def __init__(self, current_pass: AbstractPass, *, mapped: bool = False) -> None:
        super().__init__(collect_losses=True)
        self.pass_ = current_pass
        self.mapped = mapped
        self.entries: dict[int, Entry] = {}
        self.tapes: list[Callable[[Sequence[Entry]], None]] = []
        self.updates: list[Update] = []
        self.records: list[Record] | None = []
        self._deferred: set[int] = set()
        self._free_writes = 0
        self.aggregations = 0
        self._trace_state: Any = None
        self._averages: set[int] = set()
        self._key: object = None
        self._key_context: Any = None
        self._was_read_inside = False

    @override
    def __enter__(self) -> "LiftScope":
        super().__enter__()
        self._take_key()
        self._trace_state = get_opaque_trace_state()
        return self

    @override
    def __exit__(self, *exception: object) -> None:
        self._drop_key()
        super().__exit__(*exception)

    def values_change(self) -> None:
        """Invalidates cached inner traces that have read variables. Call it before the value of an entry changes."""
        if self._was_read_inside:
            self._drop_key()
            self._take_key()

    @override
    def note_read(self) -> None:
        if not self.is_innermost_trace:
            self._was_read_inside = True

    def _take_key(self) -> None:
        """Enters a key under which JAX has no cached traces that depend on values of variables."""
        # Not `if _free_keys`: another thread may take the last key between the test and `pop`.
        try:
            self._key = _free_keys.pop()
        except IndexError:
            self._key = object()
        self._was_read_inside = False
        self._key_context = _trace_key(self._key)
        self._key_context.__enter__()

    def _drop_key(self) -> None:
        """Leaves the key. It can be used again unless an inner trace under it depends on values of variables."""
        self._key_context.__exit__(None, None, None)
        if not self._was_read_inside:
            _free_keys.append(self._key)

    @property
    def is_innermost_trace(self) -> bool:
        """Whether the current trace is the one in which the scope was entered, not a `jax.lax` body or another inner trace."""
        return bool(self._trace_state == get_opaque_trace_state())

    def entry(self, variable: Variable) -> Entry:
        """Returns the entry of `variable`. The first use creates it."""
        entry = self.entries.get(id(variable))
        if entry is None:
            initial = self.pass_.initial(variable)
            entry = self.entries[id(variable)] = Entry(variable, initial, initial)
            for watch in self.tapes:
                watch([entry])
        return entry

    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        """Returns the replicas' components of an on-read variable. None if its value determines them."""
        entry = self.entry(variable)
        # After a write, the components from the start of the function are stale.
        if num_replicas > 1 and entry.components is None and entry.policy.on_read and not entry.written:
            entry.components = self.pass_.components(variable, num_replicas)
        return entry.components

    def lookup(self, table: Variable, ids: jax.Array) -> jax.Array:
        """Returns rows of a table on parameter servers. The program fetches only the rows that it looks up."""
        self.note_read()
        self._require_current(table)
        positions = self.pass_.look_up(table, ids)
        return self.entry(table).value[positions]

    def draw(self, iterator: AbstractIterator, *, is_optional: bool = False) -> tuple[Any] | None:
        """Returns the next batch of an iterator, in a 1-tuple, as inputs of the program. None if the iterator is at its end.

        Raises:
          ContextError: called in a replica function or in an inner trace.
        """
        in_replica = context.depth() > 0 and context.current().replica is not None
        if self.mapped or in_replica or not self.is_innermost_trace:
            raise draws.refuse_draw()
        return self.pass_.draw(iterator, is_optional=is_optional)

    @override
    def get_current_value(self, variable: Variable) -> jax.Array:
        self.note_read()
        return self.value(variable)

    def value(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable`. Unlike `get_current_value` it does not record a read.

        Control-flow bodies use it: they record one read when they start.
        """
        self._require_current(variable)
        entry = self.entry(variable)
        is_merging = self.mapped and context.in_cross_replica_context()
        outer = compat.outer_of(variable)
        if outer is not None and (is_merging or entry.value is None):
            return self.value(outer)
        # A merge function must see one value, although the replicas hold different ones.
        if is_merging and (entry.diverged or entry.policy.on_read):
            value: jax.Array = combine([entry], None)[0]
        else:
            value = combined(entry.policy.combine, entry.components) if entry.value is None else entry.value
        return value

    @override
    def add_update(self, update: tuple[Variable, Any]) -> None:
        variable, value = update
        entry = self._writable(variable)
        value = self._combined(entry, value)
        # A moving average is sent to parameter servers as an increment, so that workers do not overwrite each other.
        if id(variable) in self._averages:
            entry.add(value, value - entry.value)
        else:
            entry.replace(value)
        # An assignment in a merge function makes the variable equal on all replicas again.
        if self.mapped and context.in_cross_replica_context():
            entry.diverged = False
        self._follow(entry)

    @override
    def add_delta(self, variable: Variable, delta: jax.Array, *, negative: bool = False) -> jax.Array:
        entry = self._writable(variable)
        delta = keras.ops.convert_to_tensor(delta, dtype=entry.value.dtype)
        if jnp.broadcast_shapes(delta.shape, entry.value.shape) != entry.value.shape:
            raise VariableError(
                f"an increment of shape {delta.shape} to {describe(variable)}",
                "the increment does not broadcast to the shape of the variable.",
                f"use an increment of shape {tuple(variable.shape)}",
            )
        delta = self._combined(entry, delta)
        # Add or subtract directly, as hand-written code does. XLA removes the increment if the program does not return it.
        entry.add(*((entry.value - delta, -delta) if negative else (entry.value + delta, delta)))
        self._follow(entry)
        return entry.value

    def _follow(self, entry: Entry) -> None:
        """Makes replicas go on from a value that was assigned outside them, and not from the outer weights before."""
        outer = compat.outer_of(entry.variable)
        is_outside = not self.mapped or context.in_cross_replica_context()
        if outer is not None and is_outside and not self._free_writes and _num_replicas() == 1:
            self.add_update((outer, entry.value))

    def commit(self, other: Entry) -> None:
        """Applies the change that a control-flow body, such as the one of `phalanx.scan`, made to a variable."""
        entry = self._writable(other.variable)
        if other.replaced:
            entry.replace(other.value)
        else:
            entry.add(other.value, _difference(other.value, entry.value))
        entry.diverged |= other.diverged

    @override
    def note_averages(self, variables: Sequence[Variable]) -> None:
        self._averages.update(map(id, variables))

    @override
    def fold_seed(self, seed: jax.Array, state: Variable) -> jax.Array:
        add_once(state, self.pass_.notes.seeds)
        # All replicas hold the same state, so each folds in its number to draw numbers of its own.
        return seed if _num_replicas() == 1 else jax.random.fold_in(seed, lax.axis_index(REPLICA_AXIS))

    @override
    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        strategy = context.get_strategy()
        deferred = (Updates.AFTER_PROGRAM, Updates.AFTER_REPLICAS) if self.mapped else (Updates.AFTER_PROGRAM,)
        if grads and strategy.updates in deferred:
            self._defer_gradients(strategy, optimizer, grads, variables)
            return
        add_once(optimizer, self.pass_.notes.optimizers)
        if strategy.local_updates is not None and not self._free_writes:
            self._apply_locally(strategy.local_updates, optimizer, apply, grads, variables)
            return
        accumulates = compat.accumulation_steps(optimizer) and not self._free_writes
        # With one replica too, because a process that joins a group begins alone.
        accumulators = compat.accumulators(optimizer, variables) if accumulates else []
        # Each replica adds up its own gradients, so that they are all-reduced once per update instead of once per step.
        compat.make_on_demand(accumulators, "sum")
        if accumulates and _num_replicas() > 1:
            grads = self._accumulate(optimizer, _weight(grads), variables, accumulators)
        elif strategy.compression is not None and not self._free_writes:
            grads = self._compress(strategy.compression, optimizer, grads, variables)
        else:
            grads = self.aggregated(grads)
        with self.updating():
            # The `apply` of a loss-scaling optimizer assigns variables inside `lax.cond`, which JAX does not allow.
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                compat.apply_stateless(optimizer, grads, variables)
            else:
                apply(grads, variables)

    def _defer_gradients(
        self,
        strategy: AbstractStrategy,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Any],
        variables: Any,
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
        is_whole = self._free_writes > 0 or _num_replicas() == 1
        dims = tuple(
            None if is_whole or g is None else _sharded_dim(strategy, v) for g, v in zip(grads, trained, strict=True)
        )
        self.defer_update(Update(optimizer, trained, list(self.aggregated(grads, dims)), dims))

    def defer_update(self, update: Update) -> None:
        """Defers an update until the program has ended. It then runs on the devices that hold the variables."""
        self._require_innermost(
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
        self._require_innermost(call, hint)
        if self.records is None:
            raise NestedWriteError(
                f"{call} at {user_place()}",
                "the call is inside a body of phalanx.scan, cond or while_loop, and a record cannot leave it.",
                hint,
            )
        self.records.append(record)

    def _require_current(self, variable: Variable) -> None:
        """Raises if a deferred update will change `variable`, because its new value does not exist yet."""
        if id(variable) in self._deferred:
            raise VariableError(
                f"{describe(variable)} was used after optimizer.apply in the same step, at {user_place()}",
                "the strategy updates it only after the step, so its new value does not exist yet.",
                "use it before optimizer.apply, or in the next strategy.run",
            )

    def apply_update(self, strategy: AbstractStrategy, update: Update) -> None:
        """Applies an update that the replicas have deferred, in the cross-replica part of the program."""
        with context.enter(context.Mode(strategy, None)):
            update.optimizer.apply(update.gradients, update.variables)

    @override
    def aggregated(self, grads: Sequence[Any], dims: Sequence[int | None] = ()) -> Sequence[Any]:
        # In update context the gradients are aggregated already. A second sum would multiply them.
        if self._free_writes:
            return grads
        self.aggregations += 1
        grads = _weight(grads)
        if _num_replicas() == 1:
            return grads
        strategy = context.get_strategy()
        if strategy.compression is not None:
            raise _refuse_stateless_apply("compression")
        if any(dim is not None for dim in dims):
            return strategy.divide_gradients(grads, dims)
        return strategy.aggregate_gradients(grads)

    def _apply_locally(
        self,
        local: LocalUpdates,
        optimizer: keras.optimizers.Optimizer,
        apply: Callable[..., None],
        grads: Sequence[Any],
        variables: Any,
    ) -> None:
        """Updates the variables of this replica with its own gradients, and synchronizes what is due then."""
        self.aggregations += 1
        compat.build_optimizer(optimizer, variables)
        trained = compat.trained_by(optimizer, variables)
        _require_local(local, optimizer, trained)
        with self.updating():
            apply(gradients_of(local, _weight(grads), _num_replicas()), variables)
        written = [e.variable for e in self.entries.values() if e.written and e.policy.on_demand]
        whole = context.get_strategy().aggregate_gradients
        for each in synchronizations(local, Applied(optimizer, trained, written, whole, _num_replicas())):
            values = [self.get_current_value(v) for v in each.variables]
            with self.updating():
                values = each.run(values)
            self._update(each.variables, values)

    def _compress(
        self, compression: Compression, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Any
    ) -> Sequence[Any]:
        self.aggregations += 1
        compressed = self._compressed(compression, optimizer, grads, variables)
        sums, kept = compressed.sum(_weight(grads), [self.get_current_value(v) for v in compressed.variables])
        self._update(compressed.variables, kept)
        return sums

    def _compressed(
        self, compression: Compression, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Any
    ) -> CompressedSum:
        compat.build_optimizer(optimizer, variables)
        trained = compat.trained_by(optimizer, variables)
        # With one replica too: a group of processes may shrink to one, and a process that joins it begins alone.
        whole = None if _num_replicas() == 1 else context.get_strategy().aggregate_gradients
        return CompressedSum(compression, whole, optimizer, grads, trained)

    def _update(self, variables: Sequence[Variable], values: Sequence[jax.Array]) -> None:
        with self.updating():
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _accumulate(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Any],
        variables: Any,
        accumulators: Sequence[Variable],
    ) -> Sequence[Any]:
        """Returns the gradients for Keras's `apply`: all-reduced totals in the last accumulation step, else local gradients.

        One all-reduce per update replaces one per step.
        """
        strategy = context.get_strategy()
        local_sums = [self.get_current_value(a) for a in accumulators]
        compressed = strategy.compression and self._compressed(strategy.compression, optimizer, grads, variables)
        kept_in = compressed.variables if compressed else []
        kept = [self.get_current_value(v) for v in kept_in]

        def aggregate_totals() -> PyTree:
            totals = [None if g is None else g + x for g, x in zip(grads, local_sums, strict=True)]
            sums, new = compressed.sum(totals, kept) if compressed else (strategy.aggregate_gradients(totals), kept)
            return sums, [jnp.zeros_like(x) for x in local_sums], new

        # Keras's `apply` adds the accumulators to the gradients. The totals contain them already, so they become zero before.
        is_last = compat.is_last_accumulated(optimizer)
        grads, local_sums, kept = lax.cond(is_last, aggregate_totals, lambda: (list(grads), local_sums, kept))
        self._update([*accumulators, *kept_in], [*local_sums, *kept])
        return grads

    @override
    def check_stateless_apply(self) -> None:
        mode = context.current()
        if mode.replica is not None and mode.strategy.local_updates is not None and not self._free_writes:
            raise _refuse_stateless_apply("local_updates")

    @override
    def example_mask(self) -> jax.Array | None:
        replica = context.get_replica_context()
        return None if replica is None else replica.example_mask

    @override
    def reduce_rows(self, values: jax.Array, counts: jax.Array, reduction: str) -> jax.Array:
        return averages.reduce_rows(
            context.require_replica(), values, counts, reduction, is_averaging=self.is_averaging
        )

    @property
    @override
    def is_averaging(self) -> bool:
        self.note_read()
        mode = context.current()
        return mode.averaging and mode.replica is not None

    @override
    def weight_of_mean(self, weight: jax.Array | None) -> jax.Array | float:
        return averages.weight_of_mean(context.require_replica(), weight)

    @override
    def moments(
        self, values: jax.Array, counts: jax.Array, axes: Sequence[int], *, everywhere: bool
    ) -> tuple[Any, Any]:
        return averages.moments(values, counts, axes, replicas=_num_replicas() if everywhere else 1)

    @override
    def check_loss(self, name: str, reduction: str) -> None:
        averages.check_loss(name, reduction, replicas=_num_replicas())

    @override
    def count_of_a_row(self) -> jax.Array:
        return averages.weight_per_row(context.require_replica())

    @override
    @contextmanager
    def updating(self) -> Iterator[None]:
        self._free_writes += 1
        try:
            yield
        finally:
            self._free_writes -= 1

    def allow_free_writes(self) -> None:
        """Makes the whole scope an update context, in which any assignment is allowed."""
        self._free_writes += 1

    @property
    def is_updating(self) -> bool:
        """Whether this code runs in update context."""
        return self._free_writes > 0

    def _require_innermost(self, call: str, hint: str) -> None:
        """Raises in an inner trace. A value computed there is a tracer of that trace, and would leak if it were stored."""
        if not self.is_innermost_trace:
            raise NestedWriteError(
                f"{call} at {user_place()}",
                "the call is inside the body of a jax.lax loop or branch, or inside another JAX transformation, and the new "
                "value cannot leave it.",
                hint,
            )

    def _writable(self, variable: Variable) -> Entry:
        """Returns the entry of `variable` for a write, and marks it as written."""
        self._require_innermost(
            f"assign to {describe(variable)}",
            "phalanx.scan, phalanx.cond, phalanx.while_loop or phalanx.remat instead of the JAX function; jax.jit is not "
            "needed, because the step is compiled anyway",
        )
        self._require_current(variable)
        entry = self.entry(variable)
        if entry.value is None:
            entry.value = self.value(variable)
        entry.written = True
        self.values_change()
        return entry

    def _combined(self, entry: Entry, value: jax.Array) -> jax.Array:
        """Returns `value`, or an increment, as the policy table combines it over the replicas."""
        if self.mapped and context.in_cross_replica_context():
            # A merge function may have closed over a value that differs between replicas. The value of replica 0 is used, so
            # that the variable stays equal on all of them.
            value = value if self._free_writes else primitives.broadcast(value, lax.axis_size(REPLICA_AXIS))
            return first_component(entry.policy, value)
        num_replicas = 1 if self._free_writes else _num_replicas()
        if num_replicas == 1:
            return value
        if entry.policy.write is Write.REFUSED:
            raise refuse_write(entry.variable)
        if entry.policy.write is Write.AT_BOUNDARY:
            entry.diverged = True
            return self._of_rows(entry, value) if entry.policy.on_demand else value
        if entry.policy.combine is Combine.FIRST:
            return primitives.broadcast(value, num_replicas)
        replica = context.require_replica()
        if entry.policy.combine is Combine.SUM:
            total: jax.Array = replica.all_reduce(ReduceOp.SUM, value)
            return total
        mean: jax.Array = replica.all_reduce(ReduceOp.MEAN, value).astype(value.dtype)
        # A batch without a single real row changes nothing.
        return mean if replica.padding is None else jnp.where(replica.padding.count > 0, mean, entry.value)

    @staticmethod
    def _of_rows(entry: Entry, value: jax.Array) -> jax.Array:
        """Returns `value` if this replica has real rows, else the present value: a mean over no rows is none."""
        padding = context.require_replica().padding
        return value if padding is None else jnp.where(padding.has_rows, value, entry.value)


def innermost() -> LiftScope | None:
    """Returns the scope of the function that is being traced, or None."""
    scope = compat.lift_scope()
    return scope if isinstance(scope, LiftScope) else None


def program_scope() -> LiftScope:
    """Returns the scope of the program that is being traced. Call it only while a program is traced."""
    scope = innermost()
    assert scope is not None
    return scope


def _refuse_stateless_apply(option: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"optimizer.stateless_apply under a strategy with {option}",
        "it names no variables beside which the optimizer could keep what the replicas have not sent.",
        "optimizer.apply(gradients, variables)",
    )


def _require_local(local: LocalUpdates, optimizer: keras.optimizers.Optimizer, trained: Sequence[Variable]) -> None:
    """Checks that each replica can train on its own.

    Raises:
      InvalidArgumentError: the optimizer scales its loss.
      VariableError: the replicas have no values of their own of a trained variable.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} under a strategy with local_updates={type(local).__name__}",
            "replicas whose gradients overflow would leave out updates that others make.",
            "the dtype policy mixed_bfloat16, whose losses need no scale",
        )
    for variable in trained:
        if not policy_of(variable).on_demand:
            raise VariableError(
                f"{describe(variable)} under a strategy with local_updates={type(local).__name__}",
                "the replicas cannot have values of their own of it, because it was created outside the scope, or with another "
                "aggregation than a mean.",
                "with strategy.scope(): model = make_model()",
            )


def _sharded_dim(strategy: AbstractStrategy, variable: Variable) -> int | None:
    """Returns the dim along which the replicas hold shards of a variable and of its gradient. None if they hold the whole."""
    return strategy.topology.divided_dim(compat.layout_path(variable), variable.shape)


def _difference(value: jax.Array, other: jax.Array) -> jax.Array | None:
    """Returns the increment from `other` to `value`. None for bools, which JAX does not subtract."""
    return None if value.dtype == jnp.bool_ else value - other


def _weight(grads: Sequence[Any]) -> Sequence[Any]:
    """Weights gradients of means over this replica's rows, such that the sum over the replicas is that of the global mean."""
    mode = context.current()
    if not mode.averaging or mode.replica is None:
        return grads
    weight = jnp.asarray(mode.replica.weight)
    return [None if g is None else g * weight.astype(g.dtype) for g in grads]


def _num_replicas() -> int:
    """Returns the number of replicas over which a replica function communicates. 1 in cross-replica context."""
    mode = context.current()
    return 1 if mode.replica is None else mode.strategy.num_replicas_in_sync
