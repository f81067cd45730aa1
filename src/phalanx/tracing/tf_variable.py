# SPDX-License-Identifier: Apache-2.0
"""`phalanx.Variable`: Keras's variables, made with the arguments of tf.Variable."""

import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx.errors import InvalidArgumentError, VariableError, arguments, shown
from phalanx.mesh.arrays import require_fits
from phalanx.options import VariableAggregation, VariableSynchronization

E = TypeVar("E", VariableAggregation, VariableSynchronization)


class _KerasVariables(type):
    """Every variable of Keras is an instance, as there is no other kind."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, keras.Variable)


@final
class Variable(metaclass=_KerasVariables):
    """Makes a `keras.Variable` from the arguments of `tf.Variable`. May be called in any context but a `lax` body.

    Args:
      initial_value: an array, a number, or a function of no arguments that returns one.
      trainable: whether optimizers and tapes take it by default; None means True, for on-read variables False.
      validate_shape: must be True.
      caching_device: must be None.
      name: its name, without a slash.
      variable_def: must be None.
      dtype: its dtype; None is that of the value.
      import_scope: must be None.
      constraint: a function of the value, which optimizers apply after an update.
      synchronization: when replicas' values become one: a `VariableSynchronization`, or its name.
      aggregation: how they do: a `VariableAggregation`, or its name.
      shape: None, or the shape of the value.
      experimental_enable_variable_lifting: must be True.

    Returns:
      A `keras.Variable`; `isinstance(v, phalanx.Variable)` is True of all of them.

    Raises:
      InvalidArgumentError: an argument that has no meaning here, or a value that is not an array of numbers.
      VariableError: a value that is computed in the step that is being traced.

    Source: tf.Variable.

    Example:
      >>> import phalanx
      >>> v = phalanx.Variable(initial_value=[1.0, 2.0], name="v", aggregation=phalanx.VariableAggregation.SUM)
      >>> v.shape, v.aggregation
      ((2,), 'sum')
    """

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: None = None,
        name: str | None = None,
        variable_def: None = None,
        dtype: Any = None,
        import_scope: None = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
        experimental_enable_variable_lifting: bool = True,
    ) -> keras.Variable:
        _refuse("validate_shape", validate_shape, True)
        _refuse("experimental_enable_variable_lifting", experimental_enable_variable_lifting, True)
        _refuse("caching_device", caching_device, None)
        _refuse("variable_def", variable_def, None)
        _refuse("import_scope", import_scope, None)
        when = _member(VariableSynchronization, "synchronization", synchronization)
        how = _member(VariableAggregation, "aggregation", aggregation)
        if name is not None and (not isinstance(name, str) or "/" in name):
            raise InvalidArgumentError(f"name={shown(name)}", "must be a string without a slash.", 'name="weights"')
        if constraint is not None:
            arguments.function("constraint", constraint, "constraint=keras.constraints.NonNeg()")
        if trainable is None:
            trainable = when is not VariableSynchronization.ON_READ
        # Also in a step that is being traced the value is one.
        with jax.ensure_compile_time_eval():
            value = _value_of(initial_value, shape)
        variable = keras.Variable(
            value,
            dtype=_dtype_of(dtype),
            trainable=arguments.flag("trainable", trainable),
            name=name,
            synchronization=when.value,
            aggregation=how.value,
        )
        variable.constraint = constraint
        return variable


def _refuse(name: str, value: object, allowed: object) -> None:
    if value is not allowed:
        raise InvalidArgumentError(f"{name}={shown(value)}", "has no meaning here.", f"leave {name} out")


def _member(kind: type[E], name: str, value: object) -> E:
    """Returns the member that a value names: itself, a string, or the member of that name of TensorFlow's own enum."""
    text = value if isinstance(value, str) else value.name if isinstance(value, enum.Enum) else None
    if text is None or text.upper() not in kind.__members__:
        raise InvalidArgumentError(
            f"{name}={shown(value)}",
            f"must be one of {', '.join(kind.__members__)}.",
            f"{name}=phalanx.{kind.__name__}.{'SUM' if kind is VariableAggregation else 'AUTO'}",
        )
    return kind[text.upper()]


def _dtype_of(dtype: Any) -> str | None:
    try:
        return None if dtype is None else keras.backend.standardize_dtype(dtype)
    except Exception as e:
        raise InvalidArgumentError(f"dtype={shown(dtype)}", "is not a dtype of numbers.", 'dtype="float32"') from e


def _value_of(initial_value: Any, shape: Any) -> Any:
    hint = "phalanx.Variable(jnp.zeros((2, 3)))"
    if initial_value is None:
        raise InvalidArgumentError("phalanx.Variable()", "a variable needs an initial value.", hint)
    asked = f"initial_value={shown(initial_value)}"
    if callable(initial_value):
        _require_no_arguments(asked, initial_value)
        initial_value = initial_value()
    if isinstance(initial_value, jax.core.Tracer):
        raise VariableError(
            asked,
            "it is computed in the step that is being traced, and a variable is made before the step runs.",
            "make the variable outside the step, or pass a function: phalanx.Variable(lambda: jnp.zeros((2, 3)))",
        )
    if isinstance(initial_value, (np.ndarray, np.generic, int, float)):
        require_fits(initial_value, "initial_value")
    try:
        # A copy: what somebody writes into an array of NumPy later is not the variable's.
        value = jnp.array(initial_value)
    except Exception as e:
        if isinstance(e, (InvalidArgumentError, VariableError)):
            raise
        raise InvalidArgumentError(asked, "is not an array of numbers.", hint) from e
    if shape is not None and (not isinstance(shape, (tuple, list)) or tuple(shape) != value.shape):
        raise InvalidArgumentError(
            f"shape={shown(shape)}", f"the initial value has the shape {value.shape}, which is static.", "leave it out"
        )
    return np.asarray(value)


def _require_no_arguments(asked: str, fn: Callable[..., Any]) -> None:
    try:
        inspect.signature(fn).bind()
    except TypeError as e:
        raise InvalidArgumentError(
            asked, f"it is called without arguments: {e}.", "phalanx.Variable(lambda: jnp.zeros((2, 3)))"
        ) from e
    except ValueError:  # Of some that are written in C nothing is known.
        return
