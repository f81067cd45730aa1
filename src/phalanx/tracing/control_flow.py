# SPDX-License-Identifier: Apache-2.0
"""`jax.lax` control flow whose bodies may assign variables: Dropout, BatchNormalization and metrics do.

Each lifts what its bodies write: the variables' values travel beside the loop's own state. They work inside replica
functions and `phalanx.function`, and outside programs.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from typing_extensions import override

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.compat import Variable
from phalanx.errors import InvalidArgumentError, NestedWriteError, TraceError, arguments, shown
from phalanx.tracing import context
from phalanx.tracing.discovery import AbstractPass, Discovery, Entry
from phalanx.tracing.draws import AbstractIterator, refuse_draw
from phalanx.tracing.policy import describe
from phalanx.tracing.scope import LiftScope
from phalanx.tracing.strategy import Update
from phalanx.typing import PyTree


class _Body(AbstractPass):
    """The pass over a body: variables start from given values, or from what they are around the body."""

    def __init__(self, outer: "_Surroundings", values: dict[int, Any]) -> None:
        self.found = Discovery()
        self._outer, self._values = outer, values

    @override
    def initial(self, variable: Variable) -> jax.Array:
        known = self._values.get(id(variable))
        return self._outer.value(variable) if known is None else known

    @override
    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        return None

    @override
    def looked_up(self, table: Variable, ids: jax.Array) -> jax.Array:
        return self._outer.looked_up(table, ids)

    @override
    def entered(self, tape: int, values: Sequence[Any]) -> Sequence[Any]:
        raise AssertionError("tapes refuse to be entered in a body")

    @override
    def next_gradient(self, num_sources: int) -> tuple[bool, ...]:
        raise AssertionError("tapes refuse to be entered in a body")

    @override
    def next_values(self) -> list[Any] | None:
        return None

    @override
    def next_run(self, trace: Callable[[], Discovery]) -> Discovery:
        raise TraceError(
            "Strategy.run inside a control-flow body of Phalanx",
            "the replicas' program cannot start in the middle of a loop or branch.",
            "strategy.run around the loop",
        )


class BodyScope(LiftScope):
    """The scope of one body."""

    @override
    def draw(self, iterator: AbstractIterator, *, is_optional: bool = False) -> tuple[Any] | None:
        raise refuse_draw()

    @override
    def leave(self, update: Update) -> None:
        raise NestedWriteError(
            f"{type(update.optimizer).__name__}.apply in a body of phalanx.scan, cond, while_loop or checkpoint",
            f"{context.get_strategy()!r} updates variables after the step.",
            "strategy.run for each step",
        )

    @staticmethod
    def around() -> "_Surroundings":
        """Returns what is around a body that starts here."""
        return _Surroundings(compat.active_scope())


class _Surroundings:
    """The function, or the eager code, in which a body stands."""

    def __init__(self, scope: keras.StatelessScope | None) -> None:
        self._scope = scope
        self._entries: list[Entry] = []
        if isinstance(scope, LiftScope):
            scope.note_read()  # By the body, once it runs.

    def value(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable` around the body."""
        value = None
        if isinstance(self._scope, LiftScope):
            value = self._scope.value(variable)
        elif self._scope is not None:
            value = self._scope.get_current_value(variable)
        value = compat.raw_value(variable) if value is None else value
        # Made in the body: it gets its first value when all scopes are closed.
        return jnp.zeros(variable.shape, compat.dtype_of(variable)) if value is None else value

    def looked_up(self, table: Variable, ids: jax.Array) -> jax.Array:
        """Notes that rows of `table` are looked up in the body."""
        if not isinstance(self._scope, LiftScope):
            raise TraceError(
                f"rows of {describe(table)} in a loop or branch outside of a step",
                "it lives on parameter servers.",
                "coordinator.schedule(step, args=(...))",
            )
        return self._scope.pass_.looked_up(table, ids)

    def body(self, values: dict[int, Any] | None = None) -> BodyScope:
        """Returns a scope for one trace of a body, in which variables start from `values` (by id)."""
        outer = self._scope if isinstance(self._scope, LiftScope) else None
        scope = BodyScope(_Body(self, values or {}), mapped=outer is not None and outer.mapped)
        if outer is not None:
            scope.pass_.found.seeds = outer.pass_.found.seeds
        if outer is not None and outer.is_updating:
            scope.allow_free_writes()
        return scope

    def written_values(self, scope: BodyScope) -> list[Any]:
        """Returns the new values of what was written in `scope`, and remembers which variables they are for."""
        self._entries = [e for e in scope.entries.values() if e.written]
        return [e.value for e in self._entries]

    def writes_of(self, fn: Callable[..., Any], *args: PyTree) -> None:
        """Remembers which variables `fn(*args)` writes, in addition to those that are known."""
        known = {id(e.variable): e for e in self._entries}

        def traced(*args: PyTree) -> None:
            with self.body() as scope:
                fn(*args)
            for entry in scope.entries.values():
                if entry.written:
                    known.setdefault(id(entry.variable), entry).diverged |= entry.diverged

        # An outer scope outside programs, so that variables made in the body get their first values outside the trace.
        with keras.StatelessScope() if self._scope is None else nullcontext():
            jax.eval_shape(traced, *args)
        self._entries = list(known.values())

    def current(self) -> list[Any]:
        """Returns the values, around the body, of the variables that it writes."""
        return [self.value(e.variable) for e in self._entries]

    def call(self, fn: Callable[..., Any], values: list[Any], *args: PyTree) -> tuple[Any, list[Any]]:
        """Calls `fn(*args)` as a body whose written variables start from `values`; returns their new values too."""
        variables = [e.variable for e in self._entries]
        with self.body({id(v): x for v, x in zip(variables, values, strict=True)}) as scope:
            result = fn(*args)
            return result, [scope.get_current_value(v) for v in variables]

    def lifted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` as a branch whose first argument is the values of the variables that are written."""

        @functools.wraps(fn)
        def branch(values: list[Any], *args: PyTree) -> tuple[Any, list[Any]]:
            return self.call(fn, values, *args)

        return branch

    def commit(self, values: list[Any]) -> None:
        """Assigns new values to the variables that the body writes."""
        for entry, value in zip(self._entries, values, strict=True):
            entry.value = value
            if isinstance(self._scope, LiftScope):
                self._scope.commit(entry)
            else:
                entry.variable.assign(value)


def scan(  # noqa: PLR0917  (jax.lax.scan's own order)
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` whose body may assign variables. May be called in any context.

    Args:
      f: maps `(carry, x)` to `(carry, y)`.
      init: the first carry, a pytree of arrays.
      xs: a pytree of arrays `(length, ...)`, or None.
      length: the number of steps, where `xs` does not tell.
      reverse: whether to go from the last x to the first.
      unroll: how many steps to lay out in one iteration of the loop.

    Returns:
      The last carry, and the ys stacked `(length, ...)`.

    Raises:
      InvalidArgumentError: an argument is of the wrong kind, or `xs` and `length` do not tell one number of steps.
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
    length = _num_steps(xs, length)
    outer = BodyScope.around()
    outer.writes_of(f, init, jax.tree.map(_one_step, xs))

    @functools.wraps(f)
    def body(carry: PyTree, x: jax.Array) -> tuple[Any, Any]:
        (new, y), values = outer.call(f, carry[1], carry[0], x)
        return (new, values), y

    (carry, values), ys = lax.scan(body, (init, outer.current()), xs, length=length, reverse=reverse, unroll=unroll)
    outer.commit(values)
    return carry, ys


