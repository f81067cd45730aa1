# SPDX-License-Identifier: Apache-2.0
"""Keras's trainer, data adapters and callbacks."""

import functools
import itertools
import queue
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import keras
import numpy as np
from keras import Variable
from keras.src import backend
from keras.src.backend.jax.trainer import JAXTrainer as _JAXTrainer
from keras.src.trainers.data_adapters import array_slicing as _array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as _data_adapter_utils
from keras.src.trainers.data_adapters import get_data_adapter as _get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as _ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as _DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter as _GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as _PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as _TFDatasetAdapter
from keras.src.trainers.trainer import Trainer as _Trainer
from keras.src.utils.python_utils import is_default as _is_default
from keras.src.utils.python_utils import pythonify_logs as _pythonify_logs

from phalanx._src.compat.batch_functions import with_all_rows
from phalanx._src.compat.frozen import train_unfrozen
from phalanx._src.compat.hooks import extend
from phalanx._src.compat.optimizers import build_optimizer
from phalanx._src.compat.scope import lift_scope
from phalanx.errors import InvalidArgumentError, MissingDependencyError, shown
from phalanx.typing import PyTree

_R = TypeVar("_R")


def on_model(hear: Callable[[keras.Model], None]) -> None:
    """Registers a function that is called with each model when it is created, and again when it is compiled."""

    def made(original: Callable[..., None], self: keras.Model, *args: PyTree, **kwargs: PyTree) -> None:
        original(self, *args, **kwargs)
        hear(self)

    extend(_Trainer, "__init__")(made)
    # Wrap the base class that defines `compile`, because Keras compares `type(model).compile` with it to detect overrides.
    extend(_Trainer, "compile")(made)


@extend(_Trainer, "get_metrics_result")
def _values_of_metrics(original: Callable[[keras.Model], dict[str, Any]], self: keras.Model) -> dict[str, Any]:
    """Returns the results of a model's metrics. A metric may return its variable, as in tf.keras; JAX refuses it as an output."""
    results: dict[str, Any] = keras.tree.map_structure(
        lambda x: x.value if isinstance(x, Variable) else x, original(self)
    )
    return results


def before_saving(check: Callable[[Sequence[Variable]], None]) -> None:
    """Registers a function that may raise before a model is saved.

    Keras truncates the file when it opens it, so an error after that would destroy the last checkpoint.
    """

    def saved(original: Callable[..., _R], self: keras.Model, *args: PyTree, **kwargs: PyTree) -> _R:
        check(self.variables)
        return original(self, *args, **kwargs)

    for name in ("save", "save_weights"):
        extend(keras.Model, name)(saved)


def take_over(names: Iterable[str], call: Callable[..., Any]) -> None:
    """Replaces the methods `names` of Keras's trainer by `call(name, original, model, ...)`."""
    for name in names:
        extend(_JAXTrainer, name)(functools.partial(call, name))


def take_over_step(name: str, step: Callable[[keras.Model, Any], Any]) -> None:
    """Redirects `super().train_step(data)` in a traced step to `step(model, data)`.

    Keras's JAX trainer has `train_step(state, data)` only. Calls with both arguments still reach it.
    """

    def call(original: Callable[..., Any], self: keras.Model, *args: PyTree, **kwargs: PyTree) -> PyTree:
        is_ours = len(args) + len(kwargs) == 1 and lift_scope() is not None
        return step(self, *args, *kwargs.values()) if is_ours else original(self, *args, **kwargs)

    extend(_JAXTrainer, name)(call)


def data_adapter(**data: PyTree) -> _DataAdapter:
    """Returns Keras's data adapter for the data arguments of `fit`."""
    return _get_data_adapter(**data)


def validation_split(arrays: PyTree, part: float) -> tuple[PyTree, PyTree]:
    """Splits arrays into `(training, validation)`, with the last `part` of the rows for validation."""
    training, validation = _array_slicing.train_validation_split(arrays, validation_split=part)
    return training, validation


def unpacked(batch: PyTree) -> tuple[Any, Any, Any]:
    """Returns a batch as `(x, y, sample_weight)`, with None for missing parts."""
    x, y, sample_weight = _data_adapter_utils.unpack_x_y_sample_weight(batch)
    return x, y, sample_weight


