# SPDX-License-Identifier: Apache-2.0
"""Gradients: `GradientTape`, as in TensorFlow, and `value_and_grad`, as in JAX."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import keras

from phalanx._src import compat
from phalanx._src.collectives import primitives
from phalanx._src.mesh.values import flatten
from phalanx._src.tracing import markers
from phalanx._src.tracing.control_flow import BodyScope
from phalanx._src.tracing.discovery import NeedsProgram
from phalanx._src.tracing.entry import Entry
from phalanx._src.tracing.policy import check_variable, describe
from phalanx._src.tracing.records import Record
from phalanx._src.tracing.scope import LiftScope, innermost
from phalanx.errors import InvalidArgumentError, TapeError, arguments, shown
from phalanx.errors.frames import user_place
from phalanx.typing import PyTree

_tape_numbers = itertools.count()


@final
class GradientTape:
    """Records the computation inside the `with` block, so that `gradient` can differentiate it.

    Use it inside `Strategy.run` or `phalanx.function`. The tape adds markers to the trace of the step, and the recorded part of
    the trace is differentiated. The compiled program is the same as with a hand-written `jax.grad`.

    Args:
      persistent: whether `gradient` may be called more than once.
      watch_accessed_variables: whether trainable variables are watched without a call of `watch`.

    Raises:
      TapeError: the tape is entered outside a traced step, inside the body of a `jax.lax` loop or branch, or twice.
      InvalidArgumentError: an argument is not a bool.

    Example:
      >>> import keras, phalanx
      >>> v = keras.Variable(3.0)
      >>> @phalanx.function
      ... def step():
      ...     with phalanx.GradientTape() as tape:
      ...         y = v * v
      ...     return tape.gradient(y, v)
      >>> float(step())
      6.0
    """

    @arguments.typed()
    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent, self._watch_accessed = persistent, watch_accessed_variables
        self._number = -1
        self._scope: LiftScope | None = None
        self._recording = self._used = False
        self._entered: dict[int, tuple[keras.Variable, Any]] = {}
        self._watched: list[Any] = []

    def __enter__(self) -> Self:
        if self._scope is not None:
            raise TapeError(
                "a GradientTape was entered a second time",
                "a tape records only one block of a step.",
                "with phalanx.GradientTape() as tape:",
            )
        scope = innermost()
        if scope is None:
            # The default strategy runs steps eagerly, and can undo their writes. It then runs the step as a program.
            if compat.is_undoable():
                raise NeedsProgram
            raise TapeError(
                "a GradientTape was entered outside a traced step",
                "it differentiates the program of a step, and eager code has no program.",
                "enter it inside strategy.run(step), or write @phalanx.function above the step",
            )
        if scope.inner_traces.is_inside or isinstance(scope, BodyScope):
            raise TapeError(
                f"a GradientTape was entered at {user_place()}",
                "this line is inside the body of a loop or branch, or inside another JAX transformation, where a tape cannot "
                "record.",
                "phalanx.value_and_grad(fn, variables) inside the body, or a tape around the loop or branch",
            )
        self._scope, self._recording = scope, True
        self._number = next(_tape_numbers)
        # Entering gives each variable a new traced value, so inner traces that JAX has cached with the old ones are stale.
        scope.inner_traces.values_change()
        self._watch_variables(list(scope.entries.values()))
        scope.tapes.append(self._watch_variables)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._recording = False
        if self._scope is None:
            return
        self._scope.tapes.remove(self._watch_variables)
        if kind is None and self._scope.pass_.marks_tapes:
            markers.leave_p.bind(tape=self._number)

    def _watch_variables(self, entries: Sequence[Entry]) -> None:
        """Watches the floating variables among `entries` from here on."""
        assert self._scope is not None
        # Integers and bools have no gradients, and a slot is no source.
        entries = [e for e in entries if e.dim is None and jnp.issubdtype(e.value.dtype, jnp.floating)]
        values = self._scope.pass_.enter_tape(self._number, [e.value for e in entries])
        for entry, value in zip(entries, values, strict=True):
            entry.value = value
            # The pair keeps the variable alive, so that its id stays its own.
            self._entered[id(entry.variable)] = (entry.variable, value)

    def watch(self, tensor: Any) -> None:
        """Watches `tensor`, so that `gradient` can differentiate with respect to it.

        Call it inside `with phalanx.GradientTape() as tape:`.

        Args:
          tensor: array, variable, or pytree of them. The dtypes must be floating.

        Raises:
          TapeError: the tape is not recording, or a leaf is not a floating array of the traced step.

        Example:
          >>> import jax.numpy as jnp, phalanx
          >>> @phalanx.function
          ... def step(x):
          ...     with phalanx.GradientTape() as tape:
          ...         tape.watch(x)
          ...         y = x * x
          ...     return tape.gradient(y, x)
          >>> float(step(jnp.float32(3.0)))
          6.0
        """
        if not self._recording:
            raise TapeError(
                "GradientTape.watch was called outside the with block",
                "the tape is not recording.",
                "call it inside the with block",
            )
        for leaf in jax.tree.leaves(tensor):
            if isinstance(leaf, keras.Variable):
                self._watched.append(leaf)
                continue
            if not isinstance(leaf, jax.core.Tracer) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TapeError(
                    f"GradientTape.watch was called with {shown(leaf)}",
                    "the value is not a floating array of the traced step.",
                    "pass it to the step as an argument, or compute it in the step",
                )
            if self._scope is not None and self._scope.pass_.marks_tapes:
                markers.watch_p.bind(leaf, tape=self._number)
            self._watched.append(leaf)

    def watched_variables(self) -> tuple[keras.Variable, ...]:
        """Returns the variables that the tape watches. Call it in the step in which the tape was entered.

        Raises:
          TapeError: the tape was not entered.
        """
        if self._scope is None:
            raise TapeError(
                "GradientTape.watched_variables was called before the with block",
                "the tape was not entered.",
                "call it inside the with block",
            )
        return tuple(e.variable for e in self._scope.entries.values() if self._is_source(e.variable))

    def gradient(
        self, target: PyTree, sources: PyTree, output_gradients: PyTree = None, unconnected_gradients: str = "none"
    ) -> PyTree:
        """Returns the gradient of the sum of `target` with respect to `sources`.

        Call it in the step in which the tape was entered, after the `with` block or inside it.

        Args:
          target: pytree of floating arrays that were computed inside the `with` block. Arrays that are not scalars are summed.
          sources: pytree of variables and watched arrays.
          output_gradients: pytree like `target`. Each target is multiplied with its leaf. None means ones.
          unconnected_gradients: `"none"` or `"zero"`. The result for a source on which no target depends.

        Returns:
          A pytree like `sources`. Each gradient has the shape and the dtype of its source. None for unconnected sources.

        Raises:
          InvalidArgumentError: `unconnected_gradients` is neither `"none"` nor `"zero"`, a source is neither a variable nor an
            array, or `output_gradients` does not match `target`.
          ReduceOpError: a target is not an array of numbers.
          TapeError: the tape is not persistent and was used before, or the call is outside the step of the tape.

        Source: tf.GradientTape.gradient.

        Example:
          >>> import keras, phalanx
          >>> v, unused = keras.Variable(3.0), keras.Variable(1.0)
          >>> @phalanx.function
          ... def step():
          ...     with phalanx.GradientTape() as tape:
          ...         y = v * v
          ...     return tape.gradient(y, [v, unused])
          >>> step()
          [Array(6., dtype=float32), None]
        """
        self._check_usable(unconnected_gradients)
        targets = list(map(primitives.as_array, jax.tree.leaves(target)))
        cotangents = _cotangents(output_gradients, targets)
        leaves, tree = flatten(sources)
        for leaf in leaves:
            if not isinstance(leaf, (keras.Variable, jax.Array)):
                raise InvalidArgumentError(
                    f"sources={shown(leaf)}", "must be a variable or a watched array.", "tape.gradient(loss, variables)"
                )
        traced = [self._traced_source(leaf) for leaf in leaves]
        # As in TensorFlow, an integer target has no gradient, and that is not an error.
        if any(not jnp.issubdtype(t.dtype, jnp.floating) for t in targets):
            traced = [None] * len(leaves)
        watched = [x for x in traced if x is not None]
        watched_grads = iter(self._differentiate(targets, cotangents, watched) if watched else [])
        grads = [None if x is None else next(watched_grads) for x in traced]
        if unconnected_gradients == "zero":
            grads = [jnp.zeros(jnp.shape(x), x.dtype) if g is None else g for g, x in zip(grads, leaves, strict=True)]
        return tree.unflatten(grads)

    def _differentiate(self, targets: list[Any], cotangents: list[Any], sources: list[Any]) -> list[Any]:
        """Returns one gradient per source, or None for a source on which no target depends."""
        assert self._scope is not None
        # In the first trace all sources count as connected. If that is wrong, the function is traced again with the right answer.
        connected = self._scope.pass_.next_connected(len(sources))
        connected_sources = [s for s, is_connected in zip(sources, connected, strict=True) if is_connected]
        grads = self._scope.pass_.next_gradients()
        if grads is None:
            grads = []
            if connected_sources:
                grads = markers.gradient(self._number, targets, cotangents, connected_sources)
        remaining = iter(grads)
        return [next(remaining) if is_connected else None for is_connected in connected]

    def _traced_source(self, source: Any) -> Any:
        """Returns the value of `source` when it was first watched, as an array of the trace. None if it is not watched."""
        assert self._scope is not None
        if not isinstance(source, keras.Variable):
            return source if any(source is w for w in self._watched) else None
        if not self._is_source(source) or not jnp.issubdtype(source.dtype, jnp.floating):
            return None
        entered = self._entered.get(id(source))
        return None if entered is None else entered[1]

    def _is_source(self, variable: keras.Variable) -> bool:
        """Returns whether the tape watches `variable`."""
        return any(variable is w for w in self._watched) or (self._watch_accessed and variable.trainable)

    def _check_usable(self, unconnected_gradients: str) -> None:
        if not isinstance(unconnected_gradients, str) or unconnected_gradients not in ("none", "zero"):
            raise InvalidArgumentError(
                f"unconnected_gradients={shown(unconnected_gradients)}",
                'must be "none" or "zero".',
                'unconnected_gradients="zero"',
            )
        if self._scope is None or innermost() is not self._scope or self._scope.inner_traces.is_inside:
            raise TapeError(
                "GradientTape.gradient was called outside the function in which the tape was entered",
                "the tape's record exists only while that function is traced.",
                "call it in the same step, outside jax.lax bodies",
            )
        if self._used and not self._persistent:
            raise TapeError(
                "GradientTape.gradient was called a second time",
                "a tape that is not persistent can be differentiated only once.",
                "phalanx.GradientTape(persistent=True)",
            )
        self._used = True


def _cotangents(output_gradients: PyTree, targets: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the factor of each target, or an empty list if all factors are ones.

    Raises:
      InvalidArgumentError: the number of `output_gradients` is wrong, or one does not broadcast to the shape of its target.
    """
    cotangents = list(map(primitives.as_array, jax.tree.leaves(output_gradients)))
    shapes = [x.shape for x in targets]
    hint = f"output_gradients of the shapes {shapes}"
    if cotangents and len(cotangents) != len(targets):
        raise InvalidArgumentError(
            f"{len(cotangents)} output_gradients", f"the number of targets is {len(targets)}.", hint
        )
    try:
        return [jnp.broadcast_to(c, t.shape).astype(t.dtype) for c, t in zip(cotangents, targets, strict=False)]
    except ValueError as e:
        raise InvalidArgumentError(
            f"output_gradients of the shapes {[x.shape for x in cotangents]}",
            f"the targets have the shapes {shapes}.",
            hint,
        ) from e


