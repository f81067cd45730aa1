# SPDX-License-Identifier: Apache-2.0
"""The objects that layers, models, metrics and optimizers consist of, and hooks that run when such an object gets variables."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import keras
from keras import Variable
from keras.src.models.functional import Functional
from keras.src.ops.operation import Operation
from keras.src.utils.naming import to_snake_case

from phalanx._src.compat.facts import facts_of, note_facts
from phalanx._src.compat.hooks import extend
from phalanx._src.compat.layouts import layout_of
from phalanx._src.compat.optimizers import BaseOptimizer, reference_of
from phalanx._src.compat.scope import active_scope
from phalanx._src.compat.variables import FirstValue, engine_hooks, is_new
from phalanx._src.mesh.arrays import put_small
from phalanx.typing import PyTree

Owner: TypeAlias = (
    keras.layers.Layer
    | keras.losses.Loss
    | keras.metrics.Metric
    | keras.optimizers.Optimizer
    | keras.random.SeedGenerator
)
"""A Keras object that has its own variables, or consists of such objects."""

OWNERS = (keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, BaseOptimizer, keras.random.SeedGenerator)


SUBLAYERS = "sublayers"
"""The name of the part with all layers in a layer."""


def own_variables(owner: Owner) -> list[Variable]:
    """Returns the variables of an object, in the order of their creation, without those of the objects that it consists of."""
    if isinstance(owner, keras.layers.Layer):
        return [*owner._trainable_variables, *owner._non_trainable_variables]
    if isinstance(owner, keras.random.SeedGenerator):
        return [owner.state]
    return [] if isinstance(owner, keras.losses.Loss) else list(owner._variables)


def automatic_name(owner: object) -> str:
    """Returns the name that Keras gives an object of this class, without the number."""
    return _automatic_name(type(owner).__name__)


@functools.cache
def _automatic_name(class_name: str) -> str:
    name: str = to_snake_case(class_name)
    return name


@functools.cache
def _numbered(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name) + r"(_\d+)?")


def given_name(owner: object) -> str | None:
    """Returns the name of an object. None if it looks as if Keras had numbered it, as "dense_1": files of models contain such names."""
    name = getattr(owner, "name", None)
    if not isinstance(name, str) or _numbered(automatic_name(owner)).fullmatch(name):
        return None
    return name


@extend(Operation, "__init__")
def _note_chosen_name(original: Callable[..., None], self: Operation, name: str | None = None) -> None:
    original(self, name)
    if name is not None and given_name(self) is None:
        note_facts(self).chosen_name = self.name


def chosen_name(owner: object) -> str | None:
    """Returns the name of a layer that looks as if Keras had numbered it, and is known to be given. None for others."""
    name = facts_of(owner).chosen_name
    return name if name == getattr(owner, "name", None) else None  # The program may have given it another one since.


def variable_names(owner: Owner) -> list[str]:
    """Returns the names of the variables of an object; for those that Keras has numbered, the names of their attributes."""
    attributes = {id(value): name.lstrip("_") for name, value in vars(owner).items() if isinstance(value, Variable)}
    return [given_name(v) or attributes.get(id(v)) or automatic_name(v) for v in own_variables(owner)]


class OptimizerSlot(NamedTuple):
    """A variable of an optimizer.

    Args:
      kind: what it is for, for example "momentum".
      trained: the variable that it belongs to. None if it belongs to the whole optimizer.
      variable: the variable itself.
    """

    kind: str
    trained: Variable | None
    variable: Variable


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[OptimizerSlot]:
    """Returns all variables of an optimizer, without those of the optimizers that it consists of."""
    trained = optimizer._trainable_variables
    listed = {
        id(slot): OptimizerSlot(name.lstrip("_"), variable, slot)
        for name, values in vars(optimizer).items()
        if isinstance(values, list)
        and len(values) == len(trained)
        and name not in ("_variables", "_trainable_variables")
        for variable, slot in zip(trained, values, strict=True)
        if isinstance(slot, Variable)
    }
    for variable, name in zip(optimizer._variables, variable_names(optimizer), strict=True):
        reference = reference_of(variable)
        if reference is not None:
            prefix = reference.path.replace("/", "_") + "_"
            listed[id(variable)] = OptimizerSlot(variable.name.removeprefix(prefix), reference, variable)
        elif id(variable) not in listed:
            listed[id(variable)] = OptimizerSlot(name, None, variable)
    companions = [
        OptimizerSlot(kind, trained[int(index)], companion)
        for kind, beside_all in vars(optimizer).get("phalanx_kept", {}).items()
        for index, companion in beside_all.items()
        if isinstance(companion, Variable)
    ]
    return [*listed.values(), *companions]


def parts_of(owner: Owner) -> Iterator[tuple[str, Any]]:
    """Yields the objects that an object consists of, and those containers among its attributes that may hold such objects.

    The names depend only on the code of the object, and not on the names that Keras generates.
    """
    if isinstance(owner, (keras.Sequential, Functional)):
        yield "layers", owner.layers
    if isinstance(owner, keras.Model):
        yield "optimizer", getattr(owner, "optimizer", None)
        yield "metrics", owner.metrics
    elif isinstance(owner, keras.metrics.Metric):
        yield "metrics", owner._metrics
    hidden = _hidden(keras.Model if isinstance(owner, keras.Model) else keras.layers.Layer)
    for name, value in sorted(vars(owner).items()):
        if name not in hidden and isinstance(value, (*OWNERS, Variable, list, tuple, dict)):
            yield name, value
    # Sublayers that no attribute leads to.
    if isinstance(owner, keras.layers.Layer) and not isinstance(owner, (keras.Sequential, Functional)):
        yield SUBLAYERS, owner._layers


@functools.cache
def _hidden(kind: type[keras.layers.Layer]) -> frozenset[str]:
    """Returns the attributes in which Keras itself tracks the parts of an object."""
    listeners, engine_hooks.grown = engine_hooks.grown, []  # The objects made here are not reported.
    try:
        return frozenset(name for base in _bare_objects(kind) for name in vars(base))
    finally:
        engine_hooks.grown = listeners


def _bare_objects(kind: type[keras.layers.Layer]) -> list[Any]:
    """Returns Keras objects without parts. They have names, so that the names that Keras generates for others do not change."""
    bare = [keras.layers.Layer(name="_"), keras.metrics.Metric(name="_"), BaseOptimizer(learning_rate=0.0, name="_")]
    if kind is keras.layers.Layer:
        return bare
    compiled = keras.Sequential(name="_")
    compiled.compile(keras.optimizers.SGD(name="_"))
    return [*bare, keras.Sequential(name="_"), compiled]


def on_growth(hear: Callable[[Owner], None]) -> None:
    """Registers a function that is called with a layer or optimizer after it was built, or an optimizer with a new companion."""
    engine_hooks.grown.append(hear)


def beside(
    optimizer: keras.optimizers.Optimizer,
    kind: str,
    variables: Sequence[Variable],
    make: Callable[[Variable], Variable],
) -> list[Variable]:
    """Returns one variable per trained variable of an optimizer, and makes the missing ones.

    They do not belong to `optimizer.variables`, so Keras files do not contain them. Phalanx checkpoints do.

    Args:
      optimizer: the optimizer.
      kind: the purpose of the variables.
      variables: the trained variables.
      make: makes the variable for one of them.
    """
    companions = _companions(optimizer, kind)
    indices = [str(optimizer._get_variable_index(v)) for v in variables]
    new = {index: make(variable) for index, variable in zip(indices, variables, strict=True) if index not in companions}
    companions.update(new)
    if new:
        _tell(optimizer)
    return [companions[index] for index in indices]


def optimizer_beside(
    optimizer: keras.optimizers.Optimizer, number: int, make: Callable[[], keras.optimizers.Optimizer]
) -> keras.optimizers.Optimizer:
    """Returns an optimizer that belongs to another one. The first call makes it. Its variables are stored as in `beside`.

    Args:
      optimizer: the other optimizer.
      number: the index of the optimizer, if the other one has several.
      make: makes the optimizer.
    """
    companions = _companions(optimizer, "optimizers")
    if str(number) not in companions:
        companions[str(number)] = make()
        _tell(optimizer)
    return companions[str(number)]


def _companions(optimizer: keras.optimizers.Optimizer, kind: str) -> dict[str, Any]:
    # Through `vars`, because Keras tracks what is set as an attribute.
    companions: dict[str, Any] = vars(optimizer).setdefault("phalanx_kept", {}).setdefault(kind, {})
    return companions


def _after(original: Callable[..., None], self: Owner, *args: PyTree) -> None:
    original(self, *args)
    _tell(self)


def _tell(owner: Owner) -> None:
    for hear in engine_hooks.grown:
        hear(owner)


extend(keras.layers.Layer, "_post_build")(_after)


def _hear_builds(kind: type[Any]) -> None:
    """Tells of the optimizers of a class when they have been built, and of those of its subclasses."""
    if "build" in vars(kind):
        extend(kind, "build")(_after)
    for subclass in kind.__subclasses__():
        _hear_builds(subclass)


def _hear_builds_of_subclass(kind: type[Any], /, **kwargs: PyTree) -> None:
    super(BaseOptimizer, kind).__init_subclass__(**kwargs)
    _hear_builds(kind)


_hear_builds(BaseOptimizer)

BaseOptimizer.__init_subclass__ = classmethod(_hear_builds_of_subclass)


def set_first_value(variable: Variable, value: Any) -> bool:
    """Sets the value that a variable begins with, or assigns it. Returns False if a step is traced that has already read it.

    No other code may have the array.
    """
    if is_new(variable):
        variable._initializer = FirstValue(lambda: value)
        return True
    if active_scope() is not None:
        return False
    layout = layout_of(variable)
    placed = put_small(value, layout) if layout is not None else None
    if placed is None and isinstance(layout, jax.sharding.Sharding) and layout.is_fully_addressable:
        # `assign` would copy the array, in case other code changes it.
        placed = jax.device_put(value, layout)
    variable.assign(value if placed is None else placed)
    return True
