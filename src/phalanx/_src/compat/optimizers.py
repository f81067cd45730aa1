# SPDX-License-Identifier: Apache-2.0
"""Keras optimizers: their variables, and the methods through which gradients reach them."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import jax
import keras
import numpy as np
from keras import Variable
from typing_extensions import override

from phalanx._src.compat.facts import facts_of, note_facts
from phalanx._src.compat.hooks import extend
from phalanx._src.compat.layouts import layout_of, layout_path
from phalanx._src.compat.scope import lift_scope, surrounding_scope
from phalanx._src.compat.tables import initializer_of, make_table
from phalanx._src.compat.undo import transaction
from phalanx._src.compat.variables import FirstValue, make_on_demand
from phalanx.errors import InvalidArgumentError
from phalanx.typing import PyTree

_R = TypeVar("_R")


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> object:
    """Returns the object that determines the learning rate: a variable, a schedule or a function."""
    return inner_of(optimizer)._learning_rate


def known_rate(optimizer: object) -> float | None:
    """Returns the current learning rate. None without an optimizer, or if only its update knows the rate."""
    try:
        rate = getattr(optimizer, "learning_rate", None)
    except InvalidArgumentError:  # Of a joint optimizer.
        return None
    # The text of a number of 32 bits is shorter than that of the same number with 64 bits.
    return None if rate is None else float(str(np.asarray(rate)))


def inner_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that updates the variables: the inner one of a loss-scaling optimizer."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int | None:
    """Returns the number of steps over which gradients are accumulated; None if every step applies them.

    None for a loss-scaling optimizer too, because it must check at every step whether the gradients are finite.
    """
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return None if is_scaling else optimizer.gradient_accumulation_steps


def accumulators(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable] | None) -> list[Variable]:
    """Returns the variables that hold the accumulated gradients of `variables`."""
    build_optimizer(optimizer, variables)
    trained = trained_by(optimizer, variables)
    return [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in trained]


def unsent(shape: tuple[int, ...]) -> Variable:
    """Returns a variable for what the replicas have not sent of a gradient. It is added up only when it is read."""
    variable = Variable(initializer="zeros", shape=shape, dtype="float32", trainable=False, name="unsent")
    make_on_demand([variable], "sum")
    note_facts(variable).is_residual = True
    return variable


def is_unsent(variable: Variable) -> bool:
    """Whether a variable holds what the replicas have not sent. A training run continues without the part of a process that is lost."""
    return facts_of(variable).is_residual


def is_last_accumulated(optimizer: keras.optimizers.Optimizer) -> jax.Array:
    """Returns whether this step applies the accumulated gradients: a bool scalar, traced inside a program."""
    is_last: jax.Array = (optimizer._iterations.value + 1) % optimizer.gradient_accumulation_steps == 0
    return is_last


def is_due(optimizer: keras.optimizers.Optimizer, every: int, offset: int = 0) -> jax.Array:
    """Returns whether the updates that an optimizer has made, less `offset`, are a multiple of `every`: a bool scalar."""
    steps = optimizer.gradient_accumulation_steps or 1
    due: jax.Array = (optimizer._iterations.value - offset * steps) % (every * steps) == 0
    return due


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Creates the variables of an optimizer if they do not exist yet."""
    if not optimizer.built:
        # As Keras does in `apply`, so that the slots get the same names.
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))


@contextmanager
def restricted(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable]) -> Iterator[None]:
    """Restricts an optimizer to some of its variables inside the context.

    The slots of all other variables are hidden. Slots without a variable, such as `iterations`, stay.
    """
    one = inner_of(optimizer)
    if not hasattr(one, "_trainable_variables"):  # It is not built yet.
        yield
        return
    ids = set(map(id, variables))
    trained = [v for v in one._trainable_variables if id(v) in ids]
    parts: dict[str, PyTree] = {
        "_trainable_variables": trained,
        # The lists of momentums and the like stay whole, so each variable keeps its index in them.
        "_trainable_variables_indices": {one._var_key(v): one._get_variable_index(v) for v in trained},
        "_variables": [s for s in one._variables if reference_of(s) is None or id(reference_of(s)) in ids],
    }
    if one.use_ema:
        pairs = zip(one._trainable_variables, one._model_variables_moving_average, strict=True)
        parts["_model_variables_moving_average"] = [average for v, average in pairs if id(v) in ids]
    attributes = vars(one).copy()
    # Through `vars`, because Keras's `Optimizer.__setattr__` would track the new lists as new variables.
    vars(one).update(parts)
    try:
        yield
    finally:
        vars(one).update({name: attributes[name] for name in parts})


