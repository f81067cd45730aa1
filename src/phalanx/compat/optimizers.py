# SPDX-License-Identifier: Apache-2.0
"""Keras's optimizers: their variables, and how gradients reach them."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import keras
from keras import Variable

from phalanx.compat.hooks import extend
from phalanx.compat.layouts import layout_path
from phalanx.compat.scope import lift_scope, surrounding_scope
from phalanx.compat.tables import initializer_of, make_table
from phalanx.compat.variables import transaction
from phalanx.errors import InvalidArgumentError


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the object that decides the learning rate: a variable, a schedule or a function."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    return inner._learning_rate


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int | None:
    """Returns over how many steps gradients are accumulated; None where each step is applied.

    A loss-scaling optimizer has to see at each step whether the gradients of all replicas are finite.
    """
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return None if is_scaling else optimizer.gradient_accumulation_steps


def accumulators(optimizer: keras.optimizers.Optimizer, variables: Any) -> list[Variable]:
    """Returns the variables that hold the accumulated gradients of `variables`; each replica gets its own sum."""
    build_optimizer(optimizer, variables)
    trained = optimizer._trainable_variables if variables is None else variables
    found = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in trained]
    for variable in found:
        variable._synchronization, variable._aggregation = "on_demand", "sum"
    return found


def is_last_accumulated(optimizer: keras.optimizers.Optimizer) -> Any:
    """Whether what is accumulated is applied at this step."""
    return (optimizer._iterations.value + 1) % optimizer.gradient_accumulation_steps == 0


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Makes an optimizer's own variables, if it has not got them yet."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(list(variables))


@contextmanager
def restricted(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable]) -> Iterator[None]:
    """Lets an optimizer know of no other variables meanwhile, and of no other slots but those that are for all."""
    one = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    kept = set(map(id, variables))
    is_kept = [id(v) in kept for v in one._trainable_variables]
    parts = {
        "_trainable_variables": itertools.compress(one._trainable_variables, is_kept),
        "_variables": [s for s in one._variables if reference_of(s) is None or id(reference_of(s)) in kept],
    }
    if one.use_ema:
        parts["_model_variables_moving_average"] = itertools.compress(one._model_variables_moving_average, is_kept)
    own = vars(one).copy()
    # Past what Keras does where an attribute of an optimizer is set.
    vars(one).update({name: list(part) for name, part in parts.items()})
    try:
        yield
    finally:
        vars(one).update({name: own[name] for name in parts})


def clipped(optimizer: keras.optimizers.Optimizer, grads: Sequence[Any]) -> Sequence[Any]:
    """Returns gradients as an optimizer clips them; those it leaves as they are where it is applied to them."""
    scale = optimizer.loss_scale_factor or 1.0
    clip: Sequence[Any] = optimizer._clip_gradients([g / scale for g in grads])
    return [g * scale for g in clip]


def reference_of(slot: Variable) -> Variable | None:
    """Returns the variable for which an optimizer made `slot`; None where it is for all."""
    reference = vars(slot).get("_phalanx_reference")
    return None if reference is None else reference()


def trained_by(optimizer: keras.optimizers.Optimizer, variables: Any) -> tuple[Variable, ...]:
    """Returns what `optimizer.apply(grads, variables)` updates: where None are given, those that it was built with."""
    return tuple(optimizer._trainable_variables if variables is None else variables)


def apply_stateless(optimizer: keras.optimizers.LossScaleOptimizer, grads: Sequence[Any], variables: Any) -> None:
    """Applies a loss-scaling optimizer, whose `apply` assigns inside a branch, through its stateless form."""
    build_optimizer(optimizer, variables)
    trained = trained_by(optimizer, variables)
    own = optimizer.variables
    new_trained, new_own = optimizer.stateless_apply([v.value for v in own], list(grads), [v.value for v in trained])
    for variable, value in zip([*trained, *own], [*new_trained, *new_own], strict=True):
        variable.assign(value)


def _apply(original: Callable[..., None], self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    scope = lift_scope()
    if scope is None:
        with transaction():
            return original(self, grads, trainable_variables)
    grads = list(grads)
    if grads and all(g is None for g in grads):
        raise InvalidArgumentError(
            f"{type(self).__name__} with no gradients for any variable",
            f"all {len(grads)} are None: the loss does not depend on the variables, or was computed after the tape.",
            "with phalanx.GradientTape() as tape: around the model's call and the loss",
        )
    return scope.apply_gradients(self, functools.partial(original, self), grads, trainable_variables)


def _apply_gradients(
    original: Callable[..., Any], self: Any, grads_and_vars: Any, skip_gradients_aggregation: bool = False
) -> Any:
    scope = lift_scope()
    if scope is None:
        return original(self, grads_and_vars)
    if not isinstance(skip_gradients_aggregation, bool):
        raise _no_pairs(self, "gradients and variables apart")
    pairs = list(grads_and_vars)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Variable):
            is_swapped = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Variable)
            kind = "array" if isinstance(pair, jax.Array) else type(pair).__name__
            raise _no_pairs(self, "pairs (variable, gradient)" if is_swapped else f"a list whose elements are {kind}s")
    with scope.updating() if skip_gradients_aggregation else nullcontext():
        return original(self, pairs)


def _no_pairs(optimizer: keras.optimizers.Optimizer, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{type(optimizer).__name__}.apply_gradients of {found}",
        "it takes one list of pairs (gradient, variable).",
        "optimizer.apply_gradients(zip(gradients, variables))",
    )


def _stateless_apply(
    original: Callable[..., Any], self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
) -> Any:
    scope = surrounding_scope()
    # In a replica function of the user's own what is stateless is theirs; in Keras's trainer it is how steps are written.
    if scope is None or not scope.is_averaging:
        return original(self, optimizer_variables, grads, trainable_variables)
    grads = scope.aggregated(grads)
    with scope.updating():
        return original(self, optimizer_variables, grads, trainable_variables)


def _add_variable_from_reference(
    original: Callable[..., Variable], self: Any, reference_variable: Variable, *args: Any, **kwargs: Any
) -> Variable:
    make = functools.partial(original, self, reference_variable, *args, **kwargs)
    is_table = isinstance(reference_variable, Variable) and initializer_of(reference_variable) is not None
    slot = make_table(make) if is_table else make()
    if isinstance(reference_variable, Variable):
        slot._phalanx_reference = weakref.ref(reference_variable)
    return slot


_BaseOptimizer = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply_gradients" in vars(c))

extend(_BaseOptimizer, "add_variable_from_reference")(_add_variable_from_reference)

extend(_BaseOptimizer, "apply")(_apply)

extend(_BaseOptimizer, "apply_gradients")(_apply_gradients)

extend(_BaseOptimizer, "stateless_apply")(_stateless_apply)


@extend(_BaseOptimizer, "add_variable_from_reference")
def _add_slot(original: Callable[..., Any], self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    slot = original(self, reference_variable, *args, **kwargs)
    # Its own path has the other's in it, with other separators.
    slot._phalanx_follows = layout_path(reference_variable)
    return slot


extend(keras.optimizers.LossScaleOptimizer, "apply")(_apply)

extend(keras.optimizers.LossScaleOptimizer, "stateless_apply")(_stateless_apply)
