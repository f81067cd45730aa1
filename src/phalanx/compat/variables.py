# SPDX-License-Identifier: Apache-2.0
"""The stored arrays of Keras variables, and what happens when they are made, read and assigned."""

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import Variable as Variable  # noqa: PLC0414  (exported)
from keras.src.backend.common import global_state

from phalanx.compat.hooks import extend
from phalanx.compat.layouts import layout_of
from phalanx.compat.scope import active_scope, lift_scope
from phalanx.errors import PhalanxError, VariableError, shown
from phalanx.mesh.arrays import copied, require_fits


def is_new(variable: Variable) -> bool:
    """Whether `variable` was made in a scope that is still open: it gets its first value when that closes."""
    return variable._initializer is not None


def raw_value(variable: Variable) -> Any:
    """Returns the stored array of `variable`, whatever scope is open; None before its initialization."""
    return variable._value


def raw_values(variables: Sequence[Variable]) -> list[Any]:
    """Returns the stored arrays of many variables."""
    return list(map(_value_of, variables))


RAW_VALUE = "_value"
"""The attribute of a variable in which Keras stores its array."""

_value_of = attrgetter(RAW_VALUE)


def set_raw_values(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Stores arrays in variables as they are, without conversion or relayout."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def shared_values(variables: Sequence[Variable]) -> tuple[list[Any], list[int]]:
    """Returns the stored arrays of many variables, and how many references Python holds to each."""
    arrays = list(map(_value_of, variables))
    return arrays, list(map(sys.getrefcount, arrays))


def dtype_of(variable: Variable) -> str:
    """Returns the dtype of the stored array, whatever mixed precision makes of it."""
    return variable._dtype


class _Holder:
    def __init__(self) -> None:
        self._value = object()


def _count_of_unshared() -> int:
    holder: Any = _Holder()
    return shared_values([holder])[1][0]


UNSHARED = _count_of_unshared()
"""The count of an array that nobody but its variable holds, on this version of Python."""


@dataclass
class _Changes:
    """Counts changes that decide which programs fit."""

    trainable: int = 0


changes = _Changes()
"""How often the `trainable` of any variable was set."""

_listeners: list[Callable[[Variable], None]] = []


def on_assign(hear: Callable[[Variable], None]) -> None:
    """Lets `hear(variable)` be called after every eager assignment."""
    _listeners.append(hear)


_readers: list[Callable[[Variable], bool]] = []


def on_first_read(fill: Callable[[Variable], bool]) -> None:
    """Lets `fill(variable)` be called before a variable is read that has no stored array.

    It returns whether what it stores is for this one read.
    """
    _readers.append(fill)


@contextmanager
def undo_log() -> Iterator[Callable[[], None]]:
    """Yields a function that takes back every eager assignment made since."""
    log: list[tuple[Variable, Any]] = []
    previous = global_state.get_global_attribute("phalanx_undo_log")
    global_state.set_global_attribute("phalanx_undo_log", log)

    def rollback() -> None:
        # In one call, in which no signal handler runs.
        variables, values = zip(*reversed(log), strict=True) if log else ((), ())
        deque(map(setattr, variables, repeat(RAW_VALUE), values), maxlen=0)

    try:
        yield rollback
    finally:
        global_state.set_global_attribute("phalanx_undo_log", previous)
        if previous is not None:
            previous.extend(log)


@contextmanager
def transaction() -> Iterator[None]:
    """Takes back every eager assignment inside if an exception ends it, also one that a signal handler raises."""
    with undo_log() as rollback:
        try:
            yield
        except BaseException:
            rollback()
            raise


def is_undoable() -> bool:
    """Whether an `undo_log` is open and no scope of Keras is."""
    return global_state.get_global_attribute("phalanx_undo_log") is not None and active_scope() is None


_FEW = 1 << 20
"""So many zeros are on a device sooner by a copy than by a program that writes them, which has to be compiled."""


@extend(keras.initializers.Zeros, "__call__")
def _zeros(original: Callable[..., Any], self: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Compiles nothing: an optimizer's slots have many shapes."""
    if math.prod(shape) > _FEW:
        return original(self, shape, dtype)
    return jax.device_put(np.zeros(shape, jnp.dtype(keras.backend.standardize_dtype(dtype))))


def _set_trainable(variable: Variable, value: bool) -> None:
    changes.trainable += 1
    _trainable.fset(variable, value)


_trainable: Any = next(vars(c)["trainable"] for c in Variable.__mro__ if "trainable" in vars(c))

Variable.trainable = property(_trainable.fget, _set_trainable, doc=_trainable.__doc__)

_reading = threading.RLock()

_observers: list[Callable[[Variable], None]] = []


def on_read(observe: Callable[[Variable], None]) -> None:
    """Registers a function of a variable that is called when its stored array is given to whoever reads it."""
    _observers.append(observe)


def _read(variable: Variable) -> Any:
    stored = variable._value
    if stored is not None:
        value = _value.fget(variable)
        if value is stored:
            for observe in _observers:
                observe(variable)
        return value
    with _reading:
        is_lent = [fill(variable) for fill in _readers]
        try:
            return _value.fget(variable)
        finally:
            if any(is_lent):
                variable._value = None


_value: Any = next(vars(c)["value"] for c in Variable.__mro__ if "value" in vars(c))

Variable.value = property(_read, doc=_value.__doc__)

_makers: list[Callable[[Variable], None]] = []


def on_variable(hear: Callable[[Variable], None]) -> None:
    """Calls `hear(variable)` after every variable that is made."""
    _makers.append(hear)


def set_maker(variable: Variable, number: int) -> None:
    """Records the number of the strategy in whose scope a variable was made."""
    variable._phalanx_maker = number


def maker_of(variable: Variable) -> int | None:
    """Returns the number of the strategy in whose scope a variable was made; None outside all."""
    return vars(variable).get("_phalanx_maker")


_checkers: list[Callable[[Variable, Any], None]] = []


def on_index(check: Callable[[Variable, Any], None]) -> None:
    """Calls `check(variable, index)` before `variable[index]`."""
    _checkers.append(check)


@extend(Variable, "__getitem__")
def _getitem(original: Callable[..., Any], self: Variable, idx: Any) -> Any:
    for check in _checkers:
        check(self, idx)
    return original(self, idx)


@extend(Variable, "__init__")
def _init(original: Callable[..., Any], self: Variable, initializer: Any, *args: Any, **kwargs: Any) -> None:
    _make(original, self, initializer, *args, **kwargs)
    for hear in _makers:
        hear(self)


def _make(original: Callable[..., Any], self: Variable, initializer: Any, *args: Any, **kwargs: Any) -> None:
    # On the CPU JAX would share the array's memory with the user, who may change it.
    initializer = copied(initializer)
    # Keras refuses a concrete first value inside a scope. As a function of nothing it is as good as any initializer.
    if lift_scope() is None or callable(initializer) or isinstance(initializer, str):
        original(self, initializer, *args, **kwargs)
        return
    given = dict(zip(("shape", "dtype", "trainable"), args[:3], strict=False)) | kwargs
    value = np.asarray(initializer)
    given |= {
        "shape": value.shape,
        "dtype": given.get("dtype") or keras.backend.standardize_dtype(jnp.asarray(value).dtype),
    }
    original(self, lambda shape, dtype: keras.ops.convert_to_tensor(value, dtype=dtype), *args[3:], **given)


@extend(Variable, "assign")
def _assign(original: Callable[..., Any], self: Variable, value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic, int, float)) and layout_of(self) is not None:
        require_fits(value, f"{self.path}.assign")
    try:
        # Keras returns what it was given, which is not what the replicas' values were combined to.
        _require_numbers(self, value)
        result, scope = original(self, copied(value)), lift_scope()
    except (TypeError, ValueError, OverflowError, RuntimeError) as e:
        _explain_refusal(self, "assign", value, e)
        raise
    return result if scope is None else scope.get_current_value(self)


@extend(Variable, "assign_add")
def _assign_add(original: Callable[..., Any], self: Variable, value: Any) -> Any:
    # Keras turns it into an assign of the sum, which a sum over replicas would count once for each replica.
    return _add(original, self, value, "assign_add")


@extend(Variable, "assign_sub")
def _assign_sub(original: Callable[..., Any], self: Variable, value: Any) -> Any:
    return _add(original, self, value, "assign_sub")


def _add(original: Callable[..., Any], self: Variable, value: Any, method: str) -> Any:
    if isinstance(value, (int, float)) and layout_of(self) is not None:
        require_fits(value, f"{self.path}.{method}")
    scope = lift_scope()
    try:
        _require_numbers(self, value)
        return original(self, value) if scope is None else scope.add_delta(self, value, negative=method == "assign_sub")
    except (TypeError, ValueError, OverflowError, RuntimeError) as e:
        _explain_refusal(self, method, value, e)
        raise


def _require_numbers(variable: Variable, value: Any) -> None:
    """Raises for what JAX would take for other numbers: dates, and complex numbers for a real variable."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":
        raise TypeError("dates are not numbers.")
    if isinstance(value, complex) and not variable.dtype.startswith("complex"):
        raise TypeError(f"a complex number does not fit into {variable.dtype}.")


def _explain_refusal(variable: Variable, method: str, value: Any, error: Exception) -> None:
    """Raises what is wrong with a value that a variable of a strategy cannot take. Other variables raise what Keras does.

    Raises:
      VariableError: it is not an array of numbers of the variable's shape.
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
def _direct_assign(original: Callable[..., Any], self: Variable, value: Any) -> None:
    log = global_state.get_global_attribute("phalanx_undo_log")
    # During __init__ there is no value yet to go back to.
    if log is not None and "_value" in vars(self):
        log.append((self, self.value))
    original(self, value)
    for hear in _listeners:
        hear(self)
