# SPDX-License-Identifier: Apache-2.0
"""`phalanx.function`: a step that is compiled whole."""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from phalanx.errors import InvalidArgumentError, shown
from phalanx.errors.frames import boundary, hide
from phalanx.programs.input_signature import Signature
from phalanx.programs.program import Programs
from phalanx.tracing.scope import innermost
from phalanx.typing import PyTree

F = TypeVar("F", bound=Callable[..., Any])


class Function:
    """A step that is compiled whole. `phalanx.function` makes it."""

    def __init__(self, fn: Callable[..., Any], input_signature: PyTree = None) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._signature = None if input_signature is None else Signature(fn, input_signature)
        self._programs = Programs()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the step."""
        # What `boundary` does, less the call: this runs at every step.
        try:
            if innermost() is not None:
                return self._fn(*args, **kwargs)
            if self._signature is not None:
                args, kwargs = self._signature.bind(args, kwargs), {}
            return self._programs.call(self._fn, self._fn, args, kwargs)
        except Exception as e:
            hide(e)
            raise

    @boundary
    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Returns the program for these arguments without running it, for its text, its cost and its memory.

        Source: the method of `jax.jit`.

        Example:
          >>> import phalanx
          >>> step = phalanx.function(lambda x: x * 2)
          >>> step.lower(1.0).compile().cost_analysis()["flops"]
          1.0
        """
        return self._programs.lower(self._fn, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def function(
    fn: F | None = None,
    input_signature: PyTree = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    **others: Any,
) -> F:
    """Compiles a step that calls `Strategy.run`, `reduce` and `gather`, or reads and assigns variables, into one program.

    The first call traces `fn`; later calls with arguments of the same shapes and types run the compiled program. Arrays and
    numbers are inputs of the program; strings, bools, None and other Python objects select it. `next` of a distributed iterator,
    among the arguments or in a closure, takes a batch at each call. Inside another traced function it is an ordinary call. May be
    called in cross-replica context, and inside a replica function.

    Args:
      fn: the step. Its Python side effects happen while it is traced only.
      input_signature: one `jax.ShapeDtypeStruct` or `tf.TensorSpec` per argument, or a pytree of them: other arguments are
        refused.
      autograph: has no meaning here: Python's `if` and `for` are never converted.
      jit_compile: None or True: every function is compiled.
      reduce_retracing: has no meaning here: numbers are inputs anyway, and shapes select the program.
      **others: other options of tf.function, which are refused.

    Returns:
      A callable like `fn`.

    Raises:
      InvalidArgumentError: an option that cannot be honoured.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     total = keras.Variable(0.0, aggregation="sum")
      >>> @phalanx.function
      ... def step(x):
      ...     strategy.run(lambda: total.assign_add(x))
      ...     return total.value
      >>> float(step(2.0))
      4.0
    """
    if others:
        name, value = next(iter(others.items()))
        raise InvalidArgumentError(
            f"phalanx.function({name}={shown(value)})",
            "the options are input_signature, autograph, jit_compile and reduce_retracing.",
            f"leave {name} out",
        )
    if jit_compile is not None and jit_compile is not True:
        raise InvalidArgumentError(
            f"phalanx.function(jit_compile={shown(jit_compile)})",
            "every function is compiled, by XLA.",
            "leave jit_compile out; strategy.run(step, options=phalanx.RunOptions(eager=True)) to look into a step",
        )
    for name, value in (("autograph", autograph), ("reduce_retracing", reduce_retracing)):
        if not isinstance(value, bool):
            raise InvalidArgumentError(
                f"phalanx.function({name}={shown(value)})", "must be a bool.", f"leave {name} out"
            )
    if fn is None:
        return functools.partial(function, input_signature=input_signature)  # type: ignore[return-value]
    if not callable(fn):
        raise InvalidArgumentError(
            f"phalanx.function({shown(fn)})", "is not callable.", "@phalanx.function above the step"
        )
    return Function(fn, input_signature)  # type: ignore[return-value]
