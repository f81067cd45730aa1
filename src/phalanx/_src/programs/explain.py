# SPDX-License-Identifier: Apache-2.0
"""Explains errors that JAX, TensorFlow and flax raise while a function is traced."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CoroutineType, GeneratorType
from typing import Any

import jax
import jax.numpy as jnp
import keras

from phalanx._src import compat
from phalanx._src.mesh.arrays import of_another_trace
from phalanx._src.mesh.values import AS_ARRAY
from phalanx._src.tracing.discovery import DiscoveryMismatch
from phalanx._src.tracing.policy import describe
from phalanx.errors import CallError, ContextError, PhalanxError, TraceError, frames
from phalanx.typing import PyTree

_TF_COUNTERPARTS = {
    "GradientTape": "phalanx.GradientTape",
    "Variable": "keras.Variable",
    "constant": "jnp.asarray",
    "convert_to_tensor": "jnp.asarray",
    "function": "phalanx.function",
    "cond": "phalanx.cond",
    "while_loop": "phalanx.while_loop",
    "print": "jax.debug.print",
    "nn.compute_average_loss": "phalanx.nn.compute_average_loss",
    "nn.scale_regularization_loss": "phalanx.nn.scale_regularization_loss",
    "reduce_mean": "keras.ops.mean",
    "reduce_sum": "keras.ops.sum",
    "reduce_max": "keras.ops.max",
    "reduce_min": "keras.ops.min",
    "reduce_prod": "keras.ops.prod",
    "reduce_any": "keras.ops.any",
    "reduce_all": "keras.ops.all",
    "concat": "keras.ops.concatenate",
    "range": "keras.ops.arange",
    "pow": "keras.ops.power",
}
_OF_OPTIMIZERS = {
    "minimize": "loss, gradients = phalanx.value_and_grad(loss_fn, variables)(), then optimizer.apply(gradients, variables)",
    "get_scaled_loss": "optimizer.scale_loss(loss)",
    "get_unscaled_gradients": "optimizer.apply_gradients(zip(gradients, variables)), which divides scaled gradients by the scale",
}
"""Methods that Keras 3 lacks, and what to write instead."""

_OF_TRACERS = re.compile(r"Tracer\(|Traced<|concrete values")
_OF_INPUTS = re.compile(r"Invalid input shape for|Data is expected to be in format")
"""In Keras errors about the inputs of a model, which name them."""
_CALL = re.compile(r"[A-Za-z_][\w.]*(?=\()")


@contextmanager
def explained(*, prints: bool = True) -> Iterator[None]:
    """Raises a TraceError instead of a library's own error if a function cannot be traced.

    Args:
      prints: whether the function may print while it runs, so that a hint may suggest it.

    Raises:
      TraceError: the function cannot be traced.
    """
    try:
        yield
    except DiscoveryMismatch as e:
        raise _another_variable(e.variable) from None
    except PhalanxError:
        raise
    except Exception as e:
        error = _explanation(e, prints=prints)
        if error is None:
            raise
        raise error from e


def _explanation(error: Exception, *, prints: bool) -> TraceError | None:
    """Returns the error to raise instead. None if `error` is clear enough."""
    at = _place_of(error)
    if _is_of_tensorflow(error):
        return _tensorflow(error)
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return TraceError(
            f"an array whose shape depends on the values of another (`x[mask]`) in a traced function{at}",
            "all shapes in a compiled program are static: they follow from the shapes of its arguments.",
            "jnp.where(mask, x, 0), or jnp.nonzero(mask, size=...)",
        )
    if isinstance(error, ValueError) and "sorting pytree dictionary keys" in str(error):
        return TraceError(
            f"a dict whose keys have no order in a traced function{at}",
            "JAX sorts the keys, and cannot compare these.",
            "keys of one type, such as texts",
        )
    # `device_put` has its own error for such a value.
    if isinstance(error, jax.errors.UnexpectedTracerError) or "JaxprTracer'> is not a valid JAX type" in str(error):
        return of_another_trace(at)
    if isinstance(
        error,
        (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ),
    ) or "Tracer.__format__" in str(error):
        return TraceError(
            f"the value of an array (by `if`, `float`, `int`, `range` or NumPy) in a traced function{at}",
            "the array has no value yet, because the function is traced once and compiled. Numbers among its arguments are "
            "traced too.",
            "jnp.where(condition, a, b) or phalanx.cond for `if`; phalanx.scan or strategy.run_steps for a loop; return the value to read it outside the step"
            + ("; jax.debug.print to print it" if prints else ""),
        )
    if isinstance(error, ValueError) and "__jax_array__() during abstractification" in str(error):
        return TraceError(
            f"a variable, or a value of `merge_call`, that is passed to a JAX function in a traced function{at}",
            "most JAX functions take arrays only.",
            "variable.value instead of the variable; or a function of keras.ops",
        )
    if isinstance(error, AttributeError) and error.name == "numpy" and isinstance(error.obj, jax.core.Tracer):
        return TraceError(
            f"the value of an array (by `.numpy()`) in a traced function{at}",
            "the array has no value yet, because the function is traced once and compiled.",
            "return the array from the step, and call float(x) or np.asarray(x) outside",
        )
    if isinstance(error, AttributeError) and error.name in _OF_OPTIMIZERS and isinstance(error.obj, keras.Optimizer):
        return TraceError(
            f"{type(error.obj).__name__}.{error.name} in a traced function{at}",
            "optimizers of Keras 3 have no such method.",
            _OF_OPTIMIZERS[error.name],
        )
    if isinstance(error, ValueError) and "is not supported by dot_general on CPU" in str(error):
        return TraceError(
            f"a product of float16 arrays, such as attention, in a program for CPUs{at}",
            "XLA has no such product for CPUs.",
            'dtype="bfloat16", or keras.mixed_precision.set_global_policy("mixed_bfloat16")',
        )
    # JAX raises plain Python errors for these, and only the text names the tracer. Keras adds the arguments of a layer.
    text = str(error).partition("Arguments received by")[0]
    if (
        isinstance(error, (TypeError, IndexError, ValueError))
        and _OF_TRACERS.search(text)
        and not _OF_INPUTS.search(text)
    ):
        return TraceError(
            f"a shape, or the bound of a slice, that depends on the values of an array in a traced function{at}",
            "all shapes in a compiled program are static: they follow from the shapes of its arguments.",
            "jnp.where(jnp.arange(size) < n, x, 0) instead of x[:n]; jax.lax.dynamic_slice_in_dim(x, start, size)",
        )
    if type(error).__module__.startswith("flax.") and "trace level" in str(error):
        return TraceError(
            f"a flax module that the function closes over{at}",
            "a traced function must take the state of the module as an argument, and return it.",
            "graphdef, state = nnx.split(model); pass state in args, nnx.merge(graphdef, state) in the step, and return nnx.state(model)",
        )
    return None


def fixed_batch_size(error: Exception) -> TraceError:
    """Returns the error for a function that takes the rows of all replicas, and not those of one.

    Args:
      error: what it raises for the rows of one.
    """
    place = frames.place_of(error)
    what = f"`{place.expression}`" if place else "an operation"
    return TraceError(
        f"{what} in a replica function{_bracketed(place)}",
        "it takes the rows of the global batch, and a replica has only its own.",
        f"write -1, or keras.ops.shape(x)[0], instead of the size of the global batch in {what}",
    )


def array_of_another_mesh(error: Exception) -> TraceError:
    """Returns the error for a function that reads an array of a mesh of `jax.make_mesh`, which is not among its arguments."""
    place = frames.place_of(error)
    return TraceError(
        f"an array of another mesh in a replica function{_bracketed(place)}",
        "jax.make_mesh makes the mesh a part of the type of its arrays, and replicas have another mesh.",
        "pass the array in args of strategy.run; or jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,))",
    )


def set_mesh(axes: tuple[str, ...]) -> ContextError:
    """Returns the error for a call of replicas while `jax.set_mesh` sets a mesh with these axes."""
    return ContextError(
        "strategy.run, or what calls it, with jax.set_mesh",
        f"replicas run on the mesh of their strategy, and JAX takes no other one than that of the axes {', '.join(axes)}.",
        "call it outside of `with jax.set_mesh(mesh):`",
    )


def _another_variable(variable: compat.Variable) -> TraceError:
    """Returns the error for a function that creates or uses another variable each time it is traced."""
    hint = "create variables outside the function, or only once: `if self.v is None: self.v = keras.Variable(...)`"
    # The path of a variable that a metric, layer or optimizer creates begins with the name of its owner.
    if "/" in variable.path:
        hint = (
            "create the metric, layer or optimizer outside the step, in strategy.scope(), and call "
            "metric.update_state(y, y_pred), layer(x) or optimizer.apply(gradients) in the step"
        )
    return TraceError(
        f"{describe(variable)} in a traced function{_bracketed(compat.place_of_creation(variable))}",
        "the function creates or uses another variable each time it is traced.",
        hint,
    )


def _place_of(error: BaseException) -> str:
    """Returns the user's line that raised an error, in brackets. Empty if there is no such line."""
    return _bracketed(frames.place_of(error))