def weights_of_classes(y: PyTree, class_weight: PyTree) -> PyTree:
    """Returns one weight per row, from a dict of weights per class."""
    return _data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def build(model: keras.Model, batch: PyTree, *, has_own_step: bool) -> None:
    """Creates all variables of a model, its metrics and its optimizer.

    A model with a custom step may have no `call`. Its step then creates the missing variables.

    Args:
      model: the model.
      batch: pytree of arrays or `jax.ShapeDtypeStruct` with the shapes of a global batch. None if they are not needed.
      has_own_step: whether the model has a custom step.
    """
    if not has_own_step:
        train_unfrozen(model)
        if batch is not None:
            _require_targets(model, unpacked(batch)[1])
    try:
        if not has_own_step or type(model).call is not keras.Model.call:
            model._symbolic_build(data_batch=jax.tree.map(_on_device, batch))
            return
    except (RuntimeError, ValueError):
        if not has_own_step:
            raise
    if model.optimizer is not None and all(layer.built for layer in model._flatten_layers(include_self=False)):
        build_optimizer(model.optimizer, model.trainable_variables)


def is_array_adapter(adapter: _DataAdapter | None) -> bool:
    """Whether a data adapter reads arrays in memory."""
    return isinstance(adapter, _ArrayDataAdapter)


class ArrayBatches:
    """The batches of an array adapter, in the order that the adapter decides. A call opens an iterator over them.

    Args:
      adapter: the adapter.
      prepare: checks a NumPy or JAX array with all rows.
      rows: maps such an array, the index of the rows of a batch, and the dtype that Keras wants, to these rows. Called if NumPy would
        have to copy them.
      whole: converts the rows of any other kind of data, which Keras has read.
    """

    def __init__(
        self,
        adapter: _DataAdapter,
        prepare: Callable[[PyTree], PyTree],
        rows: Callable[[PyTree, PyTree, PyTree], PyTree],
        whole: Callable[[PyTree], PyTree],
    ) -> None:
        self._adapter, self._rows, self._whole = adapter, rows, whole
        self._inputs = keras.tree.map_structure(lambda x: _source(x, prepare), adapter._inputs)

    def __call__(self) -> Iterator[PyTree]:
        batches: Iterator[PyTree] = self._adapter._get_iterator(self._chosen, self._inputs)
        return batches

    def _chosen(self, source: PyTree, indices: PyTree) -> PyTree:
        if isinstance(source, _Dense):
            array = source.array
            # NumPy makes a view of a slice, so that a batch in the order of the rows needs no copy here.
            is_view = isinstance(indices, slice) and isinstance(array, np.ndarray) and array.dtype == source.dtype
            return array[indices] if is_view else self._rows(array, indices, source.dtype)
        return self._whole(source.convert_to_numpy(source[indices]))


@dataclass(frozen=True)
class _Dense:
    """An array with all rows, and the dtype that Keras wants."""

    array: PyTree
    dtype: PyTree


def _source(x: PyTree, prepare: Callable[[PyTree], PyTree]) -> PyTree:
    """Returns data with all rows as `_Dense` or, if they are neither NumPy's nor JAX's, as Keras reads them."""
    if x is None:
        return None
    if not isinstance(x, (np.ndarray, jax.Array)):
        x = _array_slicing.convert_to_sliceable(x, target_backend="numpy")
        if type(x) is not _array_slicing.NumpySliceable:
            return x
        x = x.array
    x = prepare(x)
    # `is_float_dtype` raises for text, dates and objects.
    is_float = x.dtype.kind not in "OSUMm" and backend.is_float_dtype(x.dtype)
    return _Dense(x, jax.numpy.dtype(backend.floatx()) if is_float else x.dtype)


def raw_batches(adapter: _DataAdapter) -> Callable[[], Iterator[PyTree]]:
    """Returns a function that opens an iterator over the batches of an adapter, as the user's code makes them if Keras can tell."""
    open_raw: Callable[[], Iterator[PyTree]] = adapter.get_numpy_iterator
    if isinstance(adapter, _GeneratorDataAdapter):
        open_raw = adapter.generator
    elif isinstance(adapter, _PyDatasetAdapter):
        open_raw = adapter._get_iterator
    return open_raw


def makes_arrays(adapter: _DataAdapter) -> bool:
    """Whether the arrays of a batch belong to nobody else, because Keras has made them from TensorFlow's tensors."""
    return isinstance(adapter, _TFDatasetAdapter)


def peeked(
    generator: Generator[PyTree, PyTree, PyTree], keep: Callable[[PyTree], PyTree]
) -> Generator[PyTree, PyTree, PyTree]:
    """Yields the batches of a generator. Those that Keras reads before it gives away the first are kept by `keep`."""
    for i, batch in enumerate(generator):
        yield keep(batch) if i < _data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC else batch


def has_epochs(adapter: _DataAdapter | None) -> bool:
    """Whether each epoch of a data adapter reads the data from its beginning, so that one batch can be read beforehand."""
    return isinstance(adapter, (_ArrayDataAdapter, _PyDatasetAdapter))


def separate(adapter: _DataAdapter) -> _DataAdapter:
    """Returns an adapter of the same data, of whose first batches `adapter` loses none.

    The threads of a `PyDataset` keep what they have read for the next epoch of their adapter.
    """
    if not isinstance(adapter, _PyDatasetAdapter):
        return adapter
    return _PyDatasetAdapter(adapter.py_dataset, class_weight=adapter.class_weight, shuffle=adapter.shuffle)


