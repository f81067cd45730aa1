# SPDX-License-Identifier: Apache-2.0
"""Gradients: `GradientTape`, as in TensorFlow, and `value_and_grad`, as in JAX."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import keras

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.errors import InvalidArgumentError, TapeError, arguments, shown
from phalanx.errors.frames import user_place
from phalanx.mesh.values import flatten
from phalanx.tracing import markers
from phalanx.tracing.control_flow import BodyScope
from phalanx.tracing.discovery import Entry, NeedsProgram
from phalanx.tracing.policy import check_variable, describe
from phalanx.tracing.scope import LiftScope, innermost
from phalanx.typing import PyTree

_tape_numbers = itertools.count()


@final
class GradientTape:
    """Records what a step computes, for `gradient`. Inside `Strategy.run` or `phalanx.function`.

    The tape leaves marks in the one trace of the step, and the recorded stretch is differentiated there: the program is the
    one that a hand-written `jax.grad` compiles to. Trainable variables are watched by themselves.

    Args:
      persistent: whether `gradient` may be called more than once.
      watch_accessed_variables: whether trainable variables are watched without `watch`.

    Raises:
      TapeError: used outside a traced step, or inside the body of a `jax.lax` loop or branch.

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
                "entering a GradientTape again",
                "a tape records one stretch of a step.",
                "with phalanx.GradientTape() as tape:",
            )
        scope = innermost()
        if scope is None:
            if compat.is_undoable():
                raise NeedsProgram
            raise TapeError(
                "a GradientTape outside a traced step",
                "gradients are taken from the program of a whole step.",
                "call it inside strategy.run(step), or write @phalanx.function above the step",
            )
        if not scope.is_innermost_trace or isinstance(scope, BodyScope):
            raise TapeError(
                f"a GradientTape at {user_place()}",
                "it is inside the body of a loop or branch, or another transformation of jax.",
                "phalanx.value_and_grad(fn, variables) inside such a body, or the tape around it",
            )
        self._scope, self._recording = scope, True
        self._number = next(_tape_numbers)
        scope.values_change()
        self._take(list(scope.entries.values()))
        scope.tapes.append(self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._recording = False
        if self._scope is None:
            return
        self._scope.tapes.remove(self._take)
        if kind is None and self._scope.pass_.marks_tapes:
            markers.leave_p.bind(tape=self._number)

    def _take(self, entries: Sequence[Entry]) -> None:
        """Watches variables, from here on."""
        assert self._scope is not None
        entries = [e for e in entries if jnp.issubdtype(e.value.dtype, jnp.floating)]
        values = self._scope.pass_.entered(self._number, [e.value for e in entries])
        for entry, value in zip(entries, values, strict=True):
            entry.value = value
            self._entered[id(entry.variable)] = (entry.variable, value)

    def watch(self, tensor: Any) -> None:
        """Lets `gradient` be asked for with respect to `tensor`. Inside the tape.

        Args:
          tensor: an array, a variable, or a pytree of them, of floating dtypes.

        Raises:
          TapeError: the tape does not record, or `tensor` is not floating.
        """
        if not self._recording:
            raise TapeError("GradientTape.watch", "the tape is not recording.", "call it inside the with block")
        for leaf in jax.tree.leaves(tensor):
            if isinstance(leaf, keras.Variable):
                self._watched.append(leaf)
                continue
            if not isinstance(leaf, jax.core.Tracer) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TapeError(
                    f"GradientTape.watch({shown(leaf)})",
                    "it is not a floating array of the traced step.",
                    "pass it to the step as an argument, or compute it there",
                )
            if self._scope is not None and self._scope.pass_.marks_tapes:
                markers.watch_p.bind(leaf, tape=self._number)
            self._watched.append(leaf)

    def watched_variables(self) -> tuple[keras.Variable, ...]:
        """Returns the variables whose gradients can be asked for. In the step in which the tape was entered.

        Raises:
          TapeError: the tape was not entered.
        """
        if self._scope is None:
            raise TapeError(
                "GradientTape.watched_variables", "the tape was not entered.", "call it inside the with block"
            )
        return tuple(e.variable for e in self._scope.entries.values() if self._is_source(e.variable))

    def gradient(
        self, target: PyTree, sources: PyTree, output_gradients: PyTree = None, unconnected_gradients: str = "none"
    ) -> PyTree:
        """Returns the gradient of the sum of `target` with respect to `sources`. In the function in which the tape was entered.

        Args:
          target: a pytree of floating arrays that were computed inside the tape; those that are no scalars are summed.
          sources: a pytree of variables and watched arrays.
          output_gradients: a pytree like `target` with what to multiply it with; ones if None.
          unconnected_gradients: `"none"` or `"zero"`: what to return for a source that no target depends on.

        Returns:
          A pytree like `sources`, with shapes and dtypes of the sources, or None for unconnected ones.

        Raises:
          InvalidArgumentError: `unconnected_gradients` is neither of the two, or a source is neither a variable nor an array.
          ReduceOpError: a target is not an array of numbers.
          TapeError: called twice on a tape that is not persistent, or outside the step of the tape.

        Source: tf.GradientTape.gradient.
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
        traced = [self._source(leaf) for leaf in leaves]
        usable = [x for x in traced if x is not None]
        if any(not jnp.issubdtype(t.dtype, jnp.floating) for t in targets):
            usable, traced = [], [None] * len(leaves)
        found = iter(self._differentiate(targets, cotangents, usable) if usable else [])
        grads = [None if x is None else next(found) for x in traced]
        if unconnected_gradients == "zero":
            grads = [jnp.zeros(jnp.shape(x), x.dtype) if g is None else g for g, x in zip(grads, leaves, strict=True)]
        return tree.unflatten(grads)

    def _differentiate(self, targets: list[Any], cotangents: list[Any], sources: list[Any]) -> list[Any]:
        assert self._scope is not None
        connected = self._scope.pass_.next_gradient(len(sources))
        wanted = [s for s, on in zip(sources, connected, strict=True) if on]
        values = self._scope.pass_.next_values()
        if values is None:
            values = markers.gradient(self._number, targets, cotangents, wanted) if wanted else []
        given = iter(values)
        return [next(given) if on else None for on in connected]

    def _source(self, source: Any) -> Any:
        """Returns the traced value that stands for `source` in the recorded stretch, or None if it is not watched."""
        assert self._scope is not None
        if not isinstance(source, keras.Variable):
            return source if any(source is w for w in self._watched) else None
        if not self._is_source(source) or not jnp.issubdtype(source.dtype, jnp.floating):
            return None
        entered = self._entered.get(id(source))
        return None if entered is None else entered[1]

    def _is_source(self, variable: keras.Variable) -> bool:
        return any(variable is w for w in self._watched) or (self._watch_accessed and variable.trainable)

    def _check_usable(self, unconnected_gradients: str) -> None:
        if not isinstance(unconnected_gradients, str) or unconnected_gradients not in ("none", "zero"):
            raise InvalidArgumentError(
                f"unconnected_gradients={shown(unconnected_gradients)}",
                'must be "none" or "zero".',
                'unconnected_gradients="zero"',
            )
        if self._scope is None or innermost() is not self._scope or not self._scope.is_innermost_trace:
            raise TapeError(
                "GradientTape.gradient",
                "called outside the function in which the tape was entered.",
                "take the gradient in the same step, outside jax.lax bodies",
            )
        if self._used and not self._persistent:
            raise TapeError(
                "GradientTape.gradient, a second time",
                "this tape may be asked once.",
                "phalanx.GradientTape(persistent=True)",
            )
        self._used = True


def _cotangents(output_gradients: PyTree, targets: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns what each target is multiplied with; nothing for ones.

    Raises:
      InvalidArgumentError: they are not as many as the targets, or have other shapes.
    """
    given = list(map(primitives.as_array, jax.tree.leaves(output_gradients)))
    shapes = [x.shape for x in targets]
    hint = f"output_gradients of the shapes {shapes}"
    if given and len(given) != len(targets):
        raise InvalidArgumentError(f"{len(given)} output_gradients", f"there are {len(targets)} targets.", hint)
    try:
        return [jnp.broadcast_to(c, t.shape).astype(t.dtype) for c, t in zip(given, targets, strict=False)]
    except ValueError as e:
        raise InvalidArgumentError(
            f"output_gradients of the shapes {[x.shape for x in given]}", f"the targets have {shapes}.", hint
        ) from e


def _loss_of(result: PyTree, *, has_aux: bool) -> jax.Array:
    """Returns the loss that a function returned.

    Raises:
      InvalidArgumentError: it returned something else.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise InvalidArgumentError(
            f"value_and_grad(has_aux=True) of a function that returns {shown(result)}",
            "it must return (loss, aux).",
            "return loss, predictions",
        )
    loss = primitives.as_array(result[0] if has_aux else result)
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise InvalidArgumentError(
            f"value_and_grad of a function that returns an array {loss.dtype}{list(loss.shape)}",
            "it must return a floating scalar.",
            "return loss.mean(); or has_aux=True, to return (loss, aux)",
        )
    return loss


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[keras.Variable], has_aux: bool = False
) -> Callable[..., tuple[Any, list[Any]]]:
    """Returns a function that computes `fn` and its gradient with respect to variables. May be called in any context.

    Assignments that `fn` makes to variables are kept. Works inside `jax.lax` bodies of `phalanx.scan` and the like, where a
    tape cannot record, and outside programs too.

    Args:
      fn: returns a scalar, or `(scalar, aux)`.
      variables: the variables to differentiate with respect to.
      has_aux: whether `fn` returns `(scalar, aux)`.

    Returns:
      A function of the arguments of `fn` that returns `(value, grads)`: what `fn` returns, and one array a variable.

    Raises:
      TapeError: a variable is not floating.
      InvalidArgumentError: an argument is of the wrong kind.

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
                f"the gradient with respect to {describe(v)}", "only floating variables have gradients.", "leave it out"
            )

    def wrapped(*args: PyTree, **kwargs: PyTree) -> tuple[Any, list[Any]]:
        outer = BodyScope.around()

        def pure(values: list[Any]) -> tuple[Any, tuple[Any, list[Any]]]:
            with outer.body(dict(zip(map(id, variables), values, strict=True))) as scope:
                result = fn(*args, **kwargs)
            return _loss_of(result, has_aux=has_aux), (result, outer.written_values(scope))

        (_, (result, new)), grads = jax.value_and_grad(pure, has_aux=True)([outer.value(v) for v in variables])
        outer.commit(new)
        return result, grads

    return wrapped
