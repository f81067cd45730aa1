# SPDX-License-Identifier: Apache-2.0
"""Every private name of Keras that Phalanx leans on, and every method of Keras that it extends.

`tests/unit/test_compat.py` has a test that names each. Nothing else in Phalanx touches Keras's internals.
"""

import functools
import inspect
import itertools
import math
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

from phalanx.errors import InputError, InvalidArgumentError, PhalanxError, StartupError, VariableError, shown


def _require_jax_backend() -> None:
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = "jax"
    import keras

    if keras.backend.backend() != "jax":
        raise StartupError(
            f"import phalanx with the Keras backend {keras.backend.backend()!r}",
            "Keras was imported before phalanx, and its backend cannot change afterwards.",
            'import phalanx before keras, or set KERAS_BACKEND="jax" in the environment',
        )


_require_jax_backend()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import Variable as Variable  # noqa: E402, PLC0414  (exported)
from keras.src import backend  # noqa: E402
from keras.src.backend.common import global_state  # noqa: E402
from keras.src.backend.jax.trainer import JAXTrainer as _JAXTrainer  # noqa: E402
from keras.src.random import seed_generator as _seed_generator  # noqa: E402
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList  # noqa: E402
from keras.src.trainers.data_adapters import array_slicing as _array_slicing  # noqa: E402
from keras.src.trainers.data_adapters import data_adapter_utils as _data_adapter_utils  # noqa: E402
from keras.src.trainers.data_adapters import get_data_adapter as _get_data_adapter  # noqa: E402
from keras.src.trainers.data_adapters.array_data_adapter import (  # noqa: E402
    ArrayDataAdapter as _ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.generator_data_adapter import (  # noqa: E402
    GeneratorDataAdapter as _GeneratorDataAdapter,
)
from keras.src.trainers.trainer import Trainer as _Trainer  # noqa: E402
from keras.src.utils.python_utils import is_default as _is_default  # noqa: E402
from keras.src.utils.python_utils import pythonify_logs as _pythonify_logs  # noqa: E402
from keras.src.utils.rng_utils import get_random_seed as _get_random_seed  # noqa: E402

from phalanx.mesh.arrays import copied, require_fits  # noqa: E402


class AbstractLiftScope(keras.StatelessScope):
    """The scope in which Keras variables are read and written while a program is traced.

    Keras calls `get_current_value` and `add_update`; the extended methods below call the rest.
    """

    def get_current_value(self, variable: Variable) -> Any:
        """Returns the value of `variable` inside the trace."""
        raise NotImplementedError

    def note_read(self) -> None:
        """Must be called before anything of the program is read that another program may have otherwise."""
        raise NotImplementedError

    def add_update(self, update: tuple[Variable, Any]) -> None:
        """Assigns `(variable, value)` inside the trace."""
        raise NotImplementedError

    def add_delta(self, variable: Variable, delta: Any, *, negative: bool = False) -> Any:
        """Adds `delta` to `variable` inside the trace, or subtracts it, and returns the new value."""
        raise NotImplementedError

    def fold_seed(self, seed: Any, state: Variable) -> Any:
        """Returns this replica's seed for the `seed` drawn from `state`."""
        raise NotImplementedError

    def note_averages(self, variables: Sequence[Variable]) -> None:
        """Hears that what is assigned to `variables` next are their moving averages."""
        raise NotImplementedError

    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        """Aggregates gradients over the replicas, then lets `apply` update the variables."""
        raise NotImplementedError

    def aggregated(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Returns gradients aggregated over the replicas, unless this is update context."""
        raise NotImplementedError

    def example_mask(self) -> Any:
        """Returns which rows of this replica's batch are real, or None for a batch without padding."""
        raise NotImplementedError

    @property
    def is_averaging(self) -> bool:
        """Whether this is a replica that computes means over its own rows, as Keras's trainer does.

        The replicas' means, weighted by their parts of the global batch, add up to the mean over the global batch.
        """
        raise NotImplementedError

    def reduce_rows(self, values: Any, counts: Any, reduction: str) -> Any:
        """Reduces weighted losses `(per_replica_batch, ...)`, each of which counts for `counts` in a mean."""
        raise NotImplementedError

    def weight_of_mean(self, weight: Any) -> Any:
        """Returns what a mean over this replica's rows counts, to which the user gives `weight`, or none."""
        raise NotImplementedError

    def check_loss(self, name: str, reduction: str) -> None:
        """Raises for a loss that is a mean, where there are several replicas."""
        raise NotImplementedError

    def moments(self, values: Any, counts: Any, axes: Sequence[int], *, everywhere: bool) -> tuple[Any, Any]:
        """Returns mean and variance over some dims of the values that count; `everywhere` over all replicas."""
        raise NotImplementedError

    def count_of_a_row(self) -> Any:
        """Returns what one real row counts where a replica's part of the batch counts one."""
        raise NotImplementedError

    def updating(self) -> AbstractContextManager[None]:
        """Opens the update context: gradients are aggregated already, and assignments are free."""
        raise NotImplementedError


def active_scope() -> keras.StatelessScope | None:
    """Returns the innermost `keras.StatelessScope` of this thread."""
    return global_state.get_global_attribute("stateless_scope")


def lift_scope() -> AbstractLiftScope | None:
    """Returns the innermost lifting scope, if it is the innermost scope."""
    scope = active_scope()
    return scope if isinstance(scope, AbstractLiftScope) else None


def _surrounding_scope() -> AbstractLiftScope | None:
    """Returns the innermost lifting scope, past the scopes in which Keras's stateless methods work."""
    scope = active_scope()
    while scope is not None and not isinstance(scope, AbstractLiftScope):
        scope = scope.original_scope
    return scope


def note_read() -> None:
    """Must be called before anything of a program is read that another program may have otherwise."""
    scope = _surrounding_scope()
    if scope is not None:
        scope.note_read()


def is_lifting() -> bool:
    """Whether a step is traced in this thread, inside the scopes of Keras's stateless methods too."""
    return _surrounding_scope() is not None


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
    arrays = raw_values(variables)
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


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the object that decides the learning rate: a variable, a schedule or a function."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    return inner._learning_rate


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int | None:
    """Returns over how many steps gradients are accumulated; None where each step is applied.

    A loss-scaling optimizer has to see at each step whether the gradients of all replicas are finite.
    """
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return None if is_scaling else optimizer.gradient_accumulation_steps


def accumulators(optimizer: keras.optimizers.Optimizer, variables: Any) -> list[Variable]:
    """Returns the variables that hold the accumulated gradients of `variables`; each replica gets its own sum."""
    build_optimizer(optimizer, variables)
    trained = optimizer._trainable_variables if variables is None else variables
    found = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in trained]
    for variable in found:
        variable._synchronization, variable._aggregation = "on_demand", "sum"
    return found


def is_last_accumulated(optimizer: keras.optimizers.Optimizer) -> Any:
    """Whether what is accumulated is applied at this step."""
    return (optimizer._iterations.value + 1) % optimizer.gradient_accumulation_steps == 0


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Makes an optimizer's own variables, if it has not got them yet."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(list(variables))


@contextmanager
def restricted(optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable]) -> Iterator[None]:
    """Lets an optimizer know of no other variables meanwhile, and of no other slots but those that are for all."""
    one = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    kept = set(map(id, variables))
    is_kept = [id(v) in kept for v in one._trainable_variables]
    parts = {
        "_trainable_variables": itertools.compress(one._trainable_variables, is_kept),
        "_variables": [s for s in one._variables if reference_of(s) is None or id(reference_of(s)) in kept],
    }
    if one.use_ema:
        parts["_model_variables_moving_average"] = itertools.compress(one._model_variables_moving_average, is_kept)
    own = vars(one).copy()
    # Past what Keras does where an attribute of an optimizer is set.
    vars(one).update({name: list(part) for name, part in parts.items()})
    try:
        yield
    finally:
        vars(one).update({name: own[name] for name in parts})