_ELEMENTWISE = frozenset(
    (
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.Adamax,
        keras.optimizers.Nadam,
        keras.optimizers.Adagrad,
        keras.optimizers.Adadelta,
        keras.optimizers.RMSprop,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
    )
)
"""Classes, and not their subclasses, which may do anything."""


def updates_elementwise(optimizer: keras.optimizers.Optimizer, variable: Variable) -> bool:
    """Returns whether an optimizer updates each element of a variable without the other elements, as norms would need them."""
    return (
        type(optimizer) in _ELEMENTWISE
        and optimizer.clipnorm is None
        and optimizer.global_clipnorm is None
        and not optimizer.use_ema
        and not accumulation_steps(optimizer)
        and not facts_of(optimizer).is_scaled
        and getattr(variable, "constraint", None) is None
    )


@contextmanager
def known_learning_rate(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Computes the learning rate before the context, and gives it to the optimizer inside.

    A schedule, or a function, is code of the user: it may read and write any variables, of which the context knows only some.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, Variable):
        yield
        return
    value = optimizer.learning_rate
    # Through `vars`, because Keras's `Optimizer.__setattr__` would track it.
    vars(optimizer)["_learning_rate"] = lambda: value
    try:
        yield
    finally:
        vars(optimizer)["_learning_rate"] = rate


def is_elementwise(slot: Variable) -> bool:
    """Returns whether an update of a slot uses each of its elements without the others. False for other variables."""
    return facts_of(slot).is_elementwise


def clipped(optimizer: keras.optimizers.Optimizer, grads: Sequence[Any]) -> Sequence[Any]:
    """Returns gradients clipped as the optimizer would clip them, so that clipping them once more changes nothing."""
    # Clipping applies to the unscaled gradients, but `apply` expects them scaled by the loss scale.
    scale = optimizer.loss_scale_factor or 1.0
    clip: Sequence[Any] = optimizer._clip_gradients([g / scale for g in grads])
    return [g * scale for g in clip]


def reference_of(slot: Variable) -> Variable | None:
    """Returns the variable that `slot` belongs to; None for a slot of the whole optimizer, such as `iterations`."""
    reference = facts_of(slot).reference
    return None if reference is None else reference()


def trained_by(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable] | None) -> tuple[Variable, ...]:
    """Returns the variables that `optimizer.apply(grads, variables)` updates. None stands for all that it was built with.

    Raises:
      VariableError: the optimizer was built without one of them.
    """
    if variables is not None and optimizer.built:
        optimizer._check_variables_are_known(variables)
    return tuple(optimizer._trainable_variables if variables is None else variables)


def apply_stateless(
    optimizer: keras.optimizers.LossScaleOptimizer, grads: Sequence[Any], variables: Sequence[Variable] | None
) -> None:
    """Applies a loss-scaling optimizer through `stateless_apply`.

    Its `apply` assigns variables inside the branches of `ops.cond`, which JAX does not allow. The stateless form exists for
    this reason: https://github.com/keras-team/keras-core/pull/851.
    """
    build_optimizer(optimizer, variables)
    trained = trained_by(optimizer, variables)
    state = optimizer.variables
    new_trained, new = optimizer.stateless_apply([v.value for v in state], list(grads), [v.value for v in trained])
    for variable, value in zip([*trained, *state], [*new_trained, *new], strict=True):
        variable.assign(value)


def _apply(
    original: Callable[..., None],
    self: keras.optimizers.Optimizer,
    grads: Sequence[Any],
    trainable_variables: Sequence[Variable] | None = None,
) -> None:
    scope = lift_scope()
    if scope is None and not isinstance(self, JointOptimizer):
        with transaction():
            return original(self, grads, trainable_variables)
    grads = list(grads)
    if grads and all(g is None for g in grads):
        raise InvalidArgumentError(
            f"{type(self).__name__} with no gradients for any variable",
            f"all {len(grads)} gradients are None. Either the loss does not depend on the variables, or it was computed "
            "outside the tape.",
            "with phalanx.GradientTape() as tape: around the call of the model and the loss",
        )
    if scope is None:
        with transaction():
            return original(self, grads, trainable_variables)
    return scope.apply_gradients(self, functools.partial(original, self), grads, trainable_variables)


def _apply_gradients(
    original: Callable[..., _R],
    self: keras.optimizers.Optimizer,
    grads_and_vars: Iterable[Any],
    skip_gradients_aggregation: bool = False,
    *,
    experimental_aggregate_gradients: bool = True,  # The name that tf.keras had first.
) -> _R:
    scope = lift_scope()
    if scope is None:
        return original(self, grads_and_vars)
    if not isinstance(skip_gradients_aggregation, bool):
        raise _no_pairs(self, "gradients and variables as two arguments")
    pairs = list(grads_and_vars)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Variable):
            is_swapped = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Variable)
            kind = "array" if isinstance(pair, jax.Array) else type(pair).__name__
            raise _no_pairs(self, "pairs (variable, gradient)" if is_swapped else f"a list whose elements are {kind}s")
    with scope.updating() if skip_gradients_aggregation or not experimental_aggregate_gradients else nullcontext():
        return original(self, pairs)


