# SPDX-License-Identifier: Apache-2.0
"""Optimizers of models whose variables are frozen and unfrozen after the optimizer was built.

Keras makes an optimizer's slots for the variables that are trainable when it is built, and matches moving averages to the trainable
variables by their order. Both go wrong when `trainable` changes afterwards.
"""

from collections.abc import Callable, Iterable, Sequence

import keras
from keras import Variable

from phalanx._src.compat.hooks import extend
from phalanx._src.compat.optimizers import BaseOptimizer, inner_of, restricted
from phalanx._src.compat.scope import lift_scope
from phalanx._src.compat.variables import maker_of
from phalanx.errors import VariableError


def train_unfrozen(model: keras.Model) -> None:
    """Gives a built optimizer slots for the variables of its model that have become trainable. All other slots keep their values."""
    optimizer = model.optimizer
    # A step of the user may train only some variables, so `_check_variables_are_known` waits until it does.
    if optimizer is None or not optimizer.built or not hasattr(optimizer, "_trainable_variables"):
        return
    if unknown := _unknown(optimizer, model.trainable_variables):
        _add(optimizer, unknown, model.variables)


def _unknown(optimizer: keras.optimizers.Optimizer, variables: Iterable[Variable]) -> list[Variable]:
    return [v for v in variables if optimizer._var_key(v) not in optimizer._trainable_variables_indices]


def _add(optimizer: keras.optimizers.Optimizer, variables: list[Variable], order: Sequence[Variable]) -> None:
    """Adds variables to those that an optimizer trains, and sorts all of them as in `order`."""
    one = inner_of(optimizer)
    places = {id(v): i for i, v in enumerate(order)}
    trained = sorted([*one._trainable_variables, *variables], key=lambda v: places.get(id(v), len(places)))
    # Files hold slots by their order, so it must be that of an optimizer that was built for all variables. Such a one is built here.
    # It shares the store of slots with `one`.
    whole, count = object.__new__(type(one)), len(one._variables)
    vars(whole).update(vars(one), built=False, _trainable_variables_indices={})
    with keras.name_scope(one.name, caller=whole):
        whole.build(trained)
    attributes, slots = {}, _slots_of(one, whole)
    for name, value in vars(whole).items():
        if value is not vars(one).get(name) and not isinstance(value, Variable):
            attributes[name] = [slots.get(id(x), x) for x in value] if isinstance(value, list) else value
    stored = one._variables[count:]
    for slot in stored:
        if id(slot) in slots:
            one._untrack_variable(slot)
    shared = [v for v in one._variables[:count] if not any(v is slot for slot in slots.values())]
    one._variables[:] = [*shared, *(slots.get(id(slot), slot) for slot in stored)]
    # Through `vars`, because Keras's `Optimizer.__setattr__` would track the lists as new variables.
    vars(one).update(attributes)
    if one is not optimizer:
        names = ("_trainable_variables", "_trainable_variables_indices")
        vars(optimizer).update({name: attributes[name] for name in names})


def _slots_of(optimizer: keras.optimizers.Optimizer, whole: keras.optimizers.Optimizer) -> dict[int, Variable]:
    """Returns the slots that `optimizer` has, by the id of the slot that `whole` has in the same place."""
    slots: dict[int, Variable] = {}
    trained = whole._trainable_variables
    places = {id(v): i for i, v in enumerate(optimizer._trainable_variables)}
    for name, value in vars(whole).items():
        old = vars(optimizer).get(name)
        if isinstance(value, Variable) and value is not old:
            slots[id(value)] = old
        elif isinstance(value, list) and len(value) == len(trained) and len(old) == len(places):
            pairs = [(slot, old[places[id(v)]]) for v, slot in zip(trained, value, strict=True) if id(v) in places]
            slots.update((id(slot), old_slot) for slot, old_slot in pairs if slot is not None)
    return slots


def finalize(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable]) -> None:
    """Ends a training run as Keras does. With `use_ema`, the trainable ones of its variables get their moving averages."""
    _with_averages(optimizer.finalize_variable_values, optimizer, variables)


def _with_averages(
    call: Callable[[Sequence[Variable]], None], optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable]
) -> None:
    """Calls a Keras function that pairs `variables` with the moving averages of an optimizer by their order."""
    one = inner_of(optimizer)
    if not one.use_ema or not one.built:
        call(variables)
        return
    with restricted(optimizer, variables):
        call(one._trainable_variables)


@extend(BaseOptimizer, "_check_variables_are_known")
def _check_variables_are_known(
    original: Callable[..., None], self: keras.optimizers.Optimizer, variables: Sequence[Variable]
) -> None:
    """Adds variables without slots in a custom step of `fit`. Elsewhere, rejects them.

    Raises:
      VariableError: the optimizer was built without one of them, and a step is traced or a strategy made the variable.
    """
    unknown, scope = _unknown(self, variables), lift_scope()
    if unknown and scope is not None and scope.share.is_averaging:
        _add(self, unknown, variables)
    elif unknown and (scope is not None or maker_of(unknown[0]) is not None):
        raise VariableError(
            f"{type(self).__name__}.apply for variable {unknown[0].path!r} {tuple(unknown[0].shape)} {unknown[0].dtype}",
            f"the optimizer was built for {len(self._trainable_variables_indices)} other variables, those that were trainable then.",
            "optimizer.build(model.variables) before the first step, or a new optimizer after a change of `trainable`",
        )
    original(self, variables)
