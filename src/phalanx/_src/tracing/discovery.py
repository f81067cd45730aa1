# SPDX-License-Identifier: Apache-2.0
"""Records of what a function does while it is traced, and the two passes that run it: tracing and eager execution.

In the first trace, a tape assumes that each target depends on each source. If the finished trace shows that a target does not,
the function is traced a second time, and the tape then returns None for unconnected sources. An eager execution follows a
trace too: it must use the same variables and tapes as the trace did.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import ComponentSizes
from phalanx._src.tracing import context, draws, markers, update_sharding
from phalanx._src.tracing.draws import AbstractIterator, Draw
from phalanx._src.tracing.entry import Entry
from phalanx._src.tracing.policy import describe
from phalanx._src.tracing.strategy import AbstractStrategy, Update
from phalanx._src.typed_jax import set_current_trace
from phalanx.errors import TraceError, VariableError
from phalanx.typing import PyTree


@dataclass(frozen=True)
class Notes:
    """What a pass records of a function, in the order in which it happens.

    Args:
      runs: one `Discovery` per `Strategy.run` inside the function.
      strategies: strategies whose `run` the function calls.
      reducing: strategies whose `reduce` or `gather` the function calls.
      used_per_replica: arrays of per-replica values that the function reduces, gathers or gives to replicas.
      optimizers: optimizers that the function applies.
      seeds: state variables of the random generators that the function draws from.
      lookups: per lookup, the table and the shape of the ids. The trace takes the positions of these ids among the rows that
        the program has fetched.
      draws: batches that the function takes from iterators. The trace takes their arrays.
      equal: variables that a replica assigns values that must be equal on all replicas. See `equality`.
    """

    runs: list["Discovery"] = field(default_factory=list)
    strategies: list[AbstractStrategy] = field(default_factory=list)
    reducing: list[AbstractStrategy] = field(default_factory=list)
    used_per_replica: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    seeds: list[Variable] = field(default_factory=list)
    lookups: list[tuple[Variable, tuple[int, ...]]] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    equal: list[Variable] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Discovery(Notes):
    """What one function did while it was traced. The optimizers and seeds of each `Strategy.run` inside are among its own.

    The inputs of the trace are, in this order: values or components of variables, mixed with positions of looked-up rows and
    arrays of drawn batches (see `inputs`); then the arguments of the function.

    Args:
      variables: variables that the function reads or writes, in the order of their first use.
      written: per variable, whether the function writes it.
      inputs: per leading input of the trace, an index and a flag. An index below `len(variables)` means this variable: its
        components if the flag is True, else its value. A larger index means looked-up positions or an array of a batch.
      jaxpr: the trace.
      outputs: pytree of the shapes and dtypes that the function returns.
      connected: per gradient marker, a tuple with one bool per source. True if a target depends on the source.
      has_tapes: whether the function enters a gradient tape.
      has_callback: whether the function calls back to Python while it runs.
      updates: optimizer updates that run after the program, without their gradients.
      dims: per variable, the dim along which the replicas hold shards of it. None if each of them holds the whole.
      sizes: for a `Strategy.run` whose replicas have different numbers of rows, per result, the sizes of its components, or None.
      steps: for a `Strategy.run` of several steps, the number of steps that its arguments are stacked for; else None.
      plan: for such a `Strategy.run`, the program of a replica: a `programs.own_rows.DividedProgram`. None if replicas compute padding too.
      eager: whether the function is executed with real values instead of compiled.
    """

    variables: list[Variable]
    written: list[bool]
    inputs: list[tuple[int, bool]]
    jaxpr: jex.ClosedJaxpr
    outputs: PyTree
    connected: list[tuple[bool, ...]]
    has_tapes: bool
    has_callback: bool
    updates: list[Update]
    dims: list[int | None]
    sizes: tuple[ComponentSizes | None, ...] = ()
    steps: int | None = None
    plan: Any = None
    eager: bool = False

    @classmethod
    def of(
        cls,
        tracing: "Tracing",
        entries: Sequence[Entry],
        updates: Sequence[Update],
        jaxpr: jex.ClosedJaxpr,
        outputs: PyTree,
    ) -> "Discovery":
        """Returns the findings of a finished pass.

        Args:
          tracing: the pass.
          entries: the variables that the function used.
          updates: the updates that it deferred.
          jaxpr: the trace.
          outputs: pytree of the shapes and dtypes that the function returns.
        """
        notes, order = tracing.notes, {id(e.variable): i for i, e in enumerate(entries)}
        # Inputs that belong to no variable are numbered apart while the trace runs, because the number of variables is not
        # known before its end.
        places = [len(order) + x if isinstance(x, int) else order[id(x)] for x, _ in tracing.inputs]
        jaxpr = markers.with_first_values(jaxpr)
        return cls(
            variables=[e.variable for e in entries],
            written=[e.written for e in entries],
            inputs=[(place, is_component) for place, (_, is_component) in zip(places, tracing.inputs, strict=True)],
            jaxpr=jaxpr,
            outputs=outputs,
            connected=markers.connected(jaxpr.jaxpr),
            has_tapes=markers.has_tapes(jaxpr.jaxpr),
            has_callback=_has_callback(jaxpr.jaxpr),
            runs=notes.runs,
            strategies=notes.strategies,
            reducing=notes.reducing,
            used_per_replica=[x for x in notes.used_per_replica if not isinstance(x, jax.core.Tracer)],
            # The program around a `Strategy.run` must know the optimizers and generators inside, because it reads and writes
            # their variables.
            optimizers=[*notes.optimizers, *(o for r in notes.runs for o in r.optimizers)],
            seeds=[*notes.seeds, *(v for r in notes.runs for v in r.seeds)],
            lookups=notes.lookups,
            draws=notes.draws,
            equal=notes.equal,
            # The gradients are tracers of the finished trace. Keeping them would keep the whole trace alive.
            updates=[replace(u, gradients=[]) for u in updates],
            dims=[e.dim for e in entries],
        )

    def trains(self, sharded: Sequence[bool]) -> bool:
        """Returns whether the function is a training step.

        It is if it applies an optimizer or assigns a trainable variable. Without any trainable variable, its state is among its
        arguments: then it is one if it returns an array like a float that it takes, unless it takes no floats but batches.

        Args:
          sharded: for each argument, whether it differs between replicas, as batches do.
        """
        if self.optimizers or self.updates:
            return True
        if trainable := [w for v, w in zip(self.variables, self.written, strict=True) if v.trainable]:
            return any(trainable)
        arguments = zip(self.jaxpr.in_avals[len(self.inputs) :], sharded, strict=True)
        state = {
            (x.shape, x.dtype)
            for x, is_sharded in arguments
            if not is_sharded and jnp.issubdtype(x.dtype, jnp.floating)
        }
        # Results of replicas have a leading dim.
        results = {(shape, x.dtype) for x in self.jaxpr.out_avals for shape in (x.shape, x.shape[1:])}
        return bool(state & results) if state else any(sharded)

    def flat(self, values: Sequence[Any], parts: Sequence[Any], *args: PyTree) -> list[Any]:
        """Returns the flat inputs of the trace.

        Args:
          values: values of the variables, then looked-up positions and arrays of batches.
          parts: components of the variables.
          *args: arguments of the function.
        """
        return [(parts if is_component else values)[i] for i, is_component in self.inputs] + jax.tree.leaves(args)

    def closed_over(self) -> list[jax.Array]:
        """Returns arrays that are sharded over devices and constants of the trace. JAX cannot compile these into a program."""
        return [self.jaxpr.consts[i] for i in self._places()]

    def taking(self, inputs: Sequence[Any]) -> "Discovery":
        """Returns this trace with inputs of a program instead of the arrays of `closed_over`."""
        consts = list(self.jaxpr.consts)
        for i, array in zip(self._places(), inputs, strict=True):
            consts[i] = array
        return replace(self, jaxpr=jex.ClosedJaxpr(self.jaxpr.jaxpr, consts)) if inputs else self

    def _places(self) -> list[int]:
        # Not any sharded constant: Keras reads variables that a step does not use, and the program may consume their components.
        ids = {id(x) for x in self.used_per_replica if isinstance(x, jax.Array) and not x.is_fully_replicated}
        return [i for i, x in enumerate(self.jaxpr.consts) if id(x) in ids] if ids else []

    def evaluate(self, values: Sequence[Any], parts: Sequence[Any], *args: PyTree) -> PyTree:
        """Runs the trace and returns the result of the function. The parameters are as for `flat`."""
        return self.result(self._run(self.jaxpr, *self.flat(values, parts, *args)))

    def without_tapes(self, *flat: PyTree) -> jex.ClosedJaxpr:
        """Returns the trace with the operations that its tapes stand for, given its flat inputs or their shapes."""
        return jax.make_jaxpr(lambda *inputs: self._run(self.jaxpr, *inputs))(*flat)

    def result(self, flat: Sequence[Any]) -> PyTree:
        """Returns the result of the function, given the flat outputs of the trace."""
        tree: PyTree = jax.tree.structure(self.outputs)
        return tree.unflatten(flat)

    @property
    def _run(self) -> Callable[..., list[Any]]:
        return markers.evaluate if self.has_tapes else _evaluate


class DiscoveryMismatch(BaseException):
    """A function used a variable that it did not use when it was traced before.

    It is not an `Exception`, because Keras re-creates exceptions that pass through a layer from their message alone (in
    `inject_argument_info_in_traceback`), and `variable` would be lost.
    """

    def __init__(self, variable: Variable) -> None:
        super().__init__(describe(variable))
        self.variable = variable


class NeedsProgram(BaseException):
    """Eager code used a gradient tape, which works only in a trace. The default strategy catches this and starts a trace."""


class AbstractPass(ABC):
    """One run of a function, either to trace it or to execute it eagerly.

    Attributes:
      notes: what the function has done so far.
      trace: the trace of JAX that the whole function belongs to, and not only a body in it.
      marks_tapes: whether tapes leave markers in the trace. False in an eager execution, whose gradients are computed before.
      is_eager: whether the function is, or will be, executed with real values.
      refused: descriptions of variables that must not be assigned.
    """

    marks_tapes = True
    is_eager = True
    refused: Collection[str] = ()

    def __init__(self) -> None:
        self.notes = Notes()
        # JAX has no public function that only returns the current trace. This one also evaluates eagerly inside its block.
        with jex.take_current_trace() as trace:
            self.trace: object = trace

    @abstractmethod
    def initial(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable` at the start of the function."""

    def dim(self, variable: Variable) -> int | None:
        """Returns the dim along which the replicas hold shards of `variable`, which `initial` returns. None if they hold the whole."""
        return None

    @abstractmethod
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        """Returns the replicas' components of `variable`, (num_replicas, ...). None if its value determines them."""

    def look_up(self, table: Variable, ids: jax.Array) -> jax.Array:
        """Records a lookup of rows of `table`. Returns the positions of `ids` among the rows that the program fetches."""
        raise VariableError(
            f"a lookup of rows of {describe(table)}",
            "the table is stored on parameter servers, and only a scheduled step can fetch its rows.",
            "coordinator.schedule(step, args=(...)), or strategy.run(fn)",
        )

    def draw(self, iterator: AbstractIterator, *, is_optional: bool) -> tuple[Any] | None:
        """Returns the next batch of an iterator, in a 1-tuple, as inputs of the trace. None if the iterator is at its end."""
        raise draws.refuse_draw()

    @abstractmethod
    def enter_tape(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the values of variables as the tape with number `tape` watches them."""

    @abstractmethod
    def next_connected(self, num_sources: int) -> tuple[bool, ...]:
        """Returns, for the next gradient marker, which of its sources are connected to a target."""

    @abstractmethod
    def next_gradients(self) -> list[Any] | None:
        """Returns the values of the next gradient marker in an eager execution. None in a trace."""

    @abstractmethod
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        """Returns the `Discovery` of the next `Strategy.run`. If it is not known yet, `trace()` returns it."""


class Tracing(AbstractPass):
    """The pass that traces a function. Variables become inputs of the trace when the function first uses them.

    Args:
      connected: per gradient marker, which sources are connected, as an earlier trace found out. None in the first trace.
      refused: descriptions of variables that an earlier trace assigned values that may differ between replicas.
      mapped: whether the function is the program of one of several replicas.
      is_eager: whether the function will be executed with real values.
    """

    def __init__(
        self,
        connected: Sequence[tuple[bool, ...]] | None = None,
        refused: Collection[str] = (),
        *,
        mapped: bool = False,
        is_eager: bool = False,
    ) -> None:
        super().__init__()
        self.refused, self._mapped, self.is_eager = refused, mapped, is_eager
        self.inputs: list[tuple[Variable | int, bool]] = []
        self.ids: list[Any] = []
        self._num_extra_inputs = 0
        self._connected = None if connected is None else iter(connected)

    @override
    def initial(self, variable: Variable) -> jax.Array:
        shape = tuple(variable.shape)
        if isinstance(variable, compat.RowVariable) and self._mapped:
            # Also if a merge function, which sees the rows of all replicas, is the first to read it.
            shape = variable.shape_in_replica(lax.axis_size(REPLICA_AXIS))
        elif (dim := self.dim(variable)) is not None:
            shape = update_sharding.shape_of_shard(shape, dim)
        return self._input(variable, shape, is_component=False)

    @override
    def dim(self, variable: Variable) -> int | None:
        return update_sharding.dim_of_slot(context.get_strategy().topology, variable) if self._mapped else None

    @override
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        return self._input(variable, (num_replicas, *variable.shape), is_component=True)

    @override
    def look_up(self, table: Variable, ids: jax.Array) -> jax.Array:
        with set_current_trace(self.trace):
            self.ids.append(ids)
            self.notes.lookups.append((table, tuple(ids.shape)))
            return self._extra_input(jax.core.ShapedArray(ids.shape, jnp.dtype("int32")))

    @override
    def draw(self, iterator: AbstractIterator, *, is_optional: bool) -> tuple[Any] | None:
        drawn, batch = draws.draw(iterator, self.notes.draws, is_optional=is_optional)
        self.notes.draws.append(drawn)
        if batch is None:
            return None
        with set_current_trace(self.trace):
            arrays = [self._extra_input(_aval(x)) for x in batch.arrays]
        args, _ = batch.structure.join(arrays)
        return args  # type: ignore[no-any-return]

    @override
    def enter_tape(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        with set_current_trace(self.trace):
            return markers.enter_p.bind(*values, tape=tape)

    @override
    def next_connected(self, num_sources: int) -> tuple[bool, ...]:
        return (True,) * num_sources if self._connected is None else _next_connected(self._connected, num_sources)

    @override
    def next_gradients(self) -> list[Any] | None:
        return None

    @override
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        self.notes.runs.append(trace())
        return self.notes.runs[-1]

    def _input(self, variable: Variable, shape: tuple[int, ...], *, is_component: bool) -> jax.Array:
        self.inputs.append((variable, is_component))
        # A `lax` body may be the first to read a variable. The input must still belong to the trace of the whole function:
        # inside the body's trace, no tape around the body would see that its targets depend on the variable.
        with set_current_trace(self.trace):
            return markers.first_value(jax.core.ShapedArray(shape, jnp.dtype(compat.dtype_of(variable))))

    def _extra_input(self, aval: Any) -> jax.Array:
        """Returns an input of the trace that belongs to no variable. `Discovery.of` numbers it after the variables."""
        self.inputs.append((self._num_extra_inputs, False))
        self._num_extra_inputs += 1
        return markers.first_value(aval)


class Executing(AbstractPass):
    """The pass that executes a function eagerly, with real values.

    Args:
      discovery: the record of an earlier trace of the same function.
      values: one value per variable of `discovery`.
      parts: per variable, its components or None. Empty inside a replica.
      gradients: per gradient marker, its values.
    """

    marks_tapes = False

    def __init__(
        self, discovery: Discovery, values: Sequence[Any], parts: Sequence[Any], gradients: Sequence[list[Any]]
    ) -> None:
        super().__init__()
        self.discovery = discovery
        self._values = dict(zip(map(id, discovery.variables), values, strict=True))
        self._parts = dict(zip(map(id, discovery.variables), parts, strict=False))
        self._dims = dict(zip(map(id, discovery.variables), discovery.dims, strict=True))
        self._connected = iter(discovery.connected)
        self._gradients, self._runs = iter(gradients), iter(discovery.runs)

    @override
    def initial(self, variable: Variable) -> jax.Array:
        # The values of all known variables were fetched before the execution, so there is no value for another one.
        if id(variable) not in self._values:
            raise DiscoveryMismatch(variable)
        value: jax.Array = self._values[id(variable)]
        return value

    @override
    def dim(self, variable: Variable) -> int | None:
        return self._dims[id(variable)]

    @override
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        parts: jax.Array | None = self._parts[id(variable)]
        return parts

    @override
    def enter_tape(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        return values

    @override
    def next_connected(self, num_sources: int) -> tuple[bool, ...]:
        return _next_connected(self._connected, num_sources)

    @override
    def next_gradients(self) -> list[Any] | None:
        return next(self._gradients)

    @override
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        return next(self._runs)


def _next_connected(connected: Iterator[tuple[bool, ...]], num_sources: int) -> tuple[bool, ...]:
    """Returns the next item of `connected`.

    Raises:
      TraceError: it is for another number of sources, so the function does not do the same as in its first trace.
    """
    flags = next(connected, ())
    if len(flags) != num_sources:
        raise used_differently("a gradient tape")
    return flags


def used_differently(what: str) -> TraceError:
    """Returns the error for a function that does something else when it is traced a second time."""
    return TraceError(
        f"{what} in a traced function",
        "the function used it differently when it was traced a second time.",
        "do not branch on Python state that the function itself changes",
    )


def _evaluate(closed: jex.ClosedJaxpr, *args: PyTree) -> list[Any]:
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def _aval(array: jax.Array) -> Any:
    """Returns the shape, dtype and weak type of an array."""
    aval = jax.typeof(array)
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _has_callback(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether `jaxpr`, or a jaxpr inside it, calls back to Python."""
    # All callback primitives have "callback" in their name, except the one of `jax.debug.print`.
    names = (eqn.primitive.name for eqn in jaxpr.eqns)
    inner_jaxprs = (inner for eqn in jaxpr.eqns for inner in jex.jaxprs_in_params(eqn.params))
    return any(name == "debug_print" or "callback" in name for name in names) or any(map(_has_callback, inner_jaxprs))