def _bracketed(place: frames.Place | None) -> str:
    """Returns a line of code in brackets. Empty if there is none."""
    return f" ({place}: `{place.text}`)" if place else ""


def _is_of_tensorflow(error: Exception) -> bool:
    """Returns whether TensorFlow raised an error, or an error is about a tensor of TensorFlow."""
    return frames.is_raised_in("tensorflow", error) or "EagerTensor" in str(error)


def _tensorflow(error: Exception) -> TraceError:
    place = frames.place_of(error)
    match = _CALL.search(place.expression) if place else None
    name = match.group().partition(".")[2] if match else ""
    called = f"{match.group()}(...)" if match else "a TensorFlow call"
    return TraceError(
        f"{called} in a traced function{_place_of(error)}",
        "TensorFlow's operations cannot take the JAX arrays that are traced.",
        _counterpart(name, place.text if place else ""),
    )


def _counterpart(name: str, line: str) -> str:
    """Returns the replacement of a TensorFlow name."""
    last = name.rpartition(".")[2]
    # `tape.gradient(...)` begins with the name of a variable of the user, and not with that of TensorFlow.
    if name in ("gradient", "watch", "jacobian") or "GradientTape" in line:
        return "with phalanx.GradientTape() as tape:"
    if name in _TF_COUNTERPARTS:
        return f"{_TF_COUNTERPARTS[name]}(...)"
    if name.partition(".")[0] == "random" and hasattr(keras.random, last):
        return f"keras.random.{last}(...)"
    if last and hasattr(keras.ops, last):
        return f"keras.ops.{last}(...)"
    if last and hasattr(jnp, last):
        return f"jnp.{last}(...)"
    return "the same function of keras.ops or jax.numpy. Use tf.data and tf.io outside the step"


