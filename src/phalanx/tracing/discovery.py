# SPDX-License-Identifier: Apache-2.0
"""What is found in a function while it is traced, and the two passes over it.

Tapes answer as if each target depended on each source. If the trace shows that one does not, the function is traced once more,
with the right answers. A function that is executed with real values is traced first, and what was found then is binding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from typing_extensions import override

from phalanx import compat
from phalanx.compat import Variable
from phalanx.errors import TraceError, VariableError
from phalanx.mesh.values import RowMask
from phalanx.tracing import draws, markers
from phalanx.tracing.draws import AbstractIterator, Draw
from phalanx.tracing.policy import Policy, describe, policy_of
from phalanx.tracing.strategy import AbstractStrategy, Update
from phalanx.tracing.structure import Arguments
from phalanx.typing import PyTree


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
    outputs: PyTree = None
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

    def take(
        self,
        entries: Sequence["Entry"],
        updates: Sequence[Update],
        inputs: Sequence[tuple[Variable | int, bool]],
        jaxpr: Any,
        outputs: PyTree,
    ) -> None:
        """Records the variables that were used, and the updates that were left, while `jaxpr` was traced."""
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
        self.updates = [replace(u, gradients=[]) for u in updates]

    def flat(self, values: Sequence[Any], parts: Sequence[Any], *args: PyTree) -> list[Any]:
        """Returns the inputs of the trace: of the variables' values and components, and of the arguments."""
        return [(parts if own else values)[i] for i, own in self.inputs] + jax.tree.leaves(args)

    def evaluate(self, values: Sequence[Any], parts: Sequence[Any], *args: PyTree) -> PyTree:
        """Runs the trace with these values and components of the variables; returns what it returns."""
        run = markers.evaluate if self.has_tapes else _evaluate
        tree: PyTree = jax.tree.structure(self.outputs)
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
    def initial(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable` when the function starts."""

    @abstractmethod
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        """Returns the replicas' own values of it, `(num_replicas, ...)`; None where they follow from its value."""

    def looked_up(self, table: Variable, ids: jax.Array) -> jax.Array:
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
    def initial(self, variable: Variable) -> jax.Array:
        return self._input(variable, tuple(variable.shape), own=False)

    @override
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        return self._input(variable, (num_replicas, *variable.shape), own=True)

    @override
    def looked_up(self, table: Variable, ids: jax.Array) -> jax.Array:
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

    def _input(self, variable: Variable, shape: tuple[int, ...], *, own: bool) -> jax.Array:
        self.inputs.append((variable, own))
        # In the trace in which the function started, also when a lax body reads the variable first: a tape must be able
        # to see that its targets depend on it.
        with jex.set_current_trace(self._trace):
            return markers.first_value(jax.core.ShapedArray(shape, jnp.dtype(compat.dtype_of(variable))))

    def _other_input(self, aval: Any) -> jax.Array:
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
    def initial(self, variable: Variable) -> jax.Array:
        if id(variable) not in self._values:
            raise DiscoveryMismatch(variable)
        return self._values[id(variable)]

    @override
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
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


def _evaluate(closed: jex.ClosedJaxpr, *args: PyTree) -> list[Any]:
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
    initial: jax.Array
    value: jax.Array
    written: bool = False
    diverged: bool = False
    components: jax.Array | None = None
    increment: jax.Array | None = None
    replaced: bool = False

    def move(self, value: jax.Array, increment: jax.Array | None) -> None:
        """Gives it the value that an increment leads to."""
        self.value, self.components = value, None
        if not self.replaced:
            before = self.increment
            self.increment = increment if before is None or increment is None else before + increment

    def replace(self, value: jax.Array, components: jax.Array | None = None) -> None:
        """Gives it another value."""
        self.value, self.components, self.increment, self.replaced = value, components, None, True

    @property
    def policy(self) -> Policy:
        """Its row of the policy table."""
        return policy_of(self.variable)


def _aval(array: jax.Array) -> Any:
    """Returns shape and dtype of an array as a program sees it."""
    aval = jax.typeof(array)
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _has_callback(jaxpr: jex.Jaxpr) -> bool:
    inner = (j for eqn in jaxpr.eqns for j in jex.jaxprs_in_params(eqn.params))
    # jax.debug.print has a name of its own.
    is_one = (p == "debug_print" or "callback" in p for p in (eqn.primitive.name for eqn in jaxpr.eqns))
    return any(is_one) or any(map(_has_callback, inner))
