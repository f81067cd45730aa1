# SPDX-License-Identifier: Apache-2.0
"""The arrays that Keras variables store, and hooks that run when variables are created, read and assigned."""

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike
from keras import Variable as Variable  # noqa: PLC0414  (exported)
from numpy.typing import DTypeLike

from phalanx._src.compat.facts import facts_of, note_facts
from phalanx._src.compat.hooks import extend
from phalanx._src.compat.layouts import divided_layout, layout_of, layout_of_shards
from phalanx._src.compat.scope import lift_scope, require_live_outside_steps, surrounding_scope
from phalanx._src.compat.undo import RAW_VALUE, note_old_value
from phalanx._src.mesh.arrays import (
    copied,
    put_parts,
    put_shards,
    put_small,
    require_fits,
    spans_processes,
)
from phalanx._src.mesh.topology import whole
from phalanx._src.runtime.settings import settings
from phalanx.errors import PhalanxError, VariableError, shown
from phalanx.errors.frames import Place, user_place
from phalanx.typing import PyTree


def is_new(variable: Variable) -> bool:
    """Whether `variable` has no value yet because the scope in which it was created is still open."""
    return variable._initializer is not None


def raw_value(variable: Variable) -> PyTree:
    """Returns the stored array of `variable`, even if a scope is open; None before its initialization."""
    return variable._value


def raw_values(variables: Sequence[Variable]) -> list[Any]:
    """Returns the stored arrays of many variables."""
    return list(map(value_of, variables))


value_of = attrgetter(RAW_VALUE)
"""Returns the stored array of a variable, without a call of Python."""