def begin_again(adapter: _DataAdapter | None) -> None:
    """Makes the next iterator of a data adapter begin with the first batch, and not with what threads of a `PyDataset` have read."""
    if not isinstance(adapter, _PyDatasetAdapter) or adapter.enqueuer is None:
        return
    adapter.enqueuer.stop()
    adapter.enqueuer.ready_queue = queue.Queue()
    # Keras numbers the batches of an endless dataset through all epochs, and those of other datasets in each epoch.
    if adapter.num_batches is None:
        adapter.enqueuer.indices = itertools.count()


def draws_while_reading(adapter: _DataAdapter | None) -> bool:
    """Whether a data adapter draws an order for each batch, not only for each epoch: `shuffle="batch"`."""
    return isinstance(adapter, _ArrayDataAdapter) and adapter._shuffle == "batch"


def goes_on(adapter: _DataAdapter | None) -> bool:
    """Whether a new iterator of a data adapter continues where the last one stopped, as for a generator."""
    return isinstance(adapter, _GeneratorDataAdapter)


def size_of_batches(adapter: _DataAdapter) -> tuple[int | None, bool]:
    """Returns the batch size of a data adapter, or None, and whether all batches have that size."""
    try:
        return adapter.batch_size, adapter.has_partial_batch is False
    except NotImplementedError:  # Generators raise it: their batch size is unknown until they are read.
        return None, False


def num_rows(adapter: _DataAdapter) -> int:
    """Returns the number of rows of an array data adapter."""
    short = adapter.partial_batch_size or 0
    return int((adapter.num_batches - bool(short)) * adapter.batch_size + short)


def build_layers(model: keras.Model, x: PyTree) -> None:
    """Creates the variables of a model without its metrics and optimizer. `x` has the shapes of the inputs."""
    backend.compute_output_spec(model, jax.tree.map(_on_device, x))


def _on_device(x: PyTree) -> keras.KerasTensor:
    """Returns the shape of an array, with the dtype that it gets on a device. JAX 0.12 warns of 64 bits that it shortens."""
    return keras.KerasTensor(x.shape, str(jax.dtypes.canonicalize_dtype(backend.standardize_dtype(x.dtype))))


def needs_batch(model: keras.Model) -> bool:
    """Whether `build` needs the shapes of a batch."""
    parts = (model._compile_metrics, model._compile_loss)
    return not is_built(model) or any(part is not None and not part.built for part in parts)


def is_built(model: keras.Model) -> bool:
    """Whether all variables of a model exist."""
    return all(layer.built for layer in model._flatten_layers())


def require_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's own error, a ValueError, if the model is not compiled."""
    model._assert_compile_called(method)


def forward(model: keras.Model, x: PyTree, *, training: bool) -> PyTree:
    """Calls a model, with `training` if its `call` takes it."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def compute_loss(
    model: keras.Model, x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree, *, training: bool
) -> jax.Array:
    """Returns the loss of a model, including the losses that its layers added.

    Raises:
      InvalidArgumentError: there are no targets, but a loss compares with them.
    """
    _require_targets(model, y)

    def loss_of(x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree) -> jax.Array:
        loss: jax.Array = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return loss

    if type(model).compute_loss is keras.Model.compute_loss:
        return loss_of(x, y, y_pred, sample_weight)
    return with_all_rows(loss_of, x, y, y_pred, sample_weight, source=type(model))


def _require_targets(model: keras.Model, y: PyTree) -> None:
    # Keras converts the missing targets to an array: "None is not a valid value for jnp.array".
    if y is None and model._compile_loss is not None and type(model).compute_loss is keras.Model.compute_loss:
        raise InvalidArgumentError(
            f"fit, evaluate or a step of {type(model).__name__} on data without targets",
            "the loss that compile got compares the outputs with targets.",
            "fit(x, y), or a dataset of pairs (x, y), such as strategy.experimental_distribute_dataset(batches); compile(optimizer) without a loss if layers add their losses",
        )


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Returns the metric that averages the loss."""
    return model._loss_tracker


def update_compiled_metrics(model: keras.Model, y: PyTree, y_pred: PyTree, sample_weight: PyTree) -> None:
    """Updates the metrics that `compile` got, as `compute_metrics` of Keras does, which computes their results too."""
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y, y_pred, sample_weight)


def compiled_metrics(model: keras.Model) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics that `compile` got, by the names of their results. Empty before the first update."""
    container = model._compile_metrics
    return (
        {}
        if container is None or not container.built
        else dict(zip(container.result(), container.metrics, strict=True))
    )


def logs_or_metrics(model: keras.Model, logs: PyTree) -> dict[str, Any]:
    """Returns the results of a model's metrics if `logs` has exactly their names, else `logs`."""
    return dict(model._get_metrics_result_or_logs(logs))


