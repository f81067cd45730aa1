# SPDX-License-Identifier: Apache-2.0
"""`jax.lax` control flow whose bodies may assign variables, as Dropout, BatchNormalization and metrics do.

Each function lifts the variables that its bodies write: their values become part of the loop state. All of them work inside
replica functions, inside `phalanx.function`, and outside programs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.collectives import primitives
from phalanx._src.compat import Variable
from phalanx._src.tracing import context
from phalanx._src.tracing.discovery import AbstractPass, Discovery
from phalanx._src.tracing.entry import Entry
from phalanx._src.tracing.policy import describe
from phalanx._src.tracing.records import Record, deliver
from phalanx._src.tracing.scope import LiftScope
from phalanx._src.tracing.strategy import Update
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, NestedWriteError, PhalanxError, TraceError, arguments, shown
from phalanx.typing import PyTree


class _Body(AbstractPass):
    """The pass over a body. A variable starts from the loop state if the body writes it, else from its value outside."""

    def __init__(self, outer: "_Surroundings", values: dict[int, Any]) -> None:
        super().__init__()
        self._outer, self._values = outer, values

    @override
    def initial(self, variable: Variable) -> jax.Array:
        value = self._values.get(id(variable))
        return self._outer.value(variable) if value is None else value

    @override
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        return None

    @override
    def look_up(self, table: Variable, ids: jax.Array) -> jax.Array:
        return self._outer.look_up(table, ids)

    @override
    def enter_tape(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        raise AssertionError("a tape cannot be entered in a body")

    @override
    def next_connected(self, num_sources: int) -> tuple[bool, ...]:
        raise AssertionError("a tape cannot be entered in a body")

    @override
    def next_gradients(self) -> list[Any] | None:
        return None

    @override
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        raise TraceError(
            "Strategy.run was called inside a control-flow body of Phalanx",
            "the program of the replicas cannot start inside a loop or a branch.",
            "strategy.run around the loop",
        )


class BodyScope(LiftScope):
    """The scope in which one body is traced."""

    @override
    def defer_update(self, update: Update) -> None:
        raise NestedWriteError(
            f"{type(update.optimizer).__name__}.apply was called in a body of phalanx.scan, cond, while_loop or remat",
            f"{context.get_strategy()!r} updates variables only after the step.",
            "call strategy.run once per step",
        )

    @staticmethod
    def around() -> "_Surroundings":
        """Returns the surroundings of a body that starts here."""
        return _Surroundings(compat.active_scope())


class _Surroundings:
    """The code around a body: a traced function, or eager code.

    Args:
      scope: the Keras scope around the body. None in eager code.
    """

    def __init__(self, scope: keras.StatelessScope | None) -> None:
        self._scope = scope
        self._written_entries: list[Entry] = []
        # The body will read variables of the outer scope. If JAX caches the trace that calls the loop (under `jax.jit`), the
        # outer scope must know that the cached trace depends on their values.
        if isinstance(scope, LiftScope):
            scope.note_read()

    def value(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable` outside the body."""
        value = None
        # A plain scope of Keras, as `stateless_call` opens one, has values of only some variables.
        if isinstance(self._scope, LiftScope):
            value = self._scope.value(variable)
        elif self._scope is not None:
            value = self._scope.get_current_value(variable)
        value = compat.raw_value(variable) if value is None else value
        # A variable that the body creates has no value until all scopes are closed. Its shape is enough to trace the body.
        return jnp.zeros(variable.shape, compat.dtype_of(variable)) if value is None else value

    def look_up(self, table: Variable, ids: jax.Array) -> jax.Array:
        """Records a lookup of rows of `table` in the body."""
        if not isinstance(self._scope, LiftScope):
            raise TraceError(
                f"a lookup of rows of {describe(table)} in a loop or branch outside a step",
                "the table is stored on parameter servers, and only a scheduled step can fetch its rows.",
                "coordinator.schedule(step, args=(...))",
            )
        return self._scope.pass_.look_up(table, ids)

    def body(self, values: dict[int, Any] | None = None, *, is_once: bool = False) -> BodyScope:
        """Returns a scope for one trace of a body.

        Args:
          values: initial values of variables, by id. Other variables start from their values outside the body.
          is_once: whether the body runs once, so that what it records can leave it.
        """
        outer = self._scope if isinstance(self._scope, LiftScope) else None
        scope = BodyScope(_Body(self, values or {}), mapped=outer is not None and outer.mapped)
        if not is_once or (outer is not None and outer.records is None):
            scope.records = None
        if outer is not None:
            # A program must know every generator and optimizer that it uses, in bodies too.
            scope.pass_.notes = outer.pass_.notes
            # The body of a loop inside an optimizer's update is in update context too.
            scope.free_writes = outer.free_writes
        return scope

    def written_values(self, scope: BodyScope) -> list[Any]:
        """Records which variables were written in `scope`, and returns their new values."""
        self._written_entries = [e for e in scope.entries.values() if e.written]
        return [e.value for e in self._written_entries]

    def discover_writes(self, fn: Callable[..., Any], *args: PyTree) -> None:
        """Traces `fn(*args)` and adds the variables that it writes to the known ones.

        The loop state of a `lax` primitive must be complete before its body is traced, so the body is traced once before.
        """
        entries = {id(e.variable): e for e in self._written_entries}

        def traced(*args: PyTree) -> None:
            with self.body() as scope:
                fn(*args)
            for entry in scope.entries.values():
                if entry.written:
                    entries.setdefault(id(entry.variable), entry).diverged |= entry.diverged

        # Keras initializes new variables when the outermost scope closes. In eager code, an outer scope moves that out of
        # the trace, where the initial values would be leaked tracers.
        with keras.StatelessScope() if self._scope is None else nullcontext():
            jax.eval_shape(traced, *args)
        self._written_entries = list(entries.values())

    def current_values(self) -> list[Any]:
        """Returns the values outside the body of the variables that the body writes."""
        return [self.value(e.variable) for e in self._written_entries]

    def call(self, fn: Callable[..., Any], values: list[Any], *args: PyTree) -> tuple[Any, list[Any]]:
        """Calls `fn(*args)` as a body.

        Args:
          fn: the body.
          values: initial values of the variables that the body writes.
          *args: arguments of the body.

        Returns:
          The result of `fn`, and the new values of the variables.
        """
        variables = [e.variable for e in self._written_entries]
        with self.body({id(v): x for v, x in zip(variables, values, strict=True)}) as scope:
            result = _read_variables(fn(*args))
            return result, [scope.get_current_value(v) for v in variables]

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` as a branch that takes the values of the written variables as its first argument."""

        @functools.wraps(fn)
        def branch(values: list[Any], *args: PyTree) -> tuple[Any, list[Any]]:
            return self.call(fn, values, *args)

        return branch

    def commit(self, values: list[Any], records: Sequence[Record] = ()) -> None:
        """Assigns new values to the variables that the body writes, and passes on what it recorded."""
        if isinstance(self._scope, LiftScope) and self._scope.records is not None:
            self._scope.records.extend(records)
        else:
            deliver(records)
        for entry, value in zip(self._written_entries, values, strict=True):
            entry.value = value
            if isinstance(self._scope, LiftScope):
                self._scope.commit(entry)
            else:
                entry.variable.assign(value)


def _read_variables(result: PyTree) -> PyTree:
    """Returns the result of a body with variables as their values there. `apply_gradients` returns one."""
    return jax.tree.map(lambda x: x.value if isinstance(x, Variable) else x, result)


def scan(  # noqa: PLR0917  (jax.lax.scan's own order)
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Runs `jax.lax.scan` with a body that may assign variables. May be called in any context.

    Args:
      f: function from `(carry, x)` to `(carry, y)`.
      init: pytree of arrays. The first carry.
      xs: pytree of arrays (length, ...), or None.
      length: number of steps. Required if `xs` has no leaves.
      reverse: whether to scan from the last x to the first.
      unroll: number of steps per iteration of the compiled loop. True unrolls all steps.

    Returns:
      The last carry, and the pytree of stacked ys (length, ...).

    Raises:
      InvalidArgumentError: an argument has the wrong type, the carries differ, or `xs` and `length` do not determine one number of steps.
      ReduceOpError: a leaf of `init` or `xs` is not an array of numbers.

    Source: jax.lax.scan.

    Example:
      >>> import jax.numpy as jnp, keras, phalanx
      >>> count = keras.Variable(0.0, trainable=False)
      >>> def body(carry, x):
      ...     count.assign_add(1)
      ...     return carry + x, None
      >>> total, _ = phalanx.scan(body, 0.0, jnp.arange(4.0))
      >>> float(total), float(count.value)
      (6.0, 4.0)
    """
    arguments.function("f", f, "phalanx.scan(lambda carry, x: (carry + x, None), 0.0, xs)")
    arguments.flag("reverse", reverse)
    if not isinstance(unroll, bool):
        arguments.integer("unroll", unroll, least=0, hint="unroll=1")
    init, xs = primitives.checked_arrays((init, xs))
    # `lax.scan` checks the lengths too, but `discover_writes` traces the body before that, and its error would hide this one.
    length = _num_steps(xs, length)
    outer = BodyScope.around()
    outer.discover_writes(f, init, jax.tree.map(_one_step, xs))

    @functools.wraps(f)
    def body(carry: PyTree, x: jax.Array) -> tuple[Any, Any]:
        state, values = carry
        (new_state, y), new_values = outer.call(f, values, state, x)
        return (new_state, new_values), y

    with _of_bodies("phalanx.scan(f, init, xs)", "a pair of a carry like init, and y"):
        (carry, values), ys = lax.scan(
            body, (init, outer.current_values()), xs, length=length, reverse=reverse, unroll=unroll
        )
    outer.commit(values)
    return carry, ys


@contextmanager
def _of_bodies(call: str, hint: str) -> Iterator[None]:
    """Raises an InvalidArgumentError if JAX refuses what bodies return. What they raise themselves was raised when their writes were found.

    Args:
      call: the call, for the message.
      hint: what the bodies should return.
    """
    try:
        yield
    except (PhalanxError, jax.errors.JAXTypeError):  # The program explains JAX's errors about tracers.
        raise
    except TypeError as e:
        raise InvalidArgumentError(
            call, f"the functions return values that do not fit: {e}", f"functions that return {hint}"
        ) from e


def _num_steps(xs: PyTree, length: Any) -> int:
    """Returns the number of steps of a scan.

    Raises:
      InvalidArgumentError: `xs` and `length` do not determine it, or disagree.
    """
    shapes = {np.shape(x) for x in jax.tree.leaves(xs)}
    if () in shapes:
        raise InvalidArgumentError(f"xs={shown(xs)}", "a scalar has no dim of steps.", "xs=None, length=10")
    lengths = {shape[0] for shape in shapes}
    if length is not None:
        lengths.add(arguments.integer("length", length, least=0, most=2**31 - 1, hint="length=10"))
    if len(lengths) != 1:
        reason = (
            f"they give different numbers of steps: {sorted(lengths)}."
            if lengths
            else "the number of steps is unknown."
        )
        raise InvalidArgumentError(f"xs={shown(xs)} and length={length}", reason, "length=10, or xs=jnp.arange(10)")
    return int(lengths.pop())


def _one_step(xs: PyTree) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of one x of a scan."""
    return shape_dtype(xs.shape[1:], xs.dtype)


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: PyTree) -> PyTree:
    """Runs `jax.lax.cond` with branches that may assign variables. May be called in any context.

    Args:
      pred: real scalar. In a replica function it may differ between replicas, unless a branch runs a collective.
      true_fun: function that is called if `pred` is true.
      false_fun: function that is called if `pred` is false.
      *operands: pytrees of arrays. Arguments of both functions.

    Returns:
      The result of the function that was called.

    Raises:
      InvalidArgumentError: a branch is not callable, the branches return different structures, or `pred` is not a real scalar.
      ReduceOpError: an operand is not an array of numbers.

    Source: jax.lax.cond.

    Example:
      >>> import keras, phalanx
      >>> v = keras.Variable(1.0, trainable=False)
      >>> float(phalanx.cond(True, lambda: v.assign_add(1.0), lambda: v.value))
      2.0
    """
    for name, branch in (("true_fun", true_fun), ("false_fun", false_fun)):
        arguments.function(name, branch, "phalanx.cond(pred, lambda x: x, lambda x: -x, x)")
    operands = primitives.checked_arrays(operands)
    condition = primitives.as_array(pred)
    if condition.shape or jnp.issubdtype(condition.dtype, jnp.complexfloating):
        raise InvalidArgumentError(
            f"pred={shown(pred)}",
            f"must be a real scalar, not an array of shape {condition.shape} and dtype {condition.dtype}.",
            "pred=(x > 0).all()",
        )
    outer = BodyScope.around()
    # Both branches must return the same variables, whichever of them writes them.
    outer.discover_writes(true_fun, *operands)
    outer.discover_writes(false_fun, *operands)
    branches = [outer.lift(true_fun), outer.lift(false_fun)]
    with _of_bodies(
        "phalanx.cond(pred, true_fun, false_fun)",
        "arrays of the same shapes and dtypes, as lambda: x and lambda: jnp.zeros_like(x)",
    ):
        result, values = lax.cond(condition, *branches, outer.current_values(), *operands)
    outer.commit(values)
    return result


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: PyTree) -> PyTree:
    """Runs `jax.lax.while_loop` with a body that may assign variables. May be called in any context.

    Args:
      cond_fun: function from the state to a bool scalar. True continues the loop. It may read variables, not assign them.
      body_fun: function from the state to the next state.
      init_val: pytree of arrays. The first state.

    Returns:
      The last state.

    Raises:
      InvalidArgumentError: one of the functions is not callable, or does not return a bool, or a state like `init_val`.
      ReduceOpError: a leaf of `init_val` is not an array of numbers.

    Source: jax.lax.while_loop.

    Example:
      >>> import keras, phalanx
      >>> v = keras.Variable(0.0, trainable=False)
      >>> int(phalanx.while_loop(lambda n: n < 3, lambda n: (v.assign_add(2.0), n + 1)[1], 0))
      3
      >>> float(v.value)
      6.0
    """
    for name, fn in (("cond_fun", cond_fun), ("body_fun", body_fun)):
        arguments.function(name, fn, "phalanx.while_loop(lambda n: n < 3, lambda n: n + 1, 0)")
    init_val = primitives.checked_arrays(init_val)
    outer = BodyScope.around()
    outer.discover_writes(body_fun, init_val)
    hint = "a bool of cond_fun, as (x > 0).any(), and a state of body_fun like init_val"
    with _of_bodies("phalanx.while_loop(cond_fun, body_fun, init_val)", hint):
        state, values = lax.while_loop(
            lambda s: outer.call(cond_fun, s[1], s[0])[0],
            lambda s: outer.call(body_fun, s[1], s[0]),
            (init_val, outer.current_values()),
        )
    outer.commit(values)
    return state


def remat(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns `fn` under `jax.checkpoint`, which saves memory: the gradient recomputes the intermediate values of `fn`.

    May be called in any context.

    Args:
      fn: function that may assign variables.
      **options: options of `jax.checkpoint`.

    Returns:
      A function with the parameters of `fn`.

    Raises:
      InvalidArgumentError: `fn` is not callable.
      ReduceOpError: the returned function is called with an argument that is not an array of numbers.

    Source: jax.checkpoint.

    Example:
      >>> import jax, keras, phalanx
      >>> v = keras.Variable(3.0)
      >>> value, grads = phalanx.value_and_grad(phalanx.remat(lambda x: x * v * v), [v])(2.0)
      >>> float(grads[0])
      12.0
    """
    arguments.function("fn", fn, "phalanx.remat(lambda x: layer(x))")

    def wrapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        outer = BodyScope.around()
        # Static arguments may be any Python objects.
        if "static_argnums" not in options:
            args, kwargs = primitives.checked_arrays((args, kwargs))

        # Unlike a loop, `jax.checkpoint` needs no state of equal structure before and after, so one trace is enough.
        def pure(*args: PyTree, **kwargs: PyTree) -> tuple[Any, list[Any], list[Record] | None]:
            with outer.body(is_once=True) as scope:
                result = _read_variables(fn(*args, **kwargs))
            return result, outer.written_values(scope), scope.records

        result, values, records = jax.checkpoint(pure, **options)(*args, **kwargs)
        outer.commit(values, records or ())
        return result

    return wrapped