def set_raw_values(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Stores arrays in variables without converting or moving them."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


reference_counts: Callable[[Iterable[Any]], Iterator[int]] = functools.partial(map, sys.getrefcount)
"""Returns how often each array of a list is held, without a call of Python. See `UNSHARED`."""


def dtype_of(variable: Variable) -> str:
    """Returns the dtype of the stored array, without the casts of mixed precision."""
    dtype: str = variable._dtype
    return dtype


class _Holder:
    """Stands in for a variable, to measure the reference count of an array."""

    def __init__(self) -> None:
        self._value = object()


def _count_of_unshared() -> int:
    holder: Any = _Holder()
    return next(reference_counts([holder._value]))


UNSHARED = _count_of_unshared()
"""The reference count of an array that only a variable and a list hold. With a higher one, it must not be donated.

It depends on the version of Python.
"""


@dataclass
class _Changes:
    """Counts changes that may invalidate compiled programs."""

    trainable: int = 0


changes = _Changes()
"""The changes so far: `trainable` counts assignments to the attribute of that name, of any variable."""


@dataclass
class EngineHooks:
    """Functions that the engine has registered for events of variables and of objects that have variables.

    Attributes:
      made: functions of each new variable.
      filling: functions that fill a variable without a stored array before it is read. They return whether the array is for this read only.
      read: functions of each variable whose stored array a read returns.
      assigned: functions of each variable that was assigned eagerly.
      indexed: functions of a variable and an index, before the index is applied.
      grown: functions of each layer and optimizer after it was built, and of an optimizer with a new companion.
      reading: held while a variable without a stored array is filled, read and emptied again.
    """

    made: list[Callable[[Variable], None]] = field(default_factory=list)
    filling: list[Callable[[Variable], bool]] = field(default_factory=list)
    read: list[Callable[[Variable], None]] = field(default_factory=list)
    assigned: list[Callable[[Variable], None]] = field(default_factory=list)
    indexed: list[Callable[[Variable, Any], None]] = field(default_factory=list)
    grown: list[Callable[[Any], None]] = field(default_factory=list)
    reading: threading.RLock = field(default_factory=threading.RLock)


engine_hooks = EngineHooks()


def on_assign(hear: Callable[[Variable], None]) -> None:
    """Registers a function that is called with the variable after every eager assignment."""
    engine_hooks.assigned.append(hear)


def on_first_read(fill: Callable[[Variable], bool]) -> None:
    """Registers a function that is called before a variable without a stored array is read.

    Args:
      fill: stores an array in the variable if it can. Returns whether the array is only for this read, and is then removed.
    """
    engine_hooks.filling.append(fill)


_FEW = 1 << 20
"""Number of elements up to which copying zeros to a device is faster than compiling and running a program for them."""


@extend(keras.initializers.Zeros, "__call__")
def _zeros(
    original: Callable[..., jax.Array], self: keras.initializers.Zeros, shape: Sequence[int], dtype: str | None = None
) -> jax.Array:
    """Returns zeros without compiling a program. An optimizer's slots have many shapes, and each would compile its own."""
    if math.prod(shape) > _FEW:
        return original(self, shape, dtype)
    zeros: jax.Array = jax.device_put(np.zeros(shape, jnp.dtype(keras.backend.standardize_dtype(dtype))))
    return zeros


def _set_trainable(variable: Variable, value: bool) -> None:
    changes.trainable += 1
    _trainable.fset(variable, value)


_trainable: Any = next(vars(c)["trainable"] for c in Variable.__mro__ if "trainable" in vars(c))

Variable.trainable = property(_trainable.fget, _set_trainable, doc=_trainable.__doc__)


def on_read(observe: Callable[[Variable], None]) -> None:
    """Registers a function that is called with the variable whenever a read returns the stored array itself."""
    engine_hooks.read.append(observe)


def _read(variable: Variable) -> PyTree:
    stored = variable._value
    # The scope of a step knows the value, though nothing is stored.
    if stored is not None or surrounding_scope() is not None:
        value = _value.fget(variable)
        if value is stored:
            for observe in engine_hooks.read:
                observe(variable)
        return value
    with engine_hooks.reading:
        is_lent = [fill(variable) for fill in engine_hooks.filling]
        try:
            return _value.fget(variable)
        finally:
            if any(is_lent):
                variable._value = None


_value: Any = next(vars(c)["value"] for c in Variable.__mro__ if "value" in vars(c))

Variable.value = property(_read, doc=_value.__doc__)


def on_variable(hear: Callable[[Variable], None]) -> None:
    """Registers a function that is called with every variable after its creation."""
    engine_hooks.made.append(hear)


def set_maker(variable: Variable, number: int) -> None:
    """Records the number of the strategy in whose scope a variable was created."""
    note_facts(variable).maker = number


def maker_of(variable: Variable) -> int | None:
    """Returns the number of the strategy in whose scope a variable was created; None outside all scopes."""
    return facts_of(variable).maker


@extend(keras.metrics.Metric, "add_variable")
def _add_to_metric(
    original: Callable[..., Variable], self: keras.metrics.Metric, *args: PyTree, **kwargs: PyTree
) -> Variable:
    variable = original(self, *args, **kwargs)
    note_facts(variable).is_of_metric = True
    return variable


def is_of_metric(variable: Variable) -> bool:
    """Whether a metric has created `variable`."""
    return facts_of(variable).is_of_metric


def place_of_creation(variable: Variable) -> Place | None:
    """Returns the line of user code that created a variable while a function was traced; None for other variables."""
    return facts_of(variable).place


def make_on_demand(variables: Sequence[Variable], aggregation: str) -> None:
    """Makes variables local to the replicas. They are combined when they are read outside, and not at the end of each program."""
    for variable in variables:
        variable._synchronization, variable._aggregation = "on_demand", aggregation


def keep_equal(variables: Sequence[Variable]) -> None:
    """Makes variables equal on all replicas, like variables that were created without a synchronization and an aggregation."""
    for variable in variables:
        if variable.synchronization == "on_demand":
            variable._synchronization, variable._aggregation = "auto", "none"


def set_outer(variable: Variable, outer: Variable) -> None:
    """Makes `outer` the value of a replica-local variable for all who read it outside the replicas."""
    note_facts(variable).outer = outer


def outer_of(variable: Variable) -> Variable | None:
    """Returns the variable whose value is read outside the replicas instead of the mean of theirs; None if there is none."""
    return facts_of(variable).outer


def take_outer(variables: Sequence[Variable]) -> None:
    """Makes replica-local variables begin with their outer ones, which nobody reads any more."""
    for variable in variables:
        outer = outer_of(variable)
        if outer is not None:
            note_facts(variable).outer = None
            if variable._value is None:
                variable._value = outer._value


def on_index(check: Callable[[Variable, Any], None]) -> None:
    """Registers a function that is called with `(variable, index)` before `variable[index]`, and may raise."""
    engine_hooks.indexed.append(check)


@extend(Variable, "__getitem__")
def _getitem(original: Callable[..., jax.Array], self: Variable, idx: object) -> jax.Array:
    for check in engine_hooks.indexed:
        check(self, idx)
    return original(self, idx)


@extend(Variable, "__init__")
def _init(original: Callable[..., Any], self: Variable, initializer: object, *args: PyTree, **kwargs: PyTree) -> None:
    _make(original, self, initializer, *args, **kwargs)
    if lift_scope() is not None:
        note_facts(self).place = user_place()
    for hear in engine_hooks.made:
        hear(self)


def _make(original: Callable[..., Any], self: Variable, initializer: object, *args: PyTree, **kwargs: PyTree) -> None:
    # On CPU, JAX may share the memory of the array, which the user may change later: jax-ml/jax#37830.
    initializer = copied(initializer)
    # Keras rejects a concrete initial value inside a stateless scope, but accepts a function that returns it.
    if lift_scope() is None or callable(initializer) or isinstance(initializer, str):
        original(self, initializer, *args, **kwargs)
        return
    arguments = dict(zip(("shape", "dtype", "trainable"), args[:3], strict=False)) | kwargs
    value = np.asarray(initializer)
    arguments |= {
        "shape": value.shape,
        "dtype": arguments.get("dtype") or keras.backend.standardize_dtype(jnp.asarray(value).dtype),
    }
    original(self, lambda shape, dtype: keras.ops.convert_to_tensor(value, dtype=dtype), *args[3:], **arguments)


@dataclass(frozen=True)
class FirstValue:
    """An initializer that returns one value.

    Args:
      compute: returns the value. It may be called several times.
    """

    compute: Callable[[], ArrayLike]

    def __call__(self, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        array: jax.Array = keras.ops.convert_to_tensor(self.compute(), dtype=dtype)
        return array


def is_hollow(variable: Variable) -> bool:
    """Whether `variable` was created without a value, and has got none since."""
    return facts_of(variable).is_hollow and variable._value is None


def hollow(variable: Variable) -> None:
    """Takes the value of `variable` away, as if it had been created without one."""
    note_facts(variable).is_hollow, variable._value = True, None


@extend(Variable, "_initialize_with_initializer")
def _initialize(original: Callable[..., Any], self: Variable, initializer: Callable[..., Any]) -> None:
    self._initialize_layout()
    layout = divided_layout(self)
    least = settings.hollow_bytes
    if least is not None and math.prod(self._shape) * jnp.dtype(self._dtype).itemsize >= least:
        hollow(self)
    elif layout is not None and isinstance(initializer, FirstValue) and spans_processes(initializer.compute()):
        # A program may not have such an array as a constant.
        self._value = put_shards(initializer.compute(), layout)
    elif layout is not None and not isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator):
        # One program, whose values do not depend on the mesh, and of which each process computes its own shards.
        draw = lambda: self._convert_to_tensor(initializer(self._shape, dtype=self._dtype))  # noqa: E731
        self._value = jax.jit(draw, out_shardings=layout)()
    else:
        original(self, initializer)


@extend(Variable, "_direct_assign")
def _assign_directly(original: Callable[..., None], self: Variable, value: ArrayLike) -> None:
    layout = layout_of(self)
    if settings.hollow_bytes is not None and is_hollow(self):
        return  # It is to have no array, whoever assigns it.
    if not isinstance(layout, jax.sharding.Sharding) or isinstance(value, jax.core.Tracer):
        original(self, value)
    elif (placed := put_small(value, layout)) is not None:
        self._value = placed
    elif not layout.is_fully_addressable:
        self._value = put_shards(value, layout)
    else:
        original(self, value)


@extend(Variable, "__array__")
def _array(
    original: Callable[..., np.ndarray], self: Variable, dtype: DTypeLike | None = None, copy: bool | None = None
) -> np.ndarray:
    """Returns the value on the host. If no process has the whole value, all must call it."""
    value = self.value
    host = (
        np.asarray(whole(value, f"variable {self.path!r}"), dtype) if spans_processes(value) else original(self, dtype)
    )
    return host.copy() if copy else host


def _read_zeros(variable: Variable) -> bool:
    if not is_hollow(variable):
        return False
    variable._value = jnp.zeros(variable._shape, variable._dtype)
    return True


on_first_read(_read_zeros)


@extend(Variable, "assign")
def _assign(original: Callable[..., jax.Array], self: Variable, value: ArrayLike) -> jax.Array:
    if isinstance(value, (np.ndarray, np.generic, int, float)) and layout_of(self) is not None:
        require_fits(value, f"{self.path}.assign")
    try:
        _require_numbers(self, value)
        # Keras returns its argument. In a step the value of the variable may differ, because it aggregates the replicas.
        result, scope = original(self, _owned(self, value)), lift_scope()
    except (TypeError, ValueError, OverflowError, RuntimeError) as e:
        _explain_refusal(self, "assign", value, e)
        raise
    return result if scope is None else scope.get_current_value(self)


def _owned(variable: Variable, value: PyTree) -> PyTree:
    """Returns a value that no other code can change. For a sharded variable, each device gets its shard only."""
    layout = layout_of_shards(variable)
    if (
        layout is None
        or not isinstance(value, np.ndarray)
        or value.shape != tuple(variable.shape)
        or lift_scope() is not None
    ):
        return copied(value)
    dtype = jnp.dtype(dtype_of(variable))

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        part: np.ndarray = copied(value[index])
        return part if part.dtype == dtype else np.asarray(variable._convert_to_tensor(part, dtype=dtype.name))

    return put_parts(value.shape, layout, shard)


@extend(Variable, "assign_add")
def _assign_add(original: Callable[..., jax.Array], self: Variable, value: ArrayLike) -> jax.Array:
    # Keras calls `assign(self + value)`. With aggregation SUM, that would add the old value once per replica.
    return _add(original, self, value, "assign_add")


@extend(Variable, "assign_sub")
def _assign_sub(original: Callable[..., jax.Array], self: Variable, value: ArrayLike) -> jax.Array:
    return _add(original, self, value, "assign_sub")


def _add(original: Callable[..., jax.Array], self: Variable, value: Any, method: str) -> jax.Array:
    if isinstance(value, (int, float)) and layout_of(self) is not None:
        require_fits(value, f"{self.path}.{method}")
    scope = lift_scope()
    try:
        _require_numbers(self, value)
        if scope is not None:
            return scope.add_delta(self, value, negative=method == "assign_sub")
        return original(self, value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as e:
        _explain_refusal(self, method, value, e)
        raise


def _require_numbers(variable: Variable, value: object) -> None:
    """Rejects values that JAX would silently convert: text, dates, masked arrays, and complex numbers for a real variable.

    Raises:
      TypeError: `value` is one of these.
      TraceError: `value` was kept from another step. Keras would store it.
    """
    require_live_outside_steps(value)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind and kind in "mM":
        raise TypeError("dates are not numbers.")
    is_complex = isinstance(value, complex)
    # Variables of no strategy take what Keras takes.
    if layout_of(variable) is not None:
        if isinstance(value, (str, bytes)) or (kind and kind in "SU"):
            raise TypeError("text is not a number.")
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("JAX arrays cannot carry a mask.")
        is_complex = is_complex or kind == "c"
    if is_complex and not variable.dtype.startswith("complex"):
        raise TypeError(f"a complex number does not fit into {variable.dtype}.")


def _explain_refusal(variable: Variable, method: str, value: object, error: Exception) -> None:
    """Replaces a Keras or JAX error by one that explains it, for variables of a strategy.

    Returns without raising if the variable belongs to no strategy, so that its users see the original error.

    Raises:
      VariableError: `value` is not an array of numbers that fits the shape of the variable.
    """
    is_of_strategy = lift_scope() is not None or layout_of(variable) is not None or maker_of(variable) is not None
    is_explained = isinstance(error, (PhalanxError, jax.errors.JAXTypeError, jax.errors.UnexpectedTracerError))
    is_alive = isinstance(value, jax.Array) and (isinstance(value, jax.core.Tracer) or not value.is_deleted())
    if not is_of_strategy or is_explained or (isinstance(error, RuntimeError) and is_alive):
        return
    raise VariableError(
        f"{method}({shown(value)}) of variable '{variable.path}'",
        f"{str(error).partition(chr(10))[0][:200]}",
        f"an array of numbers of shape {tuple(variable.shape)}",
    ) from error


@extend(Variable, "_direct_assign")
def _direct_assign(original: Callable[..., Any], self: Variable, value: object) -> None:
    note_old_value(self)
    original(self, value)
    for hear in engine_hooks.assigned:
        hear(self)
