# SPDX-License-Identifier: Apache-2.0
"""`phalanx.Variable`, which creates Keras variables from the arguments of `tf.Variable`."""

import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from phalanx._src.compat.hooks import extend
from phalanx._src.mesh.arrays import as_number
from phalanx._src.options import VariableAggregation, VariableSynchronization
from phalanx.errors import CallError, InvalidArgumentError, VariableError, arguments, shown

E = TypeVar("E", VariableAggregation, VariableSynchronization)


class _KerasVariables(type):
    """Makes every Keras variable an instance of `phalanx.Variable`, as `isinstance` checks in TensorFlow code expect."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, keras.Variable)


@final
class Variable(metaclass=_KerasVariables):
    """Creates a `keras.Variable` from the arguments of `tf.Variable`. May be called in any context except `jax.lax` bodies.

    Args:
      initial_value: array or number, or a function without parameters that returns one.
      trainable: whether optimizers and tapes use the variable by default. None means False for on-read variables, else True.
      validate_shape: must be True.
      caching_device: must be None.
      name: name of the variable, without a slash.
      variable_def: must be None.
      dtype: dtype of the variable. None means the dtype of the value.
      import_scope: must be None.
      constraint: function of the value. Optimizers apply it after each update.
      synchronization: `VariableSynchronization` or its name. When the values of the replicas are combined.
      aggregation: `VariableAggregation` or its name. How the values of the replicas are combined.
      shape: None, or the shape of the value.
      experimental_enable_variable_lifting: must be True.

    Returns:
      A `keras.Variable`. `isinstance(v, phalanx.Variable)` is True for every Keras variable.

    Raises:
      InvalidArgumentError: an argument has the wrong type, Phalanx does not support its value, or the initial value is not an
        array of numbers.
      VariableError: the initial value is computed in the step that is being traced.

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
        synchronization = _member(VariableSynchronization, "synchronization", synchronization)
        aggregation = _member(VariableAggregation, "aggregation", aggregation)
        if name is not None and (not isinstance(name, str) or "/" in name):
            raise InvalidArgumentError(f"name={shown(name)}", "must be a string without a slash.", 'name="weights"')
        if constraint is not None:
            arguments.function("constraint", constraint, "constraint=keras.constraints.NonNeg()")
        if trainable is None:
            trainable = synchronization is not VariableSynchronization.ON_READ
        # In a step that is being traced, an initializer must still compute a real array, not a tracer of the step.
        with jax.ensure_compile_time_eval():
            value = _value_of(initial_value, shape)
        checked_dtype = _dtype_of(value.dtype if dtype is None else dtype)
        variable = keras.Variable(
            value,
            dtype=None if dtype is None else checked_dtype,
            trainable=arguments.flag("trainable", trainable),
            name=name,
            synchronization=synchronization.value,
            aggregation=aggregation.value,
        )
        variable.constraint = constraint
        return variable


def _refuse(name: str, value: object, allowed: object) -> None:
    """Rejects any value but `allowed` of a parameter that exists only for compatibility with `tf.Variable`."""
    # By identity, because `1 == True` in Python.
    if value is not allowed:
        raise InvalidArgumentError(f"{name}={shown(value)}", "has no meaning in Phalanx.", f"leave {name} out")


def _member(kind: type[E], name: str, value: object) -> E:
    """Returns the enum member for a value: a member of `kind`, its name, or the member of TensorFlow's enum with its name."""
    text = value if isinstance(value, str) else value.name if isinstance(value, enum.Enum) else None
    if text is None or text.upper() not in kind.__members__:
        raise InvalidArgumentError(
            f"{name}={shown(value)}",
            f"must be one of {', '.join(kind.__members__)}.",
            f"{name}=phalanx.{kind.__name__}.{'SUM' if kind is VariableAggregation else 'AUTO'}",
        )
    return kind[text.upper()]


def _dtype_of(dtype: Any) -> str | None:
    """Returns Keras's name of a dtype, or None for None."""
    try:
        return None if dtype is None else keras.backend.standardize_dtype(dtype)
    except Exception as e:
        words = "is not a numeric dtype of Keras."
        raise InvalidArgumentError(f"dtype={shown(dtype)}", words, 'dtype="float32"') from e


def _value_of(initial_value: Any, shape: Any) -> Any:
    """Returns the initial value as a NumPy array, after checking it."""
    hint = "phalanx.Variable(jnp.zeros((2, 3)))"
    if initial_value is None:
        raise InvalidArgumentError(
            "phalanx.Variable was called without initial_value", "a variable needs an initial value.", hint
        )
    argument = f"initial_value={shown(initial_value)}"
    if callable(initial_value):
        _require_no_arguments(argument, initial_value)
        initial_value = initial_value()
    if isinstance(initial_value, jax.core.Tracer):
        raise VariableError(
            argument,
            "it is computed in the step that is being traced, but the variable must have a value before the step runs.",
            "create the variable outside the step, or pass a function: phalanx.Variable(lambda: jnp.zeros((2, 3)))",
        )
    try:
        if isinstance(initial_value, (np.ndarray, np.generic, int, float)):
            as_number(initial_value, "initial_value")
        # `jnp.array` copies, so that later writes into the user's NumPy array do not change the variable.
        value = np.asarray(jnp.array(initial_value))
    except Exception as e:
        if isinstance(e, (InvalidArgumentError, VariableError)):
            raise
        raise InvalidArgumentError(argument, "is not an array of numbers.", hint) from e
    if shape is not None and (not isinstance(shape, (tuple, list)) or tuple(shape) != value.shape):
        raise InvalidArgumentError(
            f"shape={shown(shape)}",
            f"the initial value has the shape {value.shape}, and a variable cannot change its shape.",
            "leave shape out",
        )
    return value


def _require_no_arguments(argument: str, fn: Callable[..., Any]) -> None:
    """Raises if `fn` cannot be called without arguments."""
    try:
        inspect.signature(fn).bind()
    except TypeError as e:
        raise CallError(
            argument, f"it must be callable without arguments: {e}.", "phalanx.Variable(lambda: jnp.zeros((2, 3)))"
        ) from e
    except ValueError:  # Some functions that are written in C have no signature.
        return


def _assign(
    original: Callable[..., jax.Array],
    self: keras.Variable,
    value: ArrayLike,
    use_locking: bool = False,
    name: str | None = None,
    read_value: bool = True,
) -> jax.Array | None:
    """Takes the arguments of `tf.Variable`. An assignment needs neither a lock nor a name."""
    result = original(self, value)
    return result if read_value else None


for _method in ("assign", "assign_add", "assign_sub"):
    extend(keras.Variable, _method)(_assign)