def _num_steps(xs: PyTree, length: Any) -> int:
    """Returns how many steps a scan has.

    Raises:
      InvalidArgumentError: `xs` and `length` do not tell, or tell different numbers.
    """
    shapes = {np.shape(x) for x in jax.tree.leaves(xs)}
    if () in shapes:
        raise InvalidArgumentError(f"xs={shown(xs)}", "a scalar has no steps.", "length=n, for steps without an x")
    lengths = {shape[0] for shape in shapes}
    if length is not None:
        lengths.add(arguments.integer("length", length, least=0, most=2**31 - 1, hint="length=10"))
    if len(lengths) != 1:
        found = f"they tell {sorted(lengths)} steps." if lengths else "nothing tells how many steps there are."
        raise InvalidArgumentError(f"xs={shown(xs)} and length={length}", found, "length=10, or xs=jnp.arange(10)")
    return lengths.pop()


def _one_step(xs: PyTree) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: PyTree) -> PyTree:
    """`jax.lax.cond` whose branches may assign variables. May be called in any context.

    Args:
      pred: which branch to take. In a replica function it may differ between replicas, unless a branch communicates.
      true_fun: the branch for true.
      false_fun: the branch for false.
      *operands: the branches' arguments.

    Returns:
      What the branch returns.

    Raises:
      InvalidArgumentError: a branch is not callable, or `pred` is not a scalar.
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
            f"must be a real scalar, not of shape {condition.shape} and dtype {condition.dtype}.",
            "pred=(x > 0).all()",
        )
    outer = BodyScope.around()
    outer.writes_of(true_fun, *operands)
    outer.writes_of(false_fun, *operands)
    branches = [outer.lifted(true_fun), outer.lifted(false_fun)]
    result, values = lax.cond(condition, *branches, outer.current(), *operands)
    outer.commit(values)
    return result


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: PyTree) -> PyTree:
    """`jax.lax.while_loop` whose body may assign variables. May be called in any context.

    Args:
      cond_fun: maps the state to whether to go on; it may read variables.
      body_fun: maps the state to the next.
      init_val: the first state, a pytree of arrays.

    Returns:
      The last state.

    Raises:
      InvalidArgumentError: one of the functions is not callable.
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
    outer.writes_of(body_fun, init_val)
    state, values = lax.while_loop(
        lambda s: outer.call(cond_fun, s[1], s[0])[0],
        lambda s: outer.call(body_fun, s[1], s[0]),
        (init_val, outer.current()),
    )
    outer.commit(values)
    return state


def remat(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Rematerializes a function that may assign variables: its intermediate values are computed again for the gradient.

    May be called in any context.

    Args:
      fn: the function whose intermediate values are not to be kept.
      **options: those of `jax.checkpoint`.

    Returns:
      A function like `fn`.

    Raises:
      InvalidArgumentError: `fn` is not callable.
      ReduceOpError: the function that it returns is called with what is not an array of numbers.

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
        if "static_argnums" not in options:
            args, kwargs = primitives.checked_arrays((args, kwargs))

        def pure(*args: PyTree, **kwargs: PyTree) -> tuple[Any, list[Any]]:
            with outer.body() as scope:
                result = fn(*args, **kwargs)
            return result, outer.written_values(scope)

        result, values = jax.checkpoint(pure, **options)(*args, **kwargs)
        outer.commit(values)
        return result

    return wrapped
