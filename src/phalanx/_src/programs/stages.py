# SPDX-License-Identifier: Apache-2.0
"""Divides traces at the operations in which replicas communicate, and runs traces for different numbers of rows as one program.

Between two exchanges, a replica runs the part of the trace that fits its rows: what it computes alone is a branch, and what it
exchanges has equal shapes on all replicas.

    rows ─┬─ part 0 for 4 rows ─┬─ exchanges ─┬─ part 1 for 4 rows ─┬─ exchanges ─ ... ─ results
          └─ part 0 for 3 rows ─┘             └─ part 1 for 3 rows ─┘
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from phalanx._src.collectives.primitives import communicates
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors.frames import place_in
from phalanx.typing import PyTree

_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
"""Operations that do nothing but evaluate a trace inside them."""

_Column = tuple[Any, ...]
"""What stands for one value in each trace: a variable or a literal. None in a trace that has no such value."""

_evaluate: Callable[..., list[Any]] = jax.core.eval_jaxpr


def _replaced(jaxpr: PyTree, **changes: PyTree) -> jex.Jaxpr:
    """Returns a trace without constants, and with other inputs, outputs and equations."""
    # With `jax_enable_checks`, JAX requires as many names as a trace has inputs and outputs. Unknown names fit any number.
    other: jex.Jaxpr = jaxpr.replace(constvars=[], debug_info=jaxpr.debug_info.with_unknown_names(), **changes)
    return other


class IndivisibleError(Exception):
    """Traces for different numbers of rows do not exchange the same. The message names the operation and its line."""


class StagedTrace:
    """The trace of a replica with some number of rows.

    Args:
      fn: the function to trace. Returns a list of arrays.
      inputs: its arguments: arrays, or their shapes.

    Attributes:
      jaxpr: the trace.
      consts: its constants.
      stages: its equations, divided at the exchanges.
    """

    def __init__(self, fn: Callable[..., list[Any]], inputs: Sequence[Any]) -> None:
        closed = jax.make_jaxpr(fn)(*inputs)
        # A call would be one exchange with all that it computes, so it is opened.
        if any(map(_is_communicating_call, closed.jaxpr.eqns)):
            closed = jax.make_jaxpr(lambda *arrays: _inlined(closed.jaxpr, closed.consts, arrays))(*inputs)
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.stages = divided(self.jaxpr.eqns)
        steps = ((n, eqn) for n, stage in enumerate(self.stages) for eqn in (*stage.part, *stage.exchanges))
        self._last_reads = {v: n for n, eqn in steps for v in _read(eqn)}
        # Results are read after the last stage.
        self._last_reads |= {v: len(self.stages) for v in self.jaxpr.outvars if isinstance(v, jex.Var)}

    def due(self, number: int) -> list[Any]:
        """Returns the variables and literals that are needed after a part: those that are exchanged, or the results."""
        exchanged = [v for eqn in self.stages[number].exchanges for v in eqn.invars]
        return exchanged if number < len(self.stages) - 1 else list(self.jaxpr.outvars)

    def depends_on(self, inputs: Sequence[bool]) -> list[bool]:
        """Returns which results depend on some of the inputs in another way than by an exchange.

        Args:
          inputs: for each input, whether it is one of these.
        """
        reached = {v for v, is_one in zip(self.jaxpr.invars, inputs, strict=True) if is_one}
        for eqn in self.jaxpr.eqns:
            if not communicates(eqn) and any(v in reached for v in _read(eqn)):
                reached.update(eqn.outvars)
        return [isinstance(v, jex.Var) and v in reached for v in self.jaxpr.outvars]

    def carried(self, number: int) -> list[jex.Var]:
        """Returns the values that a part computes and a later part reads."""
        return [v for eqn in self.stages[number].part for v in eqn.outvars if self._last_reads.get(v, 0) > number]


class Stages:
    """Traces of one function for different numbers of rows, as one program. Made, and run, inside a mapped function.

    Args:
      traces: the traces.

    Raises:
      IndivisibleError: the traces do not exchange the same.
    """

    def __init__(self, traces: Sequence[StagedTrace]) -> None:
        for other in traces[1:]:
            _require_same_interface(traces[0], other)
        # All traces exchange the same, so that the operations of the first stand for those of all.
        self._values = values = _Values(traces)
        self._steps: list[_Part | _Exchange] = []
        for number, stage in enumerate(traces[0].stages):
            # The last stage has no exchanges, so what the loop leaves here are the last exchanges of all.
            self._last_exchanges = [
                step for step in self._steps if isinstance(step, _Exchange) and step.stage == number - 1
            ]
            self._steps.append(_Part(traces, number, values))
            for place, eqn in enumerate(stage.exchanges):
                eqns = [trace.stages[number].exchanges[place] for trace in traces]
                sent = [values.find(column) for column in _columns(each.invars for each in eqns)]
                self._steps.append(_Exchange(number, traces[0].jaxpr, eqn, sent))
                for column in _columns(each.outvars for each in eqns):
                    values.add(column)
        self._results = [values.find(column) for column in _columns(trace.jaxpr.outvars for trace in traces)]

    def run(
        self,
        inputs: Sequence[Any],
        branch: jax.Array | None,
        note_own_part: Callable[[list[Any]], jax.Array] | None = None,
    ) -> list[Any]:
        """Returns the outputs of this replica, with room for those of the largest trace.

        Args:
          inputs: the inputs of the traces, with room for those of the largest.
          branch: int32 array (). The number of the trace that fits this replica. None if there is only one.
          note_own_part: function of what the last exchanges send. They wait until the array that it returns is computed.
        """
        arrays, token = [*inputs, *self._values.consts], None
        for step in self._steps:
            if note_own_part is not None and self._last_exchanges and step is self._last_exchanges[0]:
                token = note_own_part([_pick(arrays, x) for each in self._last_exchanges for x in each.sent])
            arrays += step.run(arrays, token if isinstance(step, _Exchange) else branch)
        results = [_pick(arrays, x) for x in self._results]
        if note_own_part is None or self._last_exchanges:
            return results
        # Without others, all is the own part.
        token = note_own_part(results)
        return [jnp.where(token, x, jnp.zeros_like(x)) for x in results]


class _Values:
    """The values that are known while a program runs, numbered in the order in which they become known.

    Attributes:
      consts: the constants of all traces. Their values follow those of the inputs.
    """

    def __init__(self, traces: Sequence[StagedTrace]) -> None:
        self._numbers: list[dict[jex.Var, int]] = [{} for _ in traces]
        self._known: dict[tuple[int, ...], int] = {}
        self._columns: list[_Column] = []  # Keeps the variables alive, whose ids are keys.
        self.consts: list[Any] = []
        for column in _columns(trace.jaxpr.invars for trace in traces):
            self.add(column)
        first = len(self._columns)
        for i, trace in enumerate(traces):
            # Traces share the constants that the function closes over, and each has its own numbers. Arrays compare by value.
            for variable, const in zip(trace.jaxpr.constvars, trace.consts, strict=True):
                place = next((n for n, other in enumerate(self.consts) if other is const), len(self.consts))
                if place == len(self.consts):
                    self.consts.append(const)
                    self._columns.append((variable,))
                self._numbers[i][variable] = first + place

    def add(self, column: _Column) -> None:
        """Adds the next value."""
        for numbers, variable in zip(self._numbers, column, strict=True):
            if isinstance(variable, jex.Var):
                numbers.setdefault(variable, len(self._columns))
        self._known[tuple(map(id, column))] = len(self._columns)
        self._columns.append(column)

    def number(self, trace: int, variable: jex.Var) -> int | None:
        """Returns the number of the value of a variable of a trace. None if it is not known yet."""
        return self._numbers[trace].get(variable)

    def find(self, column: _Column) -> PyTree:
        """Returns the number of a value, or a literal that is equal in all traces. None if the value is not known yet."""
        if all(isinstance(v, jex.Literal) and (v.val is column[0].val or v.val == column[0].val) for v in column):
            return column[0]
        known = self._known.get(tuple(map(id, column)))
        if known is not None or any(isinstance(v, jex.Literal) for v in column):
            return known
        numbers = {self.number(i, v) for i, v in enumerate(column)}
        return numbers.pop() if len(numbers) == 1 else None


class _Exchange:
    """An operation in which replicas communicate.

    Args:
      stage: the number of its stage.
      jaxpr: the trace that it belongs to.
      eqn: the operation.
      sent: its inputs: numbers of values, and literals.
    """

    def __init__(self, stage: int, jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, sent: Sequence[Any]) -> None:
        self.stage, self.sent = stage, sent
        self._arrays = [x for x in sent if isinstance(x, int)]
        # A literal that is another one in other traces becomes a variable.
        inputs = [_variable(v) if isinstance(x, int) else v for v, x in zip(eqn.invars, sent, strict=True)]
        variables = [v for v in inputs if isinstance(v, jex.Var)]
        self._jaxpr = _replaced(jaxpr, invars=variables, outvars=eqn.outvars, eqns=[eqn.replace(invars=inputs)])

    def run(self, arrays: Sequence[Any], token: jax.Array | None) -> list[Any]:
        """Communicates, after `token` has been computed, and returns the results."""
        values = [arrays[number] for number in self._arrays]
        if token is not None:
            # Otherwise XLA could begin to send metrics before it computes gradients, and would wait for others in between.
            values = [jnp.where(token, x, jnp.zeros_like(x)) for x in values]
        return _evaluate(self._jaxpr, [], *values)


class _Part:
    """What a replica computes alone between two exchanges.

    Args:
      traces: the traces.
      number: the number of the stage.
      values: the values that are known before it. Those that it computes are added.
    """

    def __init__(self, traces: Sequence[StagedTrace], number: int, values: _Values) -> None:
        # What must be known has its place in all traces. What is carried is paired by kind, whatever it means in each trace.
        due = [column for column in _columns(trace.due(number) for trace in traces) if values.find(column) is None]
        due = list({tuple(map(id, column)): column for column in due}.values())
        carried = [
            [v for v in trace.carried(number) if not any(v is column[i] for column in due)]
            for i, trace in enumerate(traces)
        ]
        columns = [*due, *_aligned(carried)]
        self._branches = [_Branch(i, trace, number, columns, values) for i, trace in enumerate(traces)]
        self._shapes = [_common_shape(column) for column in columns]
        first = self._branches[0]
        self._is_same = all(branch.text == first.text for branch in self._branches[1:])
        for column in columns:
            values.add(column)

    def run(self, arrays: Sequence[Any], branch: jax.Array | None) -> list[Any]:
        """Computes the values of this part, with room for those of the largest trace."""
        # The update of an optimizer depends on gradients and not on rows: it is compiled once, and XLA can reuse its buffers.
        if self._is_same or branch is None:
            return self._branches[0].run(arrays)
        if not jax.sharding.get_abstract_mesh().auto_axes:
            runs = [lambda each=each: each.run_with_room(arrays, self._shapes) for each in self._branches]
            results: list[Any] = lax.switch(branch, runs)
            return results
        # XLA adds exchanges along the other axes of the mesh, in which it lets devices of all replicas take part. In a branch, some
        # of these would wait for devices that run another one.
        columns = zip(*(each.run_with_room(arrays, self._shapes) for each in self._branches), strict=True)
        return [lax.select_n(branch, *values) for values in columns]


class _Branch:
    """The part of one trace.

    Args:
      index: the number of the trace.
      trace: the trace.
      number: the number of the stage.
      columns: the values that the part must return.
      values: the values that are known before it.

    Attributes:
      text: what it computes from which values. Two branches with equal texts are the same.
    """

    def __init__(
        self, index: int, trace: StagedTrace, number: int, columns: Sequence[_Column], values: _Values
    ) -> None:
        eqns = trace.stages[number].part
        self._results = [column[index] for column in columns]
        results = [v for v in self._results if v is not None]
        used = dict.fromkeys(v for eqn in eqns for v in _read(eqn))
        used |= dict.fromkeys(v for v in results if isinstance(v, jex.Var))
        numbers = {v: n for v in used if (n := values.number(index, v)) is not None}
        known, self._numbers = list(numbers), list(numbers.values())
        self._shapes = [_aval(v).shape for v in known]
        self._jaxpr = _replaced(trace.jaxpr, invars=known, outvars=results, eqns=eqns)
        self.text = (self._numbers, [v is None for v in self._results], str(self._jaxpr))

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results of this branch."""
        pairs = zip(self._numbers, self._shapes, strict=True)
        return _evaluate(self._jaxpr, [], *(_cut(arrays[number], shape) for number, shape in pairs))

    def run_with_room(self, arrays: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
        """Returns the results of all branches, with zeros for those of others."""
        results = iter(self.run(arrays))
        return [
            jnp.zeros(shape.shape, shape.dtype) if v is None else _grown(next(results), shape.shape)
            for v, shape in zip(self._results, shapes, strict=True)
        ]


class _Stage(NamedTuple):
    """What a trace does up to its next exchanges.

    Args:
      part: the equations that a replica evaluates alone.
      exchanges: the equations after them, in which replicas communicate.
    """

    part: list[jex.JaxprEqn]
    exchanges: list[jex.JaxprEqn]


def divided(eqns: Sequence[jex.JaxprEqn]) -> list[_Stage]:
    """Divides the equations of a trace into as few stages as possible.

    What an exchange needs is computed as late as possible, so that little is kept from one part to the next. The rest is computed in
    the part that has its inputs.
    """
    exchanges = {i for i, eqn in enumerate(eqns) if communicates(eqn)}
    # Forwards: the stage in which each equation can be evaluated at the earliest. It decides about the exchanges.
    stage_of: dict[int, int] = {}
    ready: dict[jex.Var, int] = {}
    for i, eqn in enumerate(eqns):
        stage_of[i] = max((ready.get(v, 0) for v in _read(eqn)), default=0)
        ready.update(dict.fromkeys(eqn.outvars, stage_of[i] + (i in exchanges)))
    # Backwards: the stage in which an exchange needs it.
    due: dict[jex.Var, int] = {}
    is_due: set[int] = set(exchanges)
    for i, eqn in reversed(list(enumerate(eqns))):
        stages = [due[v] for v in eqn.outvars if v in due]
        if i not in exchanges:
            if not stages:
                continue
            stage_of[i] = min(stages)
            is_due.add(i)
        for v in _read(eqn):
            due[v] = min(due.get(v, stage_of[i]), stage_of[i])
    # Forwards again, for what no exchange needs: its inputs may have moved to later stages.
    for i, eqn in enumerate(eqns):
        if i not in is_due:
            stage_of[i] = max((ready.get(v, 0) for v in _read(eqn)), default=0)
        ready.update(dict.fromkeys(eqn.outvars, stage_of[i] + (i in exchanges)))
    divided = [_Stage([], []) for _ in range(2 + max((stage_of[i] for i in exchanges), default=-1))]
    for i, eqn in enumerate(eqns):
        stage = divided[stage_of[i]]
        (stage.exchanges if i in exchanges else stage.part).append(eqn)
    return divided


def _is_communicating_call(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in _CALLS and communicates(eqn)


def _inlined(jaxpr: jex.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a trace, and traces of calls inside it in which replicas communicate, equation by equation."""

    def evaluate_one(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        if _is_communicating_call(eqn):
            (inner,) = jex.jaxprs_in_params(eqn.params)
            return _inlined(inner, consts_of(eqn), values)
        return evaluate_alone(jaxpr, eqn, values)

    return walk(jaxpr, consts, inputs, evaluate_one)


def walk(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    evaluate_one: Callable[[jex.Jaxpr, jex.JaxprEqn, list[Any]], list[Any]],
) -> list[Any]:
    """Evaluates a trace equation by equation, and returns its outputs.

    Args:
      jaxpr: the trace.
      consts: the values of its constants.
      inputs: the values of its inputs.
      evaluate_one: returns the results of an equation, given the trace, the equation, and the values of its inputs.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    value = lambda v: v.val if isinstance(v, jex.Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, evaluate_one(jaxpr, eqn, list(map(value, eqn.invars))), strict=True))
    return list(map(value, jaxpr.outvars))


def evaluate_alone(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of a trace.

    Args:
      jaxpr: the trace.
      eqn: the equation.
      values: the values of its inputs.
    """
    # A dict, because `x * x` reads a variable twice, and the inputs of a trace must differ.
    inputs = {v: x for v, x in zip(eqn.invars, values, strict=True) if isinstance(v, jex.Var)}
    one = _replaced(jaxpr, invars=list(inputs), outvars=eqn.outvars, eqns=[eqn])
    return _evaluate(one, [], *inputs.values())


def consts_of(eqn: jex.JaxprEqn) -> Sequence[Any]:
    """Returns the values of the constants of the trace that a call evaluates."""
    closed = next((x for x in eqn.params.values() if isinstance(x, jex.ClosedJaxpr)), None)
    return () if closed is None else closed.consts


def _read(eqn: jex.JaxprEqn) -> Iterator[jex.Var]:
    return (v for v in eqn.invars if isinstance(v, jex.Var))


def _columns(rows: Iterable[Sequence[Any]]) -> list[_Column]:
    return list(zip(*rows, strict=True))


def _aligned(carried: Sequence[Sequence[jex.Var]]) -> list[_Column]:
    """Returns columns of variables of equal dtype and rank, in order. A trace with fewer of them has None in the others.

    Raises:
      IndivisibleError: traces keep different numbers of random keys, of which there are no zeros.
    """
    kinds: dict[Any, list[list[jex.Var]]] = {}
    for i, variables in enumerate(carried):
        for v in variables:
            kinds.setdefault((_aval(v).dtype, _aval(v).ndim), [[] for _ in carried])[i].append(v)
    for (dtype, _), group in kinds.items():
        if jnp.issubdtype(dtype, jax.dtypes.extended) and len({*map(len, group)}) > 1:
            raise IndivisibleError("it draws other random keys for fewer rows")
    return [column for group in kinds.values() for column in zip_longest(*group)]


def _common_shape(column: _Column) -> jax.ShapeDtypeStruct:
    avals = [v.aval for v in column if v is not None]
    return shape_dtype(tuple(map(max, zip(*(aval.shape for aval in avals), strict=True))), avals[0].dtype)


def _require_same_interface(first: StagedTrace, other: StagedTrace) -> None:
    """Checks that two traces exchange the same, and return arrays of equal dtypes and ranks.

    Raises:
      IndivisibleError: they do not. The message names the first operation that differs.
    """
    pairs = zip_longest(
        *([(n, eqn) for n, stage in enumerate(trace.stages) for eqn in stage.exchanges] for trace in (first, other))
    )
    for one, another in pairs:
        if one is None or another is None or one[0] != another[0] or _described(one[1]) != _described(another[1]):
            eqn = (one or another)[1]
            place = place_in(eqn.source_info.traceback)
            raise IndivisibleError(f"{eqn.primitive.name} at {place}" if place else eqn.primitive.name)
    kinds = [[(v.aval.dtype, v.aval.ndim) for v in trace.jaxpr.outvars] for trace in (first, other)]
    if kinds[0] != kinds[1]:
        raise IndivisibleError("its results have other dtypes or other numbers of dims")


def _described(eqn: jex.JaxprEqn) -> tuple[Any, ...]:
    """Returns the key of an exchange, apart from the names of its variables."""
    inner = [str(jaxpr) for jaxpr in jex.jaxprs_in_params(eqn.params)]
    return (
        eqn.primitive.name,
        [str(v.aval) for v in eqn.invars],
        [str(v.aval) for v in eqn.outvars],
        inner or str(eqn.params),
    )


def _variable(atom: PyTree) -> jex.Var:
    if isinstance(atom, jex.Var):
        return atom
    made: jex.Var = jax.make_jaxpr(lambda x: x)(shape_dtype(atom.aval.shape, atom.aval.dtype)).jaxpr.invars[0]
    return made


def _aval(variable: PyTree) -> PyTree:
    return variable.aval


def _pick(arrays: Sequence[Any], place: Any) -> PyTree:
    return place.val if isinstance(place, jex.Literal) else arrays[place]


def _cut(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    return array if tuple(array.shape) == tuple(shape) else array[tuple(map(slice, shape))]


def _grown(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns an array with zeros up to a shape."""
    array = jnp.asarray(array)
    # Nobody reads the zeros: the next part cuts them off, and so does whoever gets the results.
    widths = [(0, target - size) for target, size in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, widths) if any(map(any, widths)) else array
