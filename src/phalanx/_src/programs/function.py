# SPDX-License-Identifier: Apache-2.0
"""`phalanx.function`, which compiles a whole step into one program."""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from phalanx._src.programs.explain import refuse_without_body
from phalanx._src.programs.input_signature import Signature
from phalanx._src.programs.program import Programs
from phalanx._src.runtime.observers import observers
from phalanx._src.tracing.scope import innermost
from phalanx.errors import InvalidArgumentError, shown
from phalanx.errors.frames import boundary, hide
from phalanx.typing import PyTree

F = TypeVar("F", bound=Callable[..., Any])


class Function:
    """A step that is compiled into one program. `phalanx.function` creates it."""

    def __init__(self, fn: Callable[..., Any], input_signature: PyTree = None) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._signature = None if input_signature is None else Signature(fn, input_signature)
        self._programs = Programs()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the step."""
        # The same as `boundary`, without its extra Python call, because this runs at every step.
        try:
            if innermost() is not None:
                return self._fn(*args, **kwargs)
            for observer in observers.of_steps:
                observer.before_step((args, kwargs))
            if self._signature is not None:
                args, kwargs = self._signature.bind(args, kwargs), {}
            return self._programs.call(self._fn, self._fn, args, kwargs)
        except Exception as e:
            hide(e)
            raise

    @boundary
    def prepare(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Traces the step for these arguments without running it. The next call with such arguments only runs it.

        Variables that the step creates exist after this call, so that a checkpoint can be restored before the first step.

        Example:
          >>> import phalanx
          >>> step = phalanx.function(lambda x: x * 2)
          >>> step.prepare(1.0)
          >>> float(step(3.0))
          6.0
        """
        if self._signature is not None:
            args, kwargs = self._signature.bind(args, kwargs), {}
        self._programs.call(self._fn, self._fn, args, kwargs, runs=False)

    @boundary
    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Returns the program for these arguments without running it, to inspect its text, cost and memory.

        Source: the method of the same name of `jax.jit`.

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
    numbers are inputs of the program; strings, bools, None and other Python objects select the program. If `fn` calls `next` on a
    distributed iterator, each call takes another batch. Inside another traced function, a call of the result is an ordinary
    call. May be called in any context, and so may the result.

    Args:
      fn: the step. Its Python side effects happen only while it is traced.
      input_signature: one `jax.ShapeDtypeStruct`, `keras.KerasTensor` or `tf.TensorSpec` per argument, or a pytree of them. Other arguments are
        refused.
      autograph: accepted and ignored, because Python's `if` and `for` are never converted.
      jit_compile: accepted and ignored, because every function is compiled.
      reduce_retracing: accepted and ignored, because numbers are inputs in any case, and shapes select the program.
      **others: other options of tf.function, which are refused.

    Returns:
      A callable like `fn`.

    Raises:
      InvalidArgumentError: `fn` is not callable, or an option cannot be honoured.

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
    ignored = {"autograph": autograph, "jit_compile": jit_compile, "reduce_retracing": reduce_retracing}
    for name, value in ignored.items():
        if not isinstance(value, bool) and not (name == "jit_compile" and value is None):
            raise InvalidArgumentError(
                f"phalanx.function({name}={shown(value)})", "must be a bool.", f"leave {name} out"
            )
    if fn is None:
        return functools.partial(function, input_signature=input_signature)  # type: ignore[return-value]
    if not callable(fn):
        raise InvalidArgumentError(
            f"phalanx.function({shown(fn)})", "is not callable.", "@phalanx.function above the step"
        )
    refuse_without_body(fn)
    return Function(fn, input_signature)  # type: ignore[return-value]