def clipped(optimizer: keras.optimizers.Optimizer, grads: Sequence[Any]) -> Sequence[Any]:
    """Returns gradients as an optimizer clips them; those it leaves as they are where it is applied to them."""
    scale = optimizer.loss_scale_factor or 1.0
    clip: Sequence[Any] = optimizer._clip_gradients([g / scale for g in grads])
    return [g * scale for g in clip]


def reference_of(slot: Variable) -> Variable | None:
    """Returns the variable for which an optimizer made `slot`; None where it is for all."""
    reference = vars(slot).get("_phalanx_reference")
    return None if reference is None else reference()


def make_table(make: Callable[[], Variable]) -> Variable:
    """Returns the variable that `make` makes, without a value: only its initializer, as `initializer_of` gives it."""
    with keras.StatelessScope(initialize_variables=False):
        variable = make()
    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    global_state.set_global_attribute("uninitialized_variables", [v for v in waiting if v is not variable])
    variable._phalanx_initializer, variable._initializer = variable._initializer, None
    return variable


def initializer_of(table: Variable) -> Any:
    """Returns what makes the rows of a table; None for other variables."""
    return vars(table).get("_phalanx_initializer")


def trained_by(optimizer: keras.optimizers.Optimizer, variables: Any) -> tuple[Variable, ...]:
    """Returns what `optimizer.apply(grads, variables)` updates: where None are given, those that it was built with."""
    return tuple(optimizer._trainable_variables if variables is None else variables)