def in_order(model: keras.Model, logs: PyTree) -> PyTree:
    """Returns the values of logs in the order of a model's metrics."""
    return model._flatten_metrics_in_order(logs)


def batch_hooks(callbacks: keras.callbacks.CallbackList, kind: str) -> list[Callable[..., None]]:
    """Returns the functions to call before and after a batch, which do nothing if no callback overrides the hook.

    Skipping the hooks matters because Keras calls them in a thread pool.
    """
    return [
        getattr(callbacks, f"on_{kind}_batch_{when}") if listens(callbacks.callbacks, kind, when) else _nothing
        for when in ("begin", "end")
    ]


def listens(callbacks: Sequence[Any], kind: str, when: str) -> bool:
    """Whether any callback overrides the hook for the "begin" or the "end" of a batch."""
    # Keras's `on_train_batch_*` call the older `on_batch_*`, which a callback may override in their place.
    names = [f"on_{kind}_batch_{when}"] + ([f"on_batch_{when}"] if kind == "train" else [])
    return any(not _is_default(getattr(c, name, None)) for c in callbacks for name in names)


def better(model: keras.Model, name: str) -> str | None:
    """Returns "max" if more of a compiled metric is better, "min" if less is, and None if Keras does not know."""
    for metric in model.metrics:
        for m in [metric, *getattr(metric, "metrics", [])]:
            if m.name == name and (direction := getattr(m, "_direction", None)):
                return "max" if direction == "up" else "min"
    return None


def _nothing(batch: int, logs: PyTree = None) -> None:
    """Replaces a hook that no callback overrides."""


def call_in_order(callbacks: keras.callbacks.CallbackList) -> None:
    """Makes the thread pool of a callback list one thread.

    Keras calls batch hooks in a pool of several threads, so that the hook of the last batch can run before that of the one
    before it: the progress bar then prints 2/2 after three steps.
    """
    if callbacks._executor is None:
        callbacks._executor = ThreadPoolExecutor(1)


def stop_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Ends the threads of a callback list after a failure. Keras ends them only in `on_train_end` and the like."""
    if callbacks._executor is not None:
        callbacks._executor.shutdown()
        callbacks._executor = None


def to_python(logs: PyTree) -> PyTree:
    """Returns logs with Python numbers instead of arrays."""
    return _pythonify_logs(logs)


def is_evaluated(model: keras.Model, epoch: int, frequency: int | Collection[int]) -> bool:
    """Whether `fit` validates after this epoch."""
    return bool(model._should_eval(epoch, frequency))


_running: ContextVar[tuple[keras.Model, ...]] = ContextVar("running", default=())
"""The models that Keras's own loops train or evaluate around this code."""


@contextmanager
def in_loop_of_keras(model: keras.Model) -> Iterator[None]:
    """Returns a context in which Keras's own loop trains or evaluates a model."""
    token = _running.set((*_running.get(), model))
    try:
        yield
    finally:
        _running.reset(token)


def settle_models() -> None:
    """Gives the variables of models in Keras's own loops their values, which are in the loop. It takes them from there before its next step."""
    for model in _running.get():
        model.jax_state_sync()


def take_over_state(model: keras.Model, from_chief: Callable[[list[Any]], list[Any]]) -> None:
    """Copies the chief's variables of a model and its optimizer, and its first epoch, to this process.

    `BackupAndRestore` restores them on the chief only.

    Args:
      model: the model.
      from_chief: returns the chief's arrays on every process. A collective call.
    """
    variables = [*model.variables, *model.optimizer.variables]
    *values, epoch = from_chief([*(np.asarray(v.value) for v in variables), np.int32(model._initial_epoch or 0)])
    model._initial_epoch = int(epoch)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def first_epoch(model: keras.Model, initial_epoch: int) -> int:
    """Returns the epoch at which `fit` begins: `initial_epoch`, or a later one that a callback has restored."""
    return model._initial_epoch or initial_epoch


@extend(keras.Model, "export")
def _export(
    original: Callable[..., None], self: keras.Model, filepath: PyTree, *args: PyTree, **kwargs: PyTree
) -> None:
    """Names an export that needs no TensorFlow, if Keras's own is refused for lack of it."""
    try:
        original(self, filepath, *args, **kwargs)
    except ImportError as e:
        raise MissingDependencyError(
            f"{type(self).__name__}.export({shown(filepath)})",
            f"Keras needs a library for this format: {e}",
            "phalanx.estimator.export_model(model, path, x[:1]), which needs JAX and flatbuffers only",
        ) from e
