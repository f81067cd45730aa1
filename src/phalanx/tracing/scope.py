# SPDX-License-Identifier: Apache-2.0
"""The scope in which a traced function reads and writes Keras variables.

A variable becomes an input of the trace when the function first uses it, and an output if the function writes it, so nobody has
to list the variables of a function in advance.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.extend import core as jex
from typing_extensions import override

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.compat import Variable
from phalanx.errors import InvalidArgumentError, NestedWriteError, VariableError
from phalanx.errors.frames import user_place
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.options import ReduceOp
from phalanx.tracing import averages, context, draws
from phalanx.tracing.boundary import combine, first_component
from phalanx.tracing.discovery import AbstractPass, Entry
from phalanx.tracing.draws import AbstractIterator
from phalanx.tracing.policy import Combine, Write, describe, refuse_write
from phalanx.tracing.strategy import AbstractStrategy, Update, Updates
from phalanx.typing import PyTree

# JAX caches what it traces (functions under jax.jit, bodies of jax.lax loops) by this context, among other things. Such a function
# may have read a variable of one program, and must be traced again in another. If nothing was read under a key, the next program
# takes the key again: one key per program would fill JAX's caches with a copy of every jnp function per model.
_key_of_traces = jax.make_user_context()

_keys: list[object] = []


class LiftScope(compat.AbstractLiftScope):
    """The scope in which a traced function reads and writes variables.

    Args:
      of: the pass over the function.
      mapped: whether this is the program of one of several replicas.

    Attributes:
      entries: the variables that were used so far, by id.
      tapes: the gradient tapes that record; each takes variables that are used for the first time.
      updates: what is to be done after the program.
    """

    def __init__(self, of: AbstractPass, *, mapped: bool = False) -> None:
        super().__init__(collect_losses=True)
        self.pass_ = of
        self.mapped = mapped
        self.entries: dict[int, Entry] = {}
        self.tapes: list[Callable[[Sequence[Entry]], None]] = []
        self.updates: list[Update] = []
        self._left: set[int] = set()
        self._free_writes = 0
        self.aggregations = 0
        self._state: Any = None
        self._averages: set[int] = set()
        self._key: object = None
        self._keyed: Any = None
        self._is_read_inside = False

    @override
    def __enter__(self) -> "LiftScope":
        super().__enter__()
        self._take_key()
        self._state = jex.get_opaque_trace_state()
        return self

    @override
    def __exit__(self, *exception: object) -> None:
        self._drop_key()
        super().__exit__(*exception)

    def values_change(self) -> None:
        """Must be called before the value of an entry changes."""
        if self._is_read_inside:
            self._drop_key()
            self._take_key()

    @override
    def note_read(self) -> None:
        if not self.is_innermost_trace:
            self._is_read_inside = True

    def _take_key(self) -> None:
        """Lets jax trace anew the loop bodies and functions that have read values of another program, or other values."""
        try:
            self._key = _keys.pop()
        except IndexError:
            self._key = object()
        self._is_read_inside = False
        self._keyed = _key_of_traces(self._key)
        self._keyed.__enter__()

    def _drop_key(self) -> None:
        self._keyed.__exit__(None, None, None)
        if not self._is_read_inside:
            _keys.append(self._key)

    @property
    def is_innermost_trace(self) -> bool:
        """Whether tracing has not gone into a `jax.lax` body or another transformation since the scope was entered."""
        return bool(self._state == jex.get_opaque_trace_state())

    def entry(self, variable: Variable) -> Entry:
        """Returns the entry of `variable`, made at its first use."""
        entry = self.entries.get(id(variable))
        if entry is None:
            initial = self.pass_.initial(variable)
            entry = self.entries[id(variable)] = Entry(variable, initial, initial)
            for take in self.tapes:
                take([entry])
        return entry

    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        """Returns the replicas' own values of an on-read variable; None where they follow from its value."""
        entry = self.entry(variable)
        if num_replicas > 1 and entry.components is None and entry.policy.on_read and not entry.written:
            entry.components = self.pass_.components(variable, num_replicas)
        return entry.components

    def lookup(self, table: Variable, ids: jax.Array) -> jax.Array:
        """Returns rows of a table, of which a program has only those that it looks up."""
        self.note_read()
        self._require_current(table)
        positions = self.pass_.looked_up(table, ids)
        return self.entry(table).value[positions]

    def draw(self, iterator: AbstractIterator, *, is_optional: bool = False) -> tuple[Any] | None:
        """Returns the next batch of an iterator as an input of the program, in a tuple; None if there is none."""
        in_replica = context.depth() > 0 and context.current().replica is not None
        if self.mapped or in_replica or not self.is_innermost_trace:
            raise draws.refuse_draw()
        return self.pass_.draw(iterator, is_optional=is_optional)

    @override
    def get_current_value(self, variable: Variable) -> jax.Array:
        self.note_read()
        return self.value(variable)

    def value(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable`, for a body of which it is known where it started."""
        self._require_current(variable)
        entry = self.entry(variable)
        if self.mapped and context.in_cross_replica_context() and (entry.diverged or entry.policy.on_read):
            return combine([entry], None)[0]
        return entry.components.sum(0) if entry.value is None else entry.value

    @override
    def add_update(self, update: tuple[Variable, Any]) -> None:
        variable, value = update
        entry = self._writable(variable)
        value = self._combined(entry, value)
        if id(variable) in self._averages:
            entry.move(value, value - entry.value)
        else:
            entry.replace(value)
        if self.mapped and context.in_cross_replica_context():
            entry.diverged = False

    @override
    def add_delta(self, variable: Variable, delta: jax.Array, *, negative: bool = False) -> jax.Array:
        entry = self._writable(variable)
        delta = keras.ops.convert_to_tensor(delta, dtype=entry.value.dtype)
        if jnp.broadcast_shapes(delta.shape, entry.value.shape) != entry.value.shape:
            raise VariableError(
                f"an increment of shape {delta.shape} to {describe(variable)}",
                "the shapes do not fit.",
                f"an increment of shape {tuple(variable.shape)}",
            )
        delta = self._combined(entry, delta)
        # One operation on the value as in code by hand: the increment beside it is dropped where nobody asks for it.
        entry.move(*((entry.value - delta, -delta) if negative else (entry.value + delta, delta)))
        return entry.value

    def commit(self, other: Entry) -> None:
        """Takes over what the body of `phalanx.scan` and the like did to a variable."""
        entry = self._writable(other.variable)
        if other.replaced:
            entry.replace(other.value)
        else:
            entry.move(other.value, _difference(other.value, entry.value))
        entry.diverged |= other.diverged

    @override
    def note_averages(self, variables: Sequence[Variable]) -> None:
        self._averages.update(map(id, variables))

    @override
    def fold_seed(self, seed: jax.Array, state: Variable) -> jax.Array:
        if not any(v is state for v in self.pass_.found.seeds):
            self.pass_.found.seeds.append(state)
        return seed if _replicas() == 1 else jax.random.fold_in(seed, lax.axis_index(REPLICA_AXIS))

    @override
    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        strategy = context.get_strategy()
        after = (Updates.AFTER_PROGRAM, Updates.AFTER_REPLICAS) if self.mapped else (Updates.AFTER_PROGRAM,)
        if grads and strategy.updates in after:
            trained = compat.trained_by(optimizer, variables)
            if len(grads) != len(trained):
                raise InvalidArgumentError(
                    f"{type(optimizer).__name__}.apply of {len(grads)} gradients",
                    f"to {len(trained)} variables.",
                    "one gradient for each variable",
                )
            # Where gradients are equal already, each replica has the whole of them.
            is_whole = self._free_writes > 0 or _replicas() == 1
            dims = tuple(
                None if is_whole or g is None else _divided_dim(strategy, v)
                for g, v in zip(grads, trained, strict=True)
            )
            self.leave(Update(optimizer, trained, list(self.aggregated(grads, dims)), dims))
            return
        if not any(o is optimizer for o in self.pass_.found.optimizers):
            self.pass_.found.optimizers.append(optimizer)
        if compat.accumulation_steps(optimizer) and not self._free_writes and _replicas() > 1:
            grads = self._accumulated(optimizer, _weighted(grads), variables)
        else:
            grads = self.aggregated(grads)
        with self.updating():
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                compat.apply_stateless(optimizer, grads, variables)
            else:
                apply(grads, variables)

    def leave(self, update: Update) -> None:
        """Leaves an update to be done after the program, where its variables live."""
        self._require_innermost(f"{type(update.optimizer).__name__}.apply", "strategy.run for each step")
        self.updates.append(update)
        self._left.update(id(v) for v in (*update.variables, *update.optimizer.variables))

    def _require_current(self, variable: Variable) -> None:
        if id(variable) in self._left:
            raise VariableError(
                f"{describe(variable)} after optimizer.apply in the same step, at {user_place()}",
                "its update is done after the step, where it lives; in the step it has no new value.",
                "use it before optimizer.apply, or in the next strategy.run",
            )

    def apply_update(self, strategy: AbstractStrategy, update: Update) -> None:
        """Does an update that the replicas of a strategy have left, in the cross-replica part of the program."""
        with context.enter(context.Mode(strategy, None)):
            update.optimizer.apply(update.gradients, update.variables)

    @override
    def aggregated(self, grads: Sequence[Any], dims: Sequence[int | None] = ()) -> Sequence[Any]:
        if self._free_writes:
            return grads
        self.aggregations += 1
        grads = _weighted(grads)
        if _replicas() == 1:
            return grads
        strategy = context.get_strategy()
        return (
            strategy.divide_gradients(grads, dims)
            if any(d is not None for d in dims)
            else strategy.aggregate_gradients(grads)
        )

    def _accumulated(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Any
    ) -> Sequence[Any]:
        """Aggregates at the last of the steps that are accumulated; between, each replica sums its own gradients."""
        aggregate = context.get_strategy().aggregate_gradients
        sums = compat.accumulators(optimizer, variables)
        own = [self.get_current_value(s) for s in sums]

        def last() -> PyTree:
            totals = [None if g is None else g + x for g, x in zip(grads, own, strict=True)]
            return aggregate(totals), [jnp.zeros_like(x) for x in own]

        # What Keras adds to the gradients is what is in the accumulators.
        grads, own = lax.cond(compat.is_last_accumulated(optimizer), last, lambda: (list(grads), own))
        with self.updating():
            for variable, value in zip(sums, own, strict=True):
                variable.assign(value)
        return grads

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
    def weight_of_mean(self, weight: jax.Array) -> jax.Array:
        return averages.weight_of_mean(context.require_replica(), weight)

    @override
    def moments(
        self, values: jax.Array, counts: jax.Array, axes: Sequence[int], *, everywhere: bool
    ) -> tuple[Any, Any]:
        return averages.moments(values, counts, axes, replicas=_replicas() if everywhere else 1)

    @override
    def check_loss(self, name: str, reduction: str) -> None:
        averages.check_loss(name, reduction, replicas=_replicas())

    @override
    def count_of_a_row(self) -> jax.Array:
        return averages.count_of_a_row(context.require_replica())

    @override
    @contextmanager
    def updating(self) -> Iterator[None]:
        self._free_writes += 1
        try:
            yield
        finally:
            self._free_writes -= 1

    def allow_free_writes(self) -> None:
        """Makes the whole scope update context."""
        self._free_writes += 1

    @property
    def is_updating(self) -> bool:
        """Whether this is update context."""
        return self._free_writes > 0

    def _require_innermost(self, what: str, hint: str) -> None:
        if not self.is_innermost_trace:
            raise NestedWriteError(
                f"{what} at {user_place()}",
                "it is inside the body of a jax.lax loop or branch, or another transformation of jax, and the new value cannot get out.",
                hint,
            )

    def _writable(self, variable: Variable) -> Entry:
        self._require_innermost(
            f"assign to {describe(variable)}",
            "phalanx.scan, phalanx.cond, phalanx.while_loop or phalanx.remat instead of the function of jax; leave out jax.jit, for the step is compiled anyway",
        )
        self._require_current(variable)
        entry = self.entry(variable)
        entry.written = True
        self.values_change()
        return entry

    def _combined(self, entry: Entry, value: jax.Array) -> jax.Array:
        if self.mapped and context.in_cross_replica_context():
            # A merge function may have closed over values that differ between replicas: the first one's count.
            value = value if self._free_writes else primitives.broadcast(value, lax.axis_size(REPLICA_AXIS))
            return first_component(entry.policy, value)
        replicas = 1 if self._free_writes else _replicas()
        if replicas == 1:
            return value
        if entry.policy.write is Write.REFUSED:
            raise refuse_write(entry.variable)
        if entry.policy.write is Write.AT_BOUNDARY:
            entry.diverged = True
            return value
        if entry.policy.combine is Combine.FIRST:
            return primitives.broadcast(value, replicas)
        replica = context.require_replica()
        if entry.policy.combine is Combine.SUM:
            return replica.all_reduce(ReduceOp.SUM, value)
        mean = replica.all_reduce(ReduceOp.MEAN, value).astype(value.dtype)
        return mean if replica.padding is None else jnp.where(replica.padding.count > 0, mean, entry.value)


def innermost() -> LiftScope | None:
    """Returns the scope of the function that is being traced, if one is."""
    scope = compat.lift_scope()
    return scope if isinstance(scope, LiftScope) else None


def program_scope() -> LiftScope:
    """Returns the scope of the program that is being traced. Called only while one is."""
    scope = innermost()
    assert scope is not None
    return scope


def _divided_dim(strategy: AbstractStrategy, variable: Variable) -> int | None:
    """Returns along which dim replicas have parts of a variable, and of its gradient."""
    return strategy.topology.divided_dim(compat.layout_path(variable), variable.shape)


def _difference(value: jax.Array, other: jax.Array) -> jax.Array | None:
    """Returns the increment from `other` to `value`; None where a dtype has none."""
    return None if value.dtype == jnp.bool_ else value - other


def _weighted(grads: Sequence[Any]) -> Sequence[Any]:
    """Returns gradients of means over a replica's own rows as its part of the gradients over the global batch."""
    mode = context.current()
    if not mode.averaging or mode.replica is None:
        return grads
    weight = jnp.asarray(mode.replica.weight)
    return [None if g is None else g * weight.astype(g.dtype) for g in grads]


def _replicas() -> int:
    mode = context.current()
    return 1 if mode.replica is None else mode.strategy.num_replicas_in_sync
