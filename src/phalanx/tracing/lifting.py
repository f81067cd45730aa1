# SPDX-License-Identifier: Apache-2.0
"""How a Python function that reads and writes Keras variables is traced.

A variable becomes an input of the trace where the function first uses it, and an output where it was written: what a function
uses need not be known before. Tapes answer as if each target depended on each source; where the trace shows that one does
not, the function is traced once more, with the right answers.

A function that is to be executed with real values is traced first, and what was found then is binding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.extend import core as jex
from typing_extensions import override

from phalanx import compat
from phalanx.collectives import packing, primitives
from phalanx.compat import Variable
from phalanx.errors import ContextError, InputError, InvalidArgumentError, NestedWriteError, TraceError, VariableError
from phalanx.errors.frames import user_place
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.mesh.values import RowMask
from phalanx.options import ReduceOp
from phalanx.tracing import context, draws, markers
from phalanx.tracing.draws import AbstractIterator, Draw
from phalanx.tracing.policy import Combine, Policy, Write, describe, policy_of, refuse_write
from phalanx.tracing.strategy import AbstractStrategy, Update
from phalanx.tracing.structure import Arguments

# Part of the key under which jax remembers what it has traced, and the keys under which nothing of a program was read: what jax
# remembers under these holds in the next program too. A key for each program would fill jax's memory with the functions of jnp.
_key_of_traces = jax.make_user_context()
_keys: list[object] = []


@dataclass
class Discovery:
    """What was found in one function while it was traced.

    Args:
      variables: those that are read or written, in the order of their first use.
      written: for each, whether it is written.
      inputs: the first inputs of the trace: which variable each is of, and whether it is the replicas' own values of it.
      jaxpr: the trace.
      outputs: shapes and dtypes of what it returns.
      connected: for each gradient marker, which of its sources its targets depend on.
      has_tapes: whether a gradient tape was entered.
      has_callback: whether the function calls back to Python while it runs.
      runs: what was found in each `Strategy.run` inside, in order.
      optimizers: those that were applied.
      strategies: those whose `run` was called.
      updates: those that are left to be done after the program, with abstract gradients.
      rows_each: for one `Strategy.run`, how many rows its results have for each row of a padded batch; 0 for those that
        have nothing to do with rows.
      eager: whether the function is executed with real values.
      seeds: the states of random generators that were drawn from.
      lookups: the tables of which rows were looked up, in order, and the shapes of the ids; a trace of them takes the
        positions of the ids among the rows that it has, after the values of the variables.
      draws: the batches that were taken from iterators, in order; a trace of them takes their arrays, after the values of
        the variables.
    """

    variables: list[Variable] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    inputs: list[tuple[int, bool]] = field(default_factory=list)
    jaxpr: Any = None
    outputs: Any = None
    connected: list[tuple[bool, ...]] = field(default_factory=list)
    has_tapes: bool = False
    has_callback: bool = False
    runs: list["Discovery"] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    strategies: list[AbstractStrategy] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    rows_each: list[int] = field(default_factory=list)
    eager: bool = False
    seeds: list[Variable] = field(default_factory=list)
    lookups: list[tuple[Variable, tuple[int, ...]]] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)

    def take(self, scope: "LiftScope", inputs: Sequence[tuple[Variable | int, bool]], jaxpr: Any, outputs: Any) -> None:
        """Notes what `scope` saw while `jaxpr` was traced."""
        entries = list(scope.entries.values())
        self.variables = [e.variable for e in entries]
        self.written = [e.written for e in entries]
        order = {id(v): i for i, v in enumerate(self.variables)}
        place = lambda x: len(order) + x if isinstance(x, int) else order[id(x)]  # noqa: E731
        self.inputs = [(place(v), own) for v, own in inputs]
        self.jaxpr, self.outputs = markers.with_first_values(jaxpr), outputs
        self.connected = markers.connected(self.jaxpr.jaxpr)
        self.has_tapes = markers.has_tapes(self.jaxpr.jaxpr)
        self.has_callback = _has_callback(self.jaxpr.jaxpr)
        self.optimizers += [o for r in self.runs for o in r.optimizers]
        self.seeds += [v for r in self.runs for v in r.seeds]
        self.updates = [replace(u, gradients=[]) for u in scope.updates]

    def flat(self, values: Sequence[Any], parts: Sequence[Any], *args: Any) -> list[Any]:
        """Returns the inputs of the trace: of the variables' values and components, and of the arguments."""
        return [(parts if own else values)[i] for i, own in self.inputs] + jax.tree.leaves(args)

    def evaluate(self, values: Sequence[Any], parts: Sequence[Any], *args: Any) -> Any:
        """Runs the trace with these values and components of the variables; returns what it returns."""
        run = markers.evaluate if self.has_tapes else _evaluate
        tree: Any = jax.tree.structure(self.outputs)
        return tree.unflatten(run(self.jaxpr, *self.flat(values, parts, *args)))


