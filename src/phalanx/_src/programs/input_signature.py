# SPDX-License-Identifier: Apache-2.0
"""The `input_signature` of a `phalanx.function`, which its arguments must match."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from phalanx._src.mesh.arrays import as_array, flattened, is_array
from phalanx._src.mesh.values import flatten, is_distributed, spec_of
from phalanx.errors import CallError, InvalidArgumentError, shown
from phalanx.typing import PyTree

_RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
"""Kinds of dtypes. A kind can hold the numbers of kinds with a lower rank."""


class Signature:
    """Shapes and dtypes of the positional arguments of a function.

    Args:
      fn: the function.
      specs: one pytree per argument, of objects with a shape and a dtype: `keras.KerasTensor`, `jax.ShapeDtypeStruct`, `tf.TensorSpec`. A dim that
        is None accepts any size, and a shape that is None accepts any shape.

    Raises:
      InvalidArgumentError: `specs` is not such a sequence, or has more items than the function has arguments.
    """

    def __init__(self, fn: Callable[..., Any], specs: Any) -> None:
        if not isinstance(specs, (list, tuple)) or not all(map(_is_spec, flattened(specs, _is_spec)[0])):
            raise InvalidArgumentError(
                f"input_signature={shown(specs, 80)}",
                "must be a list with one spec per argument, or a pytree of specs.",
                'input_signature=[keras.KerasTensor((None, 3), "float32")]',
            )
        self._name = getattr(fn, "__name__", repr(fn))
        self._parameters = inspect.signature(fn)
        names = list(self._parameters.parameters)
        # A decorator in the body of a class gets the function before it is bound to an object.
        self._first = int(names[:1] == ["self"])
        self._specs = list(specs)
        if len(names) - self._first < len(specs):
            raise InvalidArgumentError(
                f"input_signature of {len(specs)} arguments",
                f"{self._name} takes {len(names) - self._first}.",
                "one spec per argument",
            )

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the positional arguments of a call: numbers as arrays of the dtypes of their specs, variables as their values.

        Raises:
          CallError: the function does not take these arguments.
          InvalidArgumentError: an argument does not match its spec.
        """
        try:
            bound = self._parameters.bind(*args, **kwargs)
        except TypeError as e:
            raise CallError(
                f"{self._name}(...)", f"{e}.", f"call {self._name} with the arguments in its input_signature"
            ) from None
        # A spec may belong to an argument that the call leaves to its default.
        bound.apply_defaults()
        arguments = list(bound.args)
        for i, spec in enumerate(self._specs):
            arguments[self._first + i] = self._checked(i, spec, arguments[self._first + i])
        return tuple(arguments)

    def _checked(self, number: int, spec: Any, value: Any) -> PyTree:
        tree: PyTree
        structure: Any
        specs, tree = jax.tree.flatten(spec, is_leaf=_is_spec)
        leaves, structure = flatten(value)
        if structure != tree:
            raise self._refusal(number, f"its structure is {structure}, but input_signature has {tree}")
        return tree.unflatten([self._leaf(number, s, x) for s, x in zip(specs, leaves, strict=True)])

    def _leaf(self, number: int, spec: Any, value: Any) -> Any:
        # A `tf.TensorSpec` has a dtype of TensorFlow.
        dtype = _canonical(getattr(spec.dtype, "as_numpy_dtype", spec.dtype))
        shape = _dims(spec.shape)
        if isinstance(value, (bool, int, float, complex)):
            value = _number(value, dtype)
        if isinstance(value, keras.Variable):
            value = value.value
        array = value if is_distributed(value) else as_array(value)
        if not (is_distributed(array) or is_array(array)):
            raise self._refusal(number, f"it is {shown(value)}, but input_signature has an array")
        array_spec = spec_of(array)
        dims = array_spec.shape
        fits = shape is None or (
            len(dims) == len(shape) and all(s in (None, d) for s, d in zip(shape, dims, strict=True))
        )
        if not fits or _canonical(array_spec.dtype) != dtype:
            expected = f"{dtype}{'[...]' if shape is None else list(shape)}"
            raise self._refusal(number, f"it is {array_spec.dtype}{list(dims)}, but input_signature has {expected}")
        return array

    def _refusal(self, number: int, problem: str) -> InvalidArgumentError:
        name = list(self._parameters.parameters)[self._first + number]
        return InvalidArgumentError(
            f"{self._name}({name}=...)",
            f"{problem}.",
            "pass an argument of that shape and dtype, or omit input_signature",
        )


def _is_spec(leaf: object) -> bool:
    # Modules such as NumPy have both names.
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not inspect.ismodule(leaf)


def _number(value: Any, dtype: Any) -> np.ndarray:
    """Returns a Python number as an array of `dtype`, or of NumPy's own dtype if `dtype` cannot hold the number."""
    array = np.asarray(value)
    # NumPy's kind of bfloat16 and of the float8 types is V, which has the rank of floats here.
    if not jnp.issubdtype(dtype, jnp.number) or _RANKS[array.dtype.kind] > _RANKS.get(dtype.kind, 2):
        return array
    if array.dtype.kind == "i" and jnp.issubdtype(dtype, jnp.integer) and array != array.astype(dtype):
        return array
    return array.astype(dtype)


def _canonical(dtype: Any) -> Any:
    """Returns a dtype as JAX has it: with 32 bits instead of 64, unless `jax_enable_x64` is set."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind in "OSU":
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _dims(shape: Any) -> tuple[int | None, ...] | None:
    """Returns the dims of a shape. None for a shape of unknown rank, as `tf.TensorSpec` may have."""
    return None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape)