def apply_stateless(optimizer: keras.optimizers.LossScaleOptimizer, grads: Sequence[Any], variables: Any) -> None:
    """Applies a loss-scaling optimizer, whose `apply` assigns inside a branch, through its stateless form."""
    build_optimizer(optimizer, variables)
    trained = trained_by(optimizer, variables)
    own = optimizer.variables
    new_trained, new_own = optimizer.stateless_apply([v.value for v in own], list(grads), [v.value for v in trained])
    for variable, value in zip([*trained, *own], [*new_trained, *new_own], strict=True):
        variable.assign(value)


ShardingOf = Callable[[str, Sequence[int]], jax.sharding.NamedSharding]
"""Where a variable of that path and shape lives."""


class _Layout(keras.distribution.DataParallel):
    """Gives new Keras variables their shardings."""

    def __init__(self, sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> None:
        super().__init__(devices=[f"{d.platform}:{d.id}" for d in mesh.devices.flat], auto_shard_dataset=False)
        self._sharding_of = sharding_of

    def get_variable_layout(self, variable: Variable) -> jax.sharding.NamedSharding:
        return self._sharding_of(layout_path(variable), variable.shape)


@contextmanager
def variable_layout(sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Lets variables that are made inside live in `sharding_of(path, shape)`, over a mesh."""
    with _Layout(sharding_of, mesh).scope():
        yield


def set_variable_layout(sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> None:
    """Lets variables that are made from here on live in `sharding_of(path, shape)`, over a mesh."""
    keras.distribution.set_distribution(_Layout(sharding_of, mesh))


def unset_variable_layout() -> None:
    """Lets variables that are made from here on live where Keras puts them."""
    keras.distribution.set_distribution(None)


def layout_path(variable: Variable) -> str:
    """Returns the path that decides where a variable lives: of an optimizer's slot that of the variable which it is for."""
    return vars(variable).get("_phalanx_follows", variable.path)  # type: ignore[no-any-return]


@contextmanager
def shapes(of: Sequence[tuple[Variable, tuple[int, ...]]]) -> Iterator[None]:
    """Lets variables have other shapes meanwhile, for a trace over some of their rows."""
    own = [v._shape for v, _ in of]
    for variable, shape in of:
        variable._shape = shape
    try:
        yield
    finally:
        for (variable, _), shape in zip(of, own, strict=True):
            variable._shape = shape


def layout_of(variable: Variable) -> Any:
    """Returns the sharding with which `variable` was made, if it was made in a scope."""
    return variable._layout


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


def _extend(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replaces method or function `name` of a class or module by `wrapper(original, ...)`, which gets all its arguments."""

    def install(wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        # Keras asks for the arguments by name, past what `wraps` does.
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        setattr(owner, name, method)

    return install


def extend_backend(name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a function of Keras's backend, for example "nn.sigmoid", by `wrapper(original, ...)`."""
    module, _, function = name.rpartition(".")
    _extend(getattr(backend, module) if module else backend, function)(wrapper)


to_tensor = backend.convert_to_tensor
"""Returns an array for what an operation of Keras takes as one."""

_FEW = 1 << 20
"""So many zeros are on a device sooner by a copy than by a program that writes them, which has to be compiled."""


@_extend(keras.initializers.Zeros, "__call__")
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


@_extend(Variable, "__getitem__")
def _getitem(original: Callable[..., Any], self: Variable, idx: Any) -> Any:
    for check in _checkers:
        check(self, idx)
    return original(self, idx)


@_extend(Variable, "__init__")
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


@_extend(Variable, "assign")
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


@_extend(Variable, "assign_add")
def _assign_add(original: Callable[..., Any], self: Variable, value: Any) -> Any:
    # Keras turns it into an assign of the sum, which a sum over replicas would count once for each replica.
    return _add(original, self, value, "assign_add")


@_extend(Variable, "assign_sub")
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


@_extend(Variable, "_direct_assign")
def _direct_assign(original: Callable[..., Any], self: Variable, value: Any) -> None:
    log = global_state.get_global_attribute("phalanx_undo_log")
    # During __init__ there is no value yet to go back to.
    if log is not None and "_value" in vars(self):
        log.append((self, self.value))
    original(self, value)
    for hear in _listeners:
        hear(self)


@_extend(keras.StatelessScope, "get_current_value")
def _get_current_value(original: Callable[..., Any], self: keras.StatelessScope, variable: Variable) -> Any:
    # A user's `layer.stateless_call` inside a replica function opens a plain scope in ours: what it does not map must
    # come from ours, or it would become a constant of the program.
    value = original(self, variable)
    outer = self.original_scope
    return outer.get_current_value(variable) if value is None and outer is not None else value


@_extend(keras.random.SeedGenerator, "next")
def _next_seed(original: Callable[..., Any], self: keras.random.SeedGenerator, *args: Any, **kwargs: Any) -> Any:
    seed, scope = original(self, *args, **kwargs), _surrounding_scope()
    return seed if scope is None else scope.fold_seed(seed, self.state)


@_extend(_seed_generator, "global_seed_generator")
def _global_seed_generator(original: Callable[[], keras.random.SeedGenerator]) -> keras.random.SeedGenerator:
    """Returns Keras's global generator in a step too: its state is a variable of the step like any other."""
    if _surrounding_scope() is None:
        return original()
    generator = global_state.get_global_attribute(_seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None:
        # Keras makes it at its first use, which has to be outside of the trace.
        scope = active_scope()
        global_state.set_global_attribute("stateless_scope", None)
        try:
            with jax.ensure_compile_time_eval():
                generator = original()
        finally:
            global_state.set_global_attribute("stateless_scope", scope)
    generator.state._phalanx_generator = generator
    return generator


def is_global_seed(state: Variable) -> bool:
    """Whether `state` is that of a generator from which a traced step drew without naming one."""
    return "_phalanx_generator" in vars(state)


def continue_global_seed(state: Variable) -> None:
    """Makes the generator of `state` Keras's global one again, if `set_random_seed` has replaced it since the trace.

    It goes on where the replacement is, so a step follows a new seed without another trace.
    """
    generator = vars(state)["_phalanx_generator"]
    current = global_state.get_global_attribute(_seed_generator.GLOBAL_SEED_GENERATOR)
    if current is not generator:
        state.assign((current or _seed_generator.global_seed_generator()).state.value)
        global_state.set_global_attribute(_seed_generator.GLOBAL_SEED_GENERATOR, generator)


def _is_number(metric: Any, given: dict[str, Any]) -> bool:
    """Whether a metric is a function that makes one number of a batch."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper) or not {"y_true", "y_pred"} <= given.keys():
        return False
    # Of rows without further dims Keras's own functions take the mean, of columns they do not.
    columns = [x[:, None] if jnp.ndim(x) == 1 else x for x in (given["y_true"], given["y_pred"])]
    return jnp.ndim(jax.eval_shape(functools.partial(metric._fn, **metric._fn_kwargs), *columns)) == 0


def _warn_of_padding(what: str) -> None:
    warnings.warn(
        f"{what} is one number for a batch, in which the rows count that pad it for the replicas. "
        "HINT: return one value for each row; they are averaged without the padding.",
        UserWarning,
        stacklevel=2,
    )


_CONTAINERS = (CompileMetrics, MetricsList)


def _update_state(original: Callable[..., Any], self: keras.metrics.Metric, *args: Any, **kwargs: Any) -> Any:
    """Weighs the padded rows of a short batch with zero."""
    scope, weighed = _surrounding_scope(), global_state.get_global_attribute("phalanx_weighed")
    # Keras's containers of metrics hand everything on.
    if scope is None or weighed or isinstance(self, _CONTAINERS):
        return original(self, *args, **kwargs)
    call = inspect.signature(original)
    if "sample_weight" not in call.parameters:
        return original(self, *args, **kwargs)
    mask = scope.example_mask()
    rows = {jnp.shape(x)[:1] for x in keras.tree.flatten(args) if x is not None}
    given = call.bind(self, *args, **kwargs).arguments
    if rows != {()} and _is_number(self, given):
        rows = {()}
        if mask is not None:
            _warn_of_padding(f"the metric {self.name!r}")
    if scope.is_averaging and rows == {()}:
        given["sample_weight"] = scope.weight_of_mean(given.get("sample_weight"))
        return original(**given)
    if mask is None or rows == {()}:
        return original(self, *args, **kwargs)
    if rows != {mask.shape}:
        if given.get("sample_weight") is None:
            raise InputError(
                f"{self.name}.update_state of {sorted(rows)} rows",
                f"this batch is padded to {mask.shape[0]} rows, and its mask does not fit.",
                "arrays whose dim 0 is the rows of the batch, or a sample_weight that is 0 for padding",
            )
        return original(self, *args, **kwargs)
    weight = given.get("sample_weight")
    arrays = [jnp.asarray(x) for x in args]
    if isinstance(self, keras.metrics.MeanMetricWrapper) and weight is None and all(x.ndim == 1 for x in arrays):
        # Keras takes the rows of such arrays for their last dim, and counts the batch once: as a column they have weights.
        given.update(zip(list(given)[1:], (x[:, None] for x in arrays), strict=False))
        weight = jnp.full(mask.shape, scope.count_of_a_row())
    dtype = keras.backend.standardize_dtype(self.dtype)
    weight = jnp.ones((), dtype) if weight is None else jnp.asarray(weight)
    given["sample_weight"] = jnp.where(mask.reshape(mask.shape + (1,) * max(0, weight.ndim - 1)), weight, 0)
    # What it calls in turn gets these weights.
    global_state.set_global_attribute("phalanx_weighed", True)
    try:
        return original(**given)
    finally:
        global_state.set_global_attribute("phalanx_weighed", False)


@_extend(keras.losses.Loss, "__call__")
def _loss(
    original: Callable[..., Any], self: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Refuses a mean over one replica's rows, which the sum of the replicas' losses counts once for each replica."""
    scope, reduction = _surrounding_scope(), self.reduction
    if scope is None or reduction in ("none", None) or isinstance(self, CompileLoss):
        return original(self, y_true, y_pred, sample_weight)
    if not scope.is_averaging and reduction != "sum":
        scope.check_loss(self.name, reduction)
    if not scope.is_averaging and (reduction != "sum" or scope.example_mask() is None):
        return original(self, y_true, y_pred, sample_weight)
    self.reduction = "none"
    try:
        values = jnp.asarray(original(self, y_true, y_pred, sample_weight))
    finally:
        self.reduction = reduction
    if values.ndim == 0 and scope.example_mask() is not None:
        _warn_of_padding(f"the loss {self.name!r}")
    counts = jnp.ones((), values.dtype)
    mask = backend.get_keras_mask(y_pred)
    if mask is not None:
        counts = _like(jnp.asarray(mask, values.dtype), values)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        counts = counts * _like(jnp.asarray(sample_weight, values.dtype), values)
    return scope.reduce_rows(values, counts, reduction)


def _like(weights: Any, values: Any) -> Any:
    """Returns weights of rows in a shape that broadcasts to their values."""
    return weights.reshape(weights.shape[: values.ndim] + (1,) * (values.ndim - weights.ndim))


@_extend(keras.layers.BatchNormalization, "__init__")
def _init_batch_normalization(
    original: Callable[..., None], self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
) -> None:
    # Keras refuses it on JAX, for want of replicas.
    original(self, *args, **kwargs)
    self.synchronized = synchronized


@_extend(keras.layers.BatchNormalization, "_moments")
def _moments(original: Callable[..., Any], self: Any, inputs: Any, mask: Any) -> Any:
    """Leaves padded rows out of the statistics, and computes synchronized ones over all replicas."""
    scope = _surrounding_scope()
    if scope is not None:
        scope.note_averages([self.moving_mean, self.moving_variance])
    rows = None if scope is None else scope.example_mask()
    if scope is None or (rows is None and not self.synchronized):
        return _moments_here(original, self, inputs, mask)
    if rows is None:
        rows = jnp.ones(inputs.shape[:1], bool)
    if inputs.shape[0] % rows.shape[0]:
        raise InputError(
            f"{self.name} of inputs {inputs.shape}",
            f"this batch is padded to {rows.shape[0]} rows, and its mask does not fit.",
            "inputs whose dim 0 is the rows of the batch",
        )
    counts = jnp.repeat(rows, inputs.shape[0] // rows.shape[0]).reshape((-1,) + (1,) * (inputs.ndim - 1))
    if mask is not None:
        counts = counts & jnp.asarray(mask, bool)[..., None]
    return scope.moments(
        inputs, jnp.broadcast_to(counts, inputs.shape), self._reduction_axes, everywhere=self.synchronized
    )


def _moments_here(original: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
    synchronized, layer.synchronized = layer.synchronized, False
    try:
        return original(layer, inputs, mask)
    finally:
        layer.synchronized = synchronized


def _extend_metric(metric: type) -> None:
    if "update_state" in vars(metric):
        _extend(metric, "update_state")(_update_state)
    others: list[type] = metric.__subclasses__()
    for other in others:
        _extend_metric(other)


_extend_metric(keras.metrics.Metric)


def _init_subclass(cls: type, **kwargs: Any) -> None:
    super(keras.metrics.Metric, cls).__init_subclass__(**kwargs)
    _extend_metric(cls)


keras.metrics.Metric.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[arg-type]


def _apply(original: Callable[..., None], self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    scope = lift_scope()
    if scope is None:
        with transaction():
            return original(self, grads, trainable_variables)
    grads = list(grads)
    if grads and all(g is None for g in grads):
        raise InvalidArgumentError(
            f"{type(self).__name__} with no gradients for any variable",
            f"all {len(grads)} are None: the loss does not depend on the variables, or was computed after the tape.",
            "with phalanx.GradientTape() as tape: around the model's call and the loss",
        )
    return scope.apply_gradients(self, functools.partial(original, self), grads, trainable_variables)


def _apply_gradients(
    original: Callable[..., Any], self: Any, grads_and_vars: Any, skip_gradients_aggregation: bool = False
) -> Any:
    scope = lift_scope()
    if scope is None:
        return original(self, grads_and_vars)
    if not isinstance(skip_gradients_aggregation, bool):
        raise _no_pairs(self, "gradients and variables apart")
    pairs = list(grads_and_vars)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Variable):
            is_swapped = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Variable)
            kind = "array" if isinstance(pair, jax.Array) else type(pair).__name__
            raise _no_pairs(self, "pairs (variable, gradient)" if is_swapped else f"a list whose elements are {kind}s")
    with scope.updating() if skip_gradients_aggregation else nullcontext():
        return original(self, pairs)


def _no_pairs(optimizer: keras.optimizers.Optimizer, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{type(optimizer).__name__}.apply_gradients of {found}",
        "it takes one list of pairs (gradient, variable).",
        "optimizer.apply_gradients(zip(gradients, variables))",
    )


def _stateless_apply(
    original: Callable[..., Any], self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
) -> Any:
    scope = _surrounding_scope()
    # In a replica function of the user's own what is stateless is theirs; in Keras's trainer it is how steps are written.
    if scope is None or not scope.is_averaging:
        return original(self, optimizer_variables, grads, trainable_variables)
    grads = scope.aggregated(grads)
    with scope.updating():
        return original(self, optimizer_variables, grads, trainable_variables)


def _add_variable_from_reference(
    original: Callable[..., Variable], self: Any, reference_variable: Variable, *args: Any, **kwargs: Any
) -> Variable:
    make = functools.partial(original, self, reference_variable, *args, **kwargs)
    is_table = isinstance(reference_variable, Variable) and initializer_of(reference_variable) is not None
    slot = make_table(make) if is_table else make()
    if isinstance(reference_variable, Variable):
        slot._phalanx_reference = weakref.ref(reference_variable)
    return slot


_BaseOptimizer = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply_gradients" in vars(c))
_extend(_BaseOptimizer, "add_variable_from_reference")(_add_variable_from_reference)
_extend(_BaseOptimizer, "apply")(_apply)
_extend(_BaseOptimizer, "apply_gradients")(_apply_gradients)
_extend(_BaseOptimizer, "stateless_apply")(_stateless_apply)


@_extend(_BaseOptimizer, "add_variable_from_reference")
def _add_slot(original: Callable[..., Any], self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    slot = original(self, reference_variable, *args, **kwargs)
    # Its own path has the other's in it, with other separators.
    slot._phalanx_follows = layout_path(reference_variable)
    return slot


_extend(keras.optimizers.LossScaleOptimizer, "apply")(_apply)
_extend(keras.optimizers.LossScaleOptimizer, "stateless_apply")(_stateless_apply)


def agree_on_seed(agree: Callable[[np.ndarray], Any]) -> None:
    """Lets all processes have the random seed that `agree` returns, but for those with a seed that was set."""
    own = _get_random_seed()
    agreed = agree(np.array(np.random.default_rng().integers(2**31 - 1) if own is None else own, np.int32))
    if own is None:
        keras.utils.set_random_seed(int(agreed))


# Keras's trainer.


def on_model(hear: Callable[[keras.Model], None]) -> None:
    """Lets `hear(model)` be called when a model is made, and again when it is compiled."""

    def made(original: Callable[..., None], self: keras.Model, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hear(self)

    _extend(_Trainer, "__init__")(made)
    # Where it is defined: Keras compares it with a model's own, to know whether a user has overridden it.
    _extend(_Trainer, "compile")(made)


def before_saving(check: Callable[[Sequence[Variable]], None]) -> None:
    """Lets `check(variables)` raise before Keras opens the file that a model is to be saved in, which empties it."""

    def saved(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        check(self.variables)
        return original(self, *args, **kwargs)

    for name in ("save", "save_weights"):
        _extend(keras.Model, name)(saved)


def take_over(names: Iterable[str], call: Callable[..., Any]) -> None:
    """Replaces methods of Keras's trainer by `call(name, original, model, ...)`."""
    for name in names:
        _extend(_JAXTrainer, name)(functools.partial(call, name))


def take_over_step(name: str, step: Callable[[keras.Model, Any], Any]) -> None:
    """Makes `super().train_step(data)` in a traced step call `step(model, data)`; with the state too it is Keras's own."""

    def call(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        is_ours = len(args) + len(kwargs) == 1 and lift_scope() is not None
        return step(self, *args, *kwargs.values()) if is_ours else original(self, *args, **kwargs)

    _extend(_JAXTrainer, name)(call)


def data_adapter(**data: Any) -> Any:
    """Returns Keras's adapter of what was passed to `fit`."""
    return _get_data_adapter(**data)


def validation_split(arrays: Any, part: float) -> Any:
    """Returns `(training, validation)` arrays."""
    return _array_slicing.train_validation_split(arrays, validation_split=part)


def unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """Returns `(x, y, sample_weight)` of a batch."""
    return _data_adapter_utils.unpack_x_y_sample_weight(batch)


def weights_of_classes(y: Any, class_weight: Any) -> Any:
    """Returns one weight a row."""
    return _data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def build(model: keras.Model, batch: Any, *, has_own_step: bool) -> None:
    """Makes all variables of a model, its metrics and its optimizer; `batch` has the shapes of a global batch.

    A model with a step of its own need not be callable. Its step makes what is missing.
    """
    try:
        if not has_own_step or type(model).call is not keras.Model.call:
            model._symbolic_build(data_batch=batch)
            return
    except (RuntimeError, ValueError):
        if not has_own_step:
            raise
    if model.optimizer is not None and all(layer.built for layer in model._flatten_layers(include_self=False)):
        build_optimizer(model.optimizer, model.trainable_variables)


def is_array_adapter(adapter: Any) -> bool:
    """Whether a data adapter is one of arrays."""
    return isinstance(adapter, _ArrayDataAdapter)


def goes_on(adapter: Any) -> bool:
    """Whether a new iterator of a data adapter goes on where the last one stopped."""
    return isinstance(adapter, _GeneratorDataAdapter)


def size_of_batches(adapter: Any) -> tuple[int | None, bool]:
    """Returns the batch size of a data adapter, if it has one, and whether no batch is shorter."""
    try:
        return adapter.batch_size, adapter.has_partial_batch is False
    except NotImplementedError:  # Only the batches can tell.
        return None, False


def num_rows(adapter: Any) -> int:
    """Returns how many rows the arrays of a data adapter have."""
    short = adapter.partial_batch_size or 0
    return int((adapter.num_batches - bool(short)) * adapter.batch_size + short)


def build_layers(model: keras.Model, x: Any) -> None:
    """Makes the variables of a model alone; `x` has the shapes of its inputs."""
    backend.compute_output_spec(model, jax.tree.map(lambda s: keras.KerasTensor(s.shape, str(s.dtype)), x))


def needs_batch(model: keras.Model) -> bool:
    """Whether `build` has to see the shapes of a batch."""
    parts = (model._compile_metrics, model._compile_loss)
    return not is_built(model) or any(part is not None and not part.built for part in parts)


def is_built(model: keras.Model) -> bool:
    """Whether all variables of a model are made."""
    return all(layer.built for layer in model._flatten_layers())


def require_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's error for a model that is not compiled."""
    model._assert_compile_called(method)


def forward(model: keras.Model, x: Any, *, training: bool) -> Any:
    """Calls a model."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
    """Returns the loss of a model, with the losses of its layers."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that averages the loss."""
    return model._loss_tracker


def logs_or_metrics(model: keras.Model, logs: Any) -> Any:
    """Returns the results of a model's metrics where `logs` has their names, else `logs`."""
    return dict(model._get_metrics_result_or_logs(logs))


def in_order(model: keras.Model, logs: Any) -> Any:
    """Returns the values of logs in the order of a model's metrics."""
    return model._flatten_metrics_in_order(logs)


def batch_hooks(callbacks: Any, kind: str) -> list[Callable[..., None]]:
    """Returns what to call before and after a batch: nothing where no callback listens, which Keras does in threads."""
    return [
        getattr(callbacks, f"on_{kind}_batch_{when}") if listens(callbacks.callbacks, kind, when) else _nothing
        for when in ("begin", "end")
    ]


def listens(callbacks: Sequence[Any], kind: str, when: str) -> bool:
    """Whether one of some callbacks has a method of its own for the begin or the end of a batch."""
    names = [f"on_{kind}_batch_{when}"] + ([f"on_batch_{when}"] if kind == "train" else [])
    return any(not _is_default(getattr(c, name, None)) for c in callbacks for name in names)


def _nothing(batch: int, logs: Any = None) -> None:
    """What nobody listens to."""


def stop_callbacks(callbacks: Any) -> None:
    """Ends the threads of a list of callbacks whose end no one will tell it."""
    if callbacks._executor is not None:
        callbacks._executor.shutdown()
        callbacks._executor = None


def to_python(logs: Any) -> Any:
    """Returns logs with Python's numbers."""
    return _pythonify_logs(logs)


def is_evaluated(model: keras.Model, epoch: int, frequency: Any) -> bool:
    """Whether `fit` validates after this epoch."""
    return model._should_eval(epoch, frequency)


def take_over_state(model: keras.Model, from_chief: Callable[[list[Any]], list[Any]]) -> None:
    """Gives a model and its optimizer the values, and `fit` the first epoch, that the chief has."""
    variables = [*model.variables, *model.optimizer.variables]
    *values, epoch = from_chief([*(np.asarray(v.value) for v in variables), np.int32(model._initial_epoch or 0)])
    model._initial_epoch = int(epoch)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def first_epoch(model: keras.Model, given: int) -> int:
    """Returns with which epoch `fit` begins: a callback may have restored a later one."""
    return model._initial_epoch or given