def _no_pairs(optimizer: keras.optimizers.Optimizer, argument: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{type(optimizer).__name__}.apply_gradients of {argument}",
        "the argument must be one list of pairs (gradient, variable).",
        "optimizer.apply_gradients(zip(gradients, variables))",
    )


def _stateless_apply(
    original: Callable[..., _R],
    self: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[PyTree],
    grads: Sequence[Any],
    trainable_variables: Sequence[PyTree],
) -> _R:
    scope = surrounding_scope()
    if scope is not None:
        scope.check_stateless_apply()
    # In a replica function, users who call a stateless method aggregate the gradients themselves. In a `train_step` of
    # `fit`, they expect that the trainer does it, because Keras's guide to custom steps on JAX calls this method.
    if scope is None or not scope.share.is_averaging:
        return original(self, optimizer_variables, grads, trainable_variables)
    grads = scope.aggregated(grads)
    with scope.updating():
        return original(self, optimizer_variables, grads, trainable_variables)


def _add_variable_from_reference(
    original: Callable[..., Variable],
    self: keras.optimizers.Optimizer,
    reference_variable: Variable,
    *args: PyTree,
    **kwargs: PyTree,
) -> Variable:
    make = functools.partial(original, self, reference_variable, *args, **kwargs)
    slot = make() if initializer_of(reference_variable) is None else make_table(make)
    note_reference(slot, reference_variable)
    note_facts(slot).is_elementwise = updates_elementwise(self, reference_variable)
    return slot


def note_reference(slot: Variable, reference: Variable) -> None:
    """Makes `slot` belong to the variable `reference`, and be sharded like it."""
    facts = note_facts(slot)
    facts.reference = weakref.ref(reference)
    # The path of a slot contains the path of its variable with other separators, so it cannot be looked up by path.
    facts.layout_path = layout_path(reference)


def add_slot(
    optimizer: keras.optimizers.Optimizer, name: str, first: FirstValue, like: PyTree, reference: Variable | None
) -> Variable:
    """Returns a new variable of an optimizer.

    Args:
      optimizer: the optimizer.
      name: name of the variable.
      first: its first value.
      like: array or shape with its shape and dtype.
      reference: the trained variable that it belongs to. None if it belongs to the whole optimizer.
    """
    dtype = like.dtype.name
    if reference is None:
        # Numbers without a mean, as a count, are equal on all replicas.
        aggregation = "none" if keras.backend.is_float_dtype(dtype) else "only_first_replica"
        return optimizer.add_variable(like.shape, first, dtype, aggregation, name=name)
    name = f"{reference.path.replace('/', '_')}_{name}"
    slot = optimizer.add_variable(like.shape, first, dtype, layout=layout_of(reference), name=name)
    note_reference(slot, reference)
    return slot


class JointOptimizer(keras.optimizers.Optimizer):
    """An optimizer whose update of a variable may depend on the values and gradients of all others.

    Args:
      update: updates the variables and slots, given gradients and variables. Variables without a gradient are missing.
      learning_rate: returns the current learning rate.
      name: name of the optimizer.
    """

    def __init__(
        self,
        update: Callable[[Sequence[Any], Sequence[Variable]], None],
        learning_rate: Callable[[], Variable],
        name: str | None,
    ) -> None:
        super().__init__(learning_rate, name=name)
        self._update_jointly = update

    @override
    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Variable]) -> None:
        self._update_jointly(grads, trainable_variables)


BaseOptimizer = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply_gradients" in vars(c))

extend(BaseOptimizer, "add_variable_from_reference")(_add_variable_from_reference)

extend(BaseOptimizer, "apply")(_apply)

extend(BaseOptimizer, "apply_gradients")(_apply_gradients)

extend(BaseOptimizer, "stateless_apply")(_stateless_apply)


@extend(keras.optimizers.LossScaleOptimizer, "__init__")
def _init_scaling(
    original: Callable[..., None],
    self: keras.optimizers.LossScaleOptimizer,
    inner_optimizer: keras.optimizers.Optimizer,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    original(self, inner_optimizer, *args, **kwargs)
    note_facts(inner_optimizer).is_scaled = True


extend(keras.optimizers.LossScaleOptimizer, "apply")(_apply)

extend(keras.optimizers.LossScaleOptimizer, "stateless_apply")(_stateless_apply)