class DiscoveryMismatch(BaseException):
    """A function used a variable that was not found when it was traced before.

    Not an `Exception`: Keras makes those that pass through a layer anew, with other arguments.
    """

    def __init__(self, variable: Variable) -> None:
        super().__init__(describe(variable))
        self.variable = variable


class NeedsProgram(BaseException):
    """Eager code did what only a traced program can do; the default strategy answers it with a program."""


class AbstractPass(ABC):
    """One pass over one function.

    Attributes:
      found: what is known about the function.
      marks_tapes: whether tapes leave markers; in an eager execution the gradients are known already.
      drawn_rows: the row masks of the batches that were drawn.
    """

    found: Discovery
    marks_tapes = True
    drawn_rows: Sequence[RowMask] = ()

    @abstractmethod
    def initial(self, variable: Variable) -> Any:
        """Returns the value of `variable` when the function starts."""

    @abstractmethod
    def components(self, variable: Variable, num_replicas: int) -> Any:
        """Returns the replicas' own values of it, `(num_replicas, ...)`; None where they follow from its value."""

    def looked_up(self, table: Variable, ids: Any) -> Any:
        """Notes that rows of `table` are looked up; returns their positions among the rows that the program has."""
        raise VariableError(
            f"rows of {describe(table)}",
            "it lives on parameter servers, and only a scheduled step gets rows of it.",
            "coordinator.schedule(step, args=(...)), or strategy.run(fn)",
        )

    def draw(self, iterator: AbstractIterator, *, is_optional: bool) -> tuple[Any] | None:
        """Returns the next batch of an iterator as an input of the trace, in a tuple; None if there is none."""
        raise NotImplementedError

    @abstractmethod
    def entered(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        """Returns values of variables as those that a tape watches."""

    @abstractmethod
    def next_gradient(self, num_sources: int) -> tuple[bool, ...]:
        """Returns which sources of the next gradient marker are connected."""

    @abstractmethod
    def next_values(self) -> list[Any] | None:
        """Returns the values of that marker in an eager execution; None where it is to be traced."""

    @abstractmethod
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        """Returns what is known about the next `Strategy.run`, which `trace` finds out."""


class Tracing(AbstractPass):
    """The pass in which the variables become inputs of a trace.

    Args:
      connected: which sources of each gradient marker are connected, if the function was traced before.
    """

    def __init__(self, connected: Sequence[tuple[bool, ...]] | None = None) -> None:
        self.found = Discovery()
        self.inputs: list[tuple[Variable | int, bool]] = []
        self.ids: list[Any] = []
        self._num_others = 0
        self._connected = None if connected is None else iter(connected)
        with jex.take_current_trace() as trace:
            self._trace = trace

    @override
    def initial(self, variable: Variable) -> Any:
        return self._input(variable, tuple(variable.shape), own=False)

    @override
    def components(self, variable: Variable, num_replicas: int) -> Any:
        return self._input(variable, (num_replicas, *variable.shape), own=True)

    @override
    def looked_up(self, table: Variable, ids: Any) -> Any:
        with jex.set_current_trace(self._trace):
            self.ids.append(ids)
            self.found.lookups.append((table, tuple(ids.shape)))
            return self._other_input(jax.core.ShapedArray(ids.shape, jnp.dtype("int32")))

    @override
    def draw(self, iterator: AbstractIterator, *, is_optional: bool) -> tuple[Any] | None:
        drawn, batch = draws.draw(iterator, self.found.draws, is_optional=is_optional)
        self.found.draws.append(drawn)
        if batch is None:
            return None
        with jex.set_current_trace(self._trace):
            arrays = [self._other_input(_aval(x)) for x in batch.arrays]
        args, _, rows = Arguments.rebuild(batch.structure, len(batch.rows), arrays)
        self.drawn_rows = (*self.drawn_rows, *rows)
        return args  # type: ignore[no-any-return]

    @override
    def entered(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        with jex.set_current_trace(self._trace):
            return markers.enter_p.bind(*values, tape=tape)  # type: ignore[no-any-return]

    @override
    def next_gradient(self, num_sources: int) -> tuple[bool, ...]:
        return (True,) * num_sources if self._connected is None else _next(self._connected, num_sources)

    @override
    def next_values(self) -> list[Any] | None:
        return None

    @override
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        self.found.runs.append(trace())
        return self.found.runs[-1]

    def _input(self, variable: Variable, shape: tuple[int, ...], *, own: bool) -> Any:
        self.inputs.append((variable, own))
        # In the trace in which the function started, also when a lax body reads the variable first: a tape must be able
        # to see that its targets depend on it.
        with jex.set_current_trace(self._trace):
            return markers.first_value(jax.core.ShapedArray(shape, jnp.dtype(compat.dtype_of(variable))))

    def _other_input(self, aval: Any) -> Any:
        """Returns an input that is not of a variable: they come after the variables' values."""
        self.inputs.append((self._num_others, False))
        self._num_others += 1
        return markers.first_value(aval)


class Executing(AbstractPass):
    """The pass over a function that is executed with real values.

    Args:
      found: what was found when it was traced.
      values: one value for each variable found.
      parts: components of each, or None; nothing for one replica.
      gradients: the values of the gradient markers.
    """

    marks_tapes = False

    def __init__(
        self, found: Discovery, values: Sequence[Any], parts: Sequence[Any], gradients: Sequence[list[Any]]
    ) -> None:
        self.found = found
        self._values = dict(zip(map(id, found.variables), values, strict=True))
        self._parts = dict(zip(map(id, found.variables), parts, strict=False))
        self._connected, self._gradients, self._runs = iter(found.connected), iter(gradients), iter(found.runs)

    @override
    def initial(self, variable: Variable) -> Any:
        if id(variable) not in self._values:
            raise DiscoveryMismatch(variable)
        return self._values[id(variable)]

    @override
    def components(self, variable: Variable, num_replicas: int) -> Any:
        return self._parts[id(variable)]

    @override
    def entered(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        return values

    @override
    def next_gradient(self, num_sources: int) -> tuple[bool, ...]:
        return _next(self._connected, num_sources)

    @override
    def next_values(self) -> list[Any] | None:
        return next(self._gradients)

    @override
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        return next(self._runs)


def _next(connected: Iterator[tuple[bool, ...]], num_sources: int) -> tuple[bool, ...]:
    found = next(connected, ())
    if len(found) != num_sources:
        raise used_differently("a gradient tape")
    return found


def used_differently(what: str) -> TraceError:
    """Returns the error for a function that is not the same when it is traced a second time."""
    return TraceError(
        f"{what} in a traced function",
        "it was used differently when the function was traced a second time.",
        "do not branch on Python state that the function itself changes",
    )


def _evaluate(closed: jex.ClosedJaxpr, *args: Any) -> list[Any]:
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


@dataclass
class Entry:
    """One variable while a function is traced.

    Args:
      variable: the variable.
      initial: its value when the function started.
      value: its value now; None where it is the sum of the components, on demand.
      written: whether it was written.
      diverged: whether the replicas hold different values, to be combined when the program ends.
      components: in cross-replica context, the replicas' own values of an on-read variable, `(num_replicas, ...)`.
      increment: what was added to it, as long as it was not assigned otherwise.
      replaced: whether it was.
    """

    variable: Variable
    initial: Any
    value: Any
    written: bool = False
    diverged: bool = False
    components: Any = None
    increment: Any = None
    replaced: bool = False

    def move(self, value: Any, increment: Any) -> None:
        """Gives it the value that an increment leads to."""
        self.value, self.components = value, None
        if not self.replaced:
            self.increment = increment if self.increment is None else self.increment + increment

    def replace(self, value: Any, components: Any = None) -> None:
        """Gives it another value."""
        self.value, self.components, self.increment, self.replaced = value, components, None, True

    @property
    def policy(self) -> Policy:
        """Its row of the policy table."""
        return policy_of(self.variable)


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
    def __exit__(self, *exception: Any) -> None:
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

    def components(self, variable: Variable, num_replicas: int) -> Any:
        """Returns the replicas' own values of an on-read variable; None where they follow from its value."""
        entry = self.entry(variable)
        if num_replicas > 1 and entry.components is None and entry.policy.on_read and not entry.written:
            entry.components = self.pass_.components(variable, num_replicas)
        return entry.components

    def lookup(self, table: Variable, ids: Any) -> Any:
        """Returns rows of a table, of which a program has only those that it looks up."""
        self.note_read()
        self._require_current(table)
        positions = self.pass_.looked_up(table, ids)
        return self.entry(table).value[positions]

    def draw(self, iterator: AbstractIterator, *, is_optional: bool = False) -> tuple[Any] | None:
        """Returns the next batch of an iterator as an input of the program, in a tuple; None if there is none."""
        in_replica = context.depth() > 0 and context.current().replica is not None
        if self.mapped or in_replica or not self.is_innermost_trace:
            raise refuse_draw()
        return self.pass_.draw(iterator, is_optional=is_optional)

    @override
    def get_current_value(self, variable: Variable) -> Any:
        self.note_read()
        return self.value(variable)

    def value(self, variable: Variable) -> Any:
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
    def add_delta(self, variable: Variable, delta: Any, *, negative: bool = False) -> Any:
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
    def fold_seed(self, seed: Any, state: Variable) -> Any:
        if not any(v is state for v in self.pass_.found.seeds):
            self.pass_.found.seeds.append(state)
        return seed if _replicas() == 1 else jax.random.fold_in(seed, lax.axis_index(REPLICA_AXIS))

    @override
    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        strategy = context.get_strategy()
        if grads and strategy.defers_updates and (self.mapped or strategy.lends_variables):
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

        def last() -> Any:
            totals = [None if g is None else g + x for g, x in zip(grads, own, strict=True)]
            return aggregate(totals), [jnp.zeros_like(x) for x in own]

        # What Keras adds to the gradients is what is in the accumulators.
        grads, own = lax.cond(compat.is_last_accumulated(optimizer), last, lambda: (list(grads), own))
        with self.updating():
            for variable, value in zip(sums, own, strict=True):
                variable.assign(value)
        return grads

    @override
    def example_mask(self) -> Any:
        replica = context.get_replica_context()
        return None if replica is None else replica.example_mask

    @override
    def reduce_rows(self, values: Any, counts: Any, reduction: str) -> Any:
        replica = context.get_replica_context()
        assert replica is not None
        if values.ndim == 0:  # A mean of the function's own.
            return values
        mask = jnp.ones(values.shape[:1], bool) if replica.padding is None else replica.padding.mask
        if len(mask) != len(values):
            raise InputError(
                f"a Keras loss of {len(values)} rows",
                f"this batch is padded to {len(mask)} rows, and its mask does not fit.",
                "losses of the rows of the batch; or a sample_weight made of get_replica_context().example_mask",
            )
        own = mask.reshape((-1,) + (1,) * (values.ndim - 1))
        total = jnp.where(own, values, 0).sum()
        if not self.is_averaging:
            return total
        divisor = jnp.ones((), values.dtype)
        if reduction != "sum" and counts.ndim == 0:
            # How many rows there are is known, without asking the other replicas.
            rows = len(mask) * _replicas() if replica.num_examples is None else replica.num_examples
            divisor = counts * jnp.asarray(rows * (values.size // len(mask)), values.dtype)
        elif reduction != "sum":
            count = jnp.where(own, jnp.broadcast_to(counts, values.shape), 0).sum()
            divisor = primitives.all_reduce(ReduceOp.SUM, count, _replicas())
        return _divided(_divided(total, divisor), jnp.asarray(replica.weight, values.dtype))

    @property
    @override
    def is_averaging(self) -> bool:
        self.note_read()
        mode = context.current()
        return mode.averaging and mode.replica is not None

    @override
    def weight_of_mean(self, weight: Any) -> Any:
        replica = context.get_replica_context()
        assert replica is not None
        if weight is None:
            return replica.weight
        return weight if replica.padding is None else weight * replica.padding.mask.mean()

    @override
    def moments(self, values: Any, counts: Any, axes: Sequence[int], *, everywhere: bool) -> tuple[Any, Any]:
        replicas = _replicas() if everywhere else 1

        def mean(x: Any) -> Any:
            total = jnp.where(counts, x, 0).sum(axis=tuple(axes), keepdims=True)
            return primitives.all_reduce(ReduceOp.SUM, total, replicas) / count

        number = counts.sum(axis=tuple(axes), keepdims=True).astype(values.dtype)
        count = jnp.maximum(primitives.all_reduce(ReduceOp.SUM, number, replicas), 1)
        center = mean(values)
        return center.squeeze(tuple(axes)), mean(jnp.square(values - center)).squeeze(tuple(axes))

    @override
    def check_loss(self, name: str, reduction: str) -> None:
        if _replicas() > 1:
            raise InvalidArgumentError(
                f"the loss {name!r} with reduction={reduction!r} in replica context",
                "it is a mean over one replica's rows, and gradients are summed over the replicas.",
                'reduction="none", and phalanx.nn.compute_average_loss(loss(y, y_pred))',
            )

    @override
    def count_of_a_row(self) -> Any:
        replica = context.get_replica_context()
        assert replica is not None
        assert replica.num_examples is not None
        return replica.num_replicas_in_sync / replica.num_examples

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
            "phalanx.scan, phalanx.cond, phalanx.while_loop or phalanx.checkpoint instead of the function of jax",
        )
        self._require_current(variable)
        entry = self.entry(variable)
        entry.written = True
        self.values_change()
        return entry

    def _combined(self, entry: Entry, value: Any) -> Any:
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
        replica = context.get_replica_context()
        assert replica is not None
        if entry.policy.combine is Combine.SUM:
            return replica.all_reduce(ReduceOp.SUM, value)
        mean = replica.all_reduce(ReduceOp.MEAN, value).astype(value.dtype)
        return mean if replica.padding is None else jnp.where(replica.padding.count > 0, mean, entry.value)


def combine(entries: Sequence[Entry], padding: RowMask | None) -> list[Any]:
    """Makes one value of what each replica holds of some variables, through one shared buffer a dtype.

    Args:
      entries: the variables.
      padding: which rows of this replica are real; one without any has no part in means.
    """
    prepared = []
    for e in entries:
        x = e.value.astype(jnp.int32) if e.value.dtype == jnp.bool_ else e.value
        if e.policy.combine is Combine.FIRST:
            x = primitives.only_on(0, x)
        elif e.policy.combine is Combine.MEAN and padding is not None:
            x = jnp.where(padding.has_rows, x, 0)
        prepared.append(x)
    packs = packing.by_length([str(x.dtype) for x in prepared])
    divisor: Any = lax.axis_size(REPLICA_AXIS)
    # A sum over one replica of several devices is one that XLA cannot divide between them.
    sums = prepared
    if divisor > 1:
        sums = primitives.packed(lambda buffers: list(lax.psum(buffers, REPLICA_AXIS)), prepared, packs)
    if divisor > 1 and padding is not None and any(e.policy.combine is Combine.MEAN for e in entries):
        divisor = jnp.maximum(lax.psum(padding.has_rows.astype(jnp.float32), REPLICA_AXIS), 1)
    combined = []
    for e, total in zip(entries, sums, strict=True):
        value = total
        if e.policy.combine is Combine.MEAN:
            mean = total / divisor
            value = mean if padding is None else jnp.where(padding.count > 0, mean, e.initial)
        combined.append(value.astype(e.value.dtype))
    return combined


def first_component(policy: Policy, value: Any) -> Any:
    """Returns what one replica holds of `value`, so that the replicas' components combine to it."""
    return primitives.only_on(0, value) if policy.on_read and policy.combine is Combine.SUM else value


def innermost() -> LiftScope | None:
    """Returns the scope of the function that is being traced, if one is."""
    scope = compat.lift_scope()
    return scope if isinstance(scope, LiftScope) else None


def refuse_draw() -> ContextError:
    """Returns the error for a batch that is taken from an iterator where no program can fetch it."""
    return ContextError(
        "next(iterator) in a traced step",
        f"at {user_place()}, in a replica function or the body of a loop or branch, the step would be compiled with this one batch.",
        "pass the batch to the step: strategy.run(step, args=(next(iterator),))",
    )


def _aval(array: Any) -> Any:
    """Returns shape and dtype of an array as a program sees it."""
    aval = jax.typeof(array)
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _divided_dim(strategy: AbstractStrategy, variable: Variable) -> int | None:
    """Returns along which dim replicas have parts of a variable, and of its gradient."""
    assert strategy.topology is not None
    return strategy.topology.divided_dim(compat.layout_path(variable), variable.shape)


def _difference(value: Any, other: Any) -> Any:
    """Returns the increment from `other` to `value`; None where a dtype has none."""
    return None if value.dtype == jnp.bool_ else value - other


def _divided(value: Any, divisor: Any) -> Any:
    """Returns the quotient; zero where the divisor is."""
    return jnp.where(divisor == 0, 0, value / jnp.where(divisor == 0, 1, divisor))


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


def _has_callback(jaxpr: jex.Jaxpr) -> bool:
    inner = (j for eqn in jaxpr.eqns for j in jex.jaxprs_in_params(eqn.params))
    # jax.debug.print has a name of its own.
    is_one = (p == "debug_print" or "callback" in p for p in (eqn.primitive.name for eqn in jaxpr.eqns))
    return any(is_one) or any(map(_has_callback, inner))
