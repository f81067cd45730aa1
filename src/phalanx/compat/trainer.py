# SPDX-License-Identifier: Apache-2.0
"""Keras's trainer, its data adapters and its callbacks."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras import Variable
from keras.src import backend
from keras.src.backend.jax.trainer import JAXTrainer as _JAXTrainer
from keras.src.trainers.data_adapters import array_slicing as _array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as _data_adapter_utils
from keras.src.trainers.data_adapters import get_data_adapter as _get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter as _ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter as _GeneratorDataAdapter,
)
from keras.src.trainers.trainer import Trainer as _Trainer
from keras.src.utils.python_utils import is_default as _is_default
from keras.src.utils.python_utils import pythonify_logs as _pythonify_logs

from phalanx.compat.hooks import extend
from phalanx.compat.optimizers import build_optimizer
from phalanx.compat.scope import lift_scope


def on_model(hear: Callable[[keras.Model], None]) -> None:
    """Lets `hear(model)` be called when a model is made, and again when it is compiled."""

    def made(original: Callable[..., None], self: keras.Model, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hear(self)

    extend(_Trainer, "__init__")(made)
    # Where it is defined: Keras compares it with a model's own, to know whether a user has overridden it.
    extend(_Trainer, "compile")(made)


def before_saving(check: Callable[[Sequence[Variable]], None]) -> None:
    """Lets `check(variables)` raise before Keras opens the file that a model is to be saved in, which empties it."""

    def saved(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        check(self.variables)
        return original(self, *args, **kwargs)

    for name in ("save", "save_weights"):
        extend(keras.Model, name)(saved)


def take_over(names: Iterable[str], call: Callable[..., Any]) -> None:
    """Replaces methods of Keras's trainer by `call(name, original, model, ...)`."""
    for name in names:
        extend(_JAXTrainer, name)(functools.partial(call, name))


def take_over_step(name: str, step: Callable[[keras.Model, Any], Any]) -> None:
    """Makes `super().train_step(data)` in a traced step call `step(model, data)`; with the state too it is Keras's own."""

    def call(original: Callable[..., Any], self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        is_ours = len(args) + len(kwargs) == 1 and lift_scope() is not None
        return step(self, *args, *kwargs.values()) if is_ours else original(self, *args, **kwargs)

    extend(_JAXTrainer, name)(call)


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