def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
    """Calls the function that was passed to `Strategy.run`.

    Raises:
      CallError: the function does not take these arguments, or its body does not run when it is called.
      ContextError: the function closes over a PerReplica.
    """
    try:
        result = fn(*args, **kwargs)
    except ContextError as e:
        if not e.asked.startswith(AS_ARRAY):
            raise
        raise ContextError(
            f"a PerReplica that a replica function closes over{_place_of(e)}",
            "a replica gets its own component only of values that are passed as arguments.",
            f"strategy.run({getattr(fn, '__name__', 'step')}, args=(value,))",
        ) from None
    except TypeError as e:
        # If the function was entered, the user's code made a wrong call itself.
        if "argument" not in str(e) or not frames.is_raised_by_phalanx(e) or frames.place_of(e) is not None:
            raise
        name = getattr(fn, "__name__", repr(fn))
        raise CallError(
            f"strategy.run({name}, args=...) with {len(args)} positional argument{'s' * (len(args) != 1)}",
            f"{e}. Each element of args is one argument, and a batch may be a tuple or a list itself.",
            f"strategy.run({name}, args={_arguments_of(fn, args)})",
        ) from None
    if isinstance(result, (GeneratorType, CoroutineType)):
        refuse_without_body(fn, result)
    return result


def refuse_without_body(fn: Callable[..., Any], *results: PyTree) -> None:
    """Rejects a function with `yield` and one with `async`, whose call runs nothing of its body.

    Args:
      fn: any function.
      results: the result of its call, which is closed.

    Raises:
      CallError: `fn` is one of them.
    """
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        for result in results:
            result.close()  # Python warns of a coroutine that nobody awaits.
        name = getattr(fn, "__name__", repr(fn))
        raise CallError(
            f"the step {name}",
            "it has `yield` or `async`, so that a call runs nothing of its body.",
            f"def {name}(...) that returns its result",
        )


def _arguments_of(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Returns a hint for `args`, after a call with the wrong number of arguments."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return "(batch,)"
    # A batch (x, y) in `args=(batch,)`, for a step that takes x and y.
    if len(args) == 1 and isinstance(args[0], (tuple, list)) and len(args[0]) == len(names) > 1:
        return "batch"
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