def _loss_of(result: PyTree, *, has_aux: bool) -> jax.Array:
    """Returns the loss in the result of a function that `value_and_grad` called.

    Raises:
      InvalidArgumentError: the result has no floating scalar as its loss, or is not a pair although `has_aux` is True.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise InvalidArgumentError(
            f"value_and_grad(has_aux=True) of a function that returns {shown(result)}",
            "the function must return a tuple (loss, aux).",
            "return loss, predictions",
        )
    loss = primitives.as_array(result[0] if has_aux else result)
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise InvalidArgumentError(
            f"value_and_grad of a function that returns an array {loss.dtype}{list(loss.shape)}",
            "the function must return a floating scalar.",
            "return loss.mean(); or has_aux=True, to return (loss, aux)",
        )
    return loss


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[keras.Variable], has_aux: bool = False
) -> Callable[..., tuple[Any, list[Any]]]:
    """Returns a function that computes `fn` and its gradient with respect to variables. May be called in any context.

    `fn` may assign variables. The function works in eager code too, and in the bodies of `phalanx.scan`, `phalanx.cond` and
    `phalanx.while_loop`, where a tape cannot record.

    Args:
      fn: function that returns a floating scalar, or a tuple `(scalar, aux)`.
      variables: list of floating variables to differentiate with respect to.
      has_aux: whether `fn` returns `(scalar, aux)`.

    Returns:
      A function with the parameters of `fn`. It returns `(value, grads)`: the result of `fn`, and one array per variable.

    Raises:
      TapeError: a variable is not floating.
      InvalidArgumentError: an argument has the wrong type, or `fn` returns something else than described.

    Example:
      >>> import keras, phalanx
      >>> v = keras.Variable(3.0)
      >>> value, grads = phalanx.value_and_grad(lambda x: x * v * v, [v])(2.0)
      >>> float(value), float(grads[0])
      (18.0, 12.0)
    """
    arguments.function("fn", fn, "phalanx.value_and_grad(lambda x: loss(x), model.trainable_variables)")
    arguments.flag("has_aux", has_aux)
    if not isinstance(variables, (list, tuple)):
        raise InvalidArgumentError(f"variables={shown(variables)}", "must be a list of variables.", "[variable]")
    variables = list(variables)
    for v in variables:
        check_variable("a variable of value_and_grad", v, "model.trainable_variables")
        if not jnp.issubdtype(v.dtype, jnp.floating):
            raise TapeError(
                f"the gradient with respect to {describe(v)}",
                "only floating variables have gradients.",
                "leave the variable out",
            )

    def wrapped(*args: PyTree, **kwargs: PyTree) -> tuple[Any, list[Any]]:
        outer = BodyScope.around()

        def pure(values: list[Any]) -> tuple[Any, tuple[Any, list[Any], list[Record] | None]]:
            with outer.body(dict(zip(map(id, variables), values, strict=True)), is_once=True) as scope:
                result = fn(*args, **kwargs)
            return _loss_of(result, has_aux=has_aux), (result, outer.written_values(scope), scope.records)

        (_, (result, new_values, records)), grads = jax.value_and_grad(pure, has_aux=True)(
            [outer.value(v) for v in variables]
        )
        outer.commit(new_values, records or ())
        return result, grads

    return wrapped
