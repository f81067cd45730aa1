# SPDX-License-Identifier: Apache-2.0
"""Makes losses, metrics and BatchNormalization of Keras those of the rows of all replicas.

In a compiled step a replica has exactly its rows and no padding (`phalanx._src.programs.own_rows`), so most of it is Keras's own code.
What a replica must know of the others is here: what a masked mean divides by, and functions that need the whole batch. In a step that is
not compiled, replicas have padding and a mask, which is applied here too.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.common import global_state
from keras.src.losses import loss
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList

from phalanx._src.compat.batch_functions import mask_of, needs_all_rows, shape_of, with_all_rows
from phalanx._src.compat.hooks import extend
from phalanx._src.compat.row_flow import adds_up
from phalanx._src.compat.scope import AbstractBatchShare, AbstractLiftScope, surrounding_scope
from phalanx._src.mesh.arrays import over_rows
from phalanx._src.mesh.values import AS_ARRAY
from phalanx.errors import ContextError, InputError, warn_of_slip
from phalanx.typing import PyTree

_PLAIN = "phalanx_plain_metrics"
_Moments = tuple[jax.Array, jax.Array]
_R = TypeVar("_R")


def _is_of_function(metric: keras.metrics.Metric, arguments: dict[str, Any]) -> bool:
    """Whether a metric is the mean of a function of labels and outputs, which these arguments are."""
    return isinstance(metric, keras.metrics.MeanMetricWrapper) and {"y_true", "y_pred"} <= arguments.keys()


def _is_number(metric: keras.metrics.Metric, arguments: dict[str, Any]) -> bool:
    """Whether a metric is a function that returns one number per batch instead of one value per row."""
    if not _is_of_function(metric, arguments):
        return False
    # Keras's metric functions reduce the last dim. They would return a scalar for rank 1 too, so test them with columns.
    columns = [x[:, None] if jnp.ndim(x) == 1 else x for x in (arguments["y_true"], arguments["y_pred"])]
    return shape_of(_function_of(metric), *columns) == ()


def _is_one_value(metric: keras.metrics.Metric, arguments: dict[str, Any]) -> bool:
    """Whether Keras reduces the only dim of labels and outputs, so that a batch counts as one value."""
    if not _is_of_function(metric, arguments):
        return False
    rows = arguments["y_true"], arguments["y_pred"]
    return all(jnp.ndim(x) == 1 for x in keras.tree.flatten(rows)) and shape_of(_function_of(metric), *rows) == ()


def _function_of(metric: keras.metrics.MeanMetricWrapper) -> Callable[..., Any]:
    """The function of labels and outputs whose mean a metric is."""
    return functools.partial(metric._fn, **metric._fn_kwargs)


def _needs_all_rows(
    update: Callable[..., object],
    metric: keras.metrics.Metric,
    share: AbstractBatchShare,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
) -> bool:
    """Whether the states that a metric has for the parts of a batch do not add up to that for the whole batch."""
    arguments = inspect.signature(update).bind(metric, *args, **kwargs).arguments
    if _is_of_function(metric, arguments) and update.__module__.startswith("keras."):
        return needs_all_rows(_function_of(metric), arguments["y_true"], arguments["y_pred"], source=metric._fn)
    variables = metric.variables
    if type(metric).__module__.startswith("keras.") or not variables or any(v.aggregation != "sum" for v in variables):
        return False
    state_after = functools.partial(_state_after, update, metric)
    return not adds_up(state_after, [v.value for v in variables], args, kwargs, sizes=share.sizes((args, kwargs)))


def _state_after(
    update: Callable[..., object],
    metric: keras.metrics.Metric,
    state: Sequence[jax.Array],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
) -> list[jax.Array]:
    """Returns the values of a metric's variables after an update, and assigns nothing."""
    with _as_keras_does(), keras.StatelessScope(list(zip(metric.variables, state, strict=True))) as scope:
        update(metric, *args, **kwargs)
        return [scope.get_current_value(v) for v in metric.variables]


def _is_updated_with_all_rows(
    update: Callable[..., object],
    metric: keras.metrics.Metric,
    scope: AbstractLiftScope,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
) -> bool:
    """Updates a metric with the rows of all replicas if it needs them, from the state that it has on all together. Returns whether it did.

    In a step that is not one of Keras's trainer, it only warns: not all replicas need to reach this line.
    """
    rows, share = (args, kwargs), scope.share
    if not all(map(jnp.ndim, jax.tree.leaves(rows))):
        return False
    if not share.is_whole:
        if scope.replicas_of_rows == 1 or share.example_mask() is not None:
            return False
        with share.whole_batch(()):
            if not _needs_all_rows(update, metric, share, args, kwargs):
                return False
        if not share.is_averaging:
            warn_of_slip(
                f"The states that the metric {metric.name!r} has on the replicas are added, but it does not count sums over rows. So its result "
                "depends on the number of replicas.",
                "return the rows from the step, and call metric.update_state(strategy.gather(rows, axis=0)) outside",
            )
            return False
    summed = [v for v in metric.variables if v.aggregation == "sum"]
    for variable in summed:
        variable.assign(share.total(variable.value))
    with (
        contextlib.nullcontext(rows) if share.is_whole else share.whole_batch(rows) as (values, named),
        _as_keras_does(),
    ):
        update(metric, *values, **named)
    for variable in summed:
        variable.assign(share.part_of(variable.value))
    return True


@contextlib.contextmanager
def _as_keras_does() -> Iterator[None]:
    """Metrics that a metric updates inside `update_state` get its arguments, and are updated as they are."""
    before = global_state.get_global_attribute(_PLAIN)
    global_state.set_global_attribute(_PLAIN, True)
    try:
        yield
    finally:
        global_state.set_global_attribute(_PLAIN, before)


def _warn_of_padding(what: str) -> None:
    warn_of_slip(
        f"{what} is one number per batch, so it includes the rows that pad the batch.",
        "return one value per row; Phalanx averages them without the padding",
    )


_CONTAINERS = (CompileMetrics, MetricsList)


def _update_state(
    original: Callable[..., object], self: keras.metrics.Metric, *args: PyTree, **kwargs: PyTree
) -> object:
    """Updates a metric with the real rows of a batch.

    Raises:
      ContextError: an argument has one component per replica, but no replica function runs.
    """
    try:
        return _update_with_real_rows(original, self, *args, **kwargs)
    except ContextError as e:
        if e.asked != AS_ARRAY:
            raise
        raise ContextError(
            f"{AS_ARRAY} by update_state of the metric {self.name!r}",
            e.found,
            "call metric.update_state(y, y_pred) inside the function passed to strategy.run, and metric.result() outside",
        ) from None


def _update_with_real_rows(
    original: Callable[..., object], self: keras.metrics.Metric, *args: PyTree, **kwargs: PyTree
) -> object:
    """Gives the padded rows of a batch the sample weight 0."""
    scope, is_plain = surrounding_scope(), global_state.get_global_attribute(_PLAIN)
    # The containers of compiled metrics only forward to metrics, which are wrapped too.
    if scope is None or is_plain or isinstance(self, _CONTAINERS):
        return original(self, *args, **kwargs)
    mask = scope.share.example_mask()
    if _is_updated_with_all_rows(original, self, scope, args, kwargs):
        return None
    call = inspect.signature(original)
    if "sample_weight" not in call.parameters:
        return original(self, *args, **kwargs)
    rows = {jnp.shape(x)[:1] for x in keras.tree.flatten(args) if x is not None}
    arguments = call.bind(self, *args, **kwargs).arguments
    weight, is_share = arguments.get("sample_weight"), scope.share.is_part or scope.share.is_whole
    is_one_value = weight is None and _is_one_value(self, arguments)
    if rows != {()} and (_is_number(self, arguments) or (is_one_value and is_share and mask is None)):
        rows = {()}
        if mask is not None:
            _warn_of_padding(f"The metric {self.name!r}")
    # What is one number per batch may come from the rows of this replica, even where it computes a loss with all of them.
    if is_share and rows == {()}:
        arguments["sample_weight"] = scope.share.weight_of_mean(weight)
        return original(**arguments)
    if mask is None and is_one_value:
        # Keras reduces the only dim, and counts the batch of each replica as one value.
        arguments["sample_weight"] = scope.share.weight_of_value()
        return original(**arguments)
    if mask is None or rows == {()}:
        return original(self, *args, **kwargs)
    if rows != {mask.shape}:
        if weight is None:
            raise InputError(
                f"{self.name}.update_state of {sorted(rows)} rows",
                f"the batch is padded to {mask.shape[0]} rows, so its mask does not fit these arrays.",
                "arrays whose dim 0 is the rows of the batch, or a sample_weight that is 0 for padding",
            )
        return original(self, *args, **kwargs)
    if is_one_value:
        # Keras would reduce the only dim and count the batch as one value, to which no weights per row apply. Reshape the
        # arrays to columns, and give the rows weights that add up to the same count.
        arguments.update(zip(list(arguments)[1:], (jnp.asarray(x)[:, None] for x in args), strict=False))
        weight = jnp.full(
            mask.shape, jnp.asarray(scope.share.weight_of_value(), "float32") / jnp.maximum(mask.sum(), 1)
        )
    dtype = keras.backend.standardize_dtype(self.dtype)
    weight = jnp.ones((), dtype) if weight is None else jnp.asarray(weight)
    arguments["sample_weight"] = jnp.where(mask.reshape(mask.shape + (1,) * max(0, weight.ndim - 1)), weight, 0)
    with _as_keras_does():
        return original(**arguments)


@extend(keras.losses.Loss, "__call__")
def _loss(
    original: Callable[..., jax.Array],
    self: keras.losses.Loss,
    y_true: PyTree,
    y_pred: PyTree,
    sample_weight: PyTree = None,
) -> jax.Array:
    """Rejects a mean over the rows of one of several replicas, and gives a function that needs all rows those of all replicas.

    Gradients are summed over the replicas, so a mean per replica would be counted once per replica. In `fit` the trainer
    scales it instead (`is_averaging`).
    """
    scope = surrounding_scope()
    if scope is None or isinstance(self, CompileLoss):
        return original(self, y_true, y_pred, sample_weight)
    if not scope.share.is_averaging and self.reduction not in ("sum", "none", None):
        scope.share.check_loss(self.name, self.reduction)
    # What Keras multiplies by a mask that hides all rows of a replica is 0.
    weight = mask_of(y_pred) if sample_weight is None else sample_weight
    source = self.fn if type(self).call is LossFunctionWrapper.call else type(self)
    if not scope.share.has_others or not needs_all_rows(self.call, y_true, y_pred, source=source, weight=weight):
        return original(self, y_true, y_pred, sample_weight)
    with scope.share.whole_batch((y_true, y_pred, sample_weight)) as whole:
        return original(self, *whole)


def _own_call(
    original: Callable[..., jax.Array], self: keras.losses.Loss, *args: PyTree, **kwargs: PyTree
) -> jax.Array:
    """Gives a loss class with a `__call__` of its own the rows of all replicas if it needs them."""
    return with_all_rows(lambda values, named: original(self, *values, **named), args, kwargs, source=type(self))


def _init_loss_class(cls: type, **kwargs: PyTree) -> None:
    """Wraps the `__call__` of a loss class that the user defines."""
    super(keras.losses.Loss, cls).__init_subclass__(**kwargs)
    if "__call__" in vars(cls):
        extend(cls, "__call__")(_own_call)


keras.losses.Loss.__init_subclass__ = classmethod(_init_loss_class)  # type: ignore[arg-type]


@extend(CompileLoss, "call")
def _call_losses(
    original: Callable[..., PyTree], self: CompileLoss, y_true: PyTree, y_pred: PyTree, sample_weight: PyTree = None
) -> PyTree:
    # Keras takes one array for a list of targets if it has as many rows as the model has outputs, and a replica may have any number.
    if keras.tree.is_nested(y_pred) and not keras.tree.is_nested(y_true):
        y_true = [y_true]
    return original(self, y_true, y_pred, sample_weight)


@extend(loss, "reduce_weighted_values")
def _reduce_losses(  # noqa: PLR0917 (as in Keras)
    original: Callable[..., jax.Array],
    values: jax.Array,
    sample_weight: PyTree = None,
    mask: PyTree = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: PyTree = None,
) -> jax.Array:
    """Reduces losses as Keras does. In `fit`, the result is this replica's share of the reduction over the global batch.

    Both the sum and what it is divided by are Keras's own, with whatever masks and weights.
    """
    scope = surrounding_scope()
    if scope is None or reduction in ("none", None) or not jnp.ndim(values):
        return original(values, sample_weight, mask, reduction, dtype)
    values = jnp.asarray(values)
    rows = scope.share.example_mask()
    if rows is not None:
        _require_rows("a Keras loss", values, rows)
        real = jnp.broadcast_to(over_rows(rows, values), values.shape)
        mask = real if mask is None else real & over_rows(jnp.asarray(mask, bool), values)
    weight = sample_weight if reduction == "mean_with_sample_weight" else None
    # A mean over all rows of this replica is right as it is: its share of them is the weight that it gets later.
    if not scope.share.is_part or (reduction != "sum" and mask is None and weight is None):
        return original(values, sample_weight, mask, reduction, dtype)
    total = original(values, sample_weight, mask, "sum", dtype)
    if reduction == "sum":
        return scope.share.share_of_loss(total, None)
    return scope.share.share_of_loss(total, original(jnp.ones_like(values), weight, mask, "sum", dtype))


def _require_rows(what: str, values: jax.Array, rows: jax.Array) -> None:
    """Checks that an array has a row for each place of a padded batch.

    Raises:
      InputError: it has not.
    """
    if len(values) != len(rows):
        raise InputError(
            f"{what} of {len(values)} rows",
            f"this batch is padded to {len(rows)} rows, so its mask does not fit.",
            "one value per row of the batch; or compute sample_weight from get_replica_context().example_mask",
        )


@extend(keras.layers.BatchNormalization, "__init__")
def _init_batch_normalization(
    original: Callable[..., None],
    self: keras.layers.BatchNormalization,
    *args: PyTree,
    synchronized: bool = False,
    **kwargs: PyTree,
) -> None:
    # Keras 3 raises for `synchronized=True` on every backend but TensorFlow: https://github.com/keras-team/keras/pull/18671.
    original(self, *args, **kwargs)
    self.synchronized = synchronized


@extend(keras.layers.BatchNormalization, "_moments")
def _moments(
    original: Callable[..., _Moments], self: keras.layers.BatchNormalization, inputs: jax.Array, mask: jax.Array | None
) -> _Moments:
    """Computes the statistics of BatchNormalization without padded rows, and over all replicas if `synchronized`."""
    scope = surrounding_scope()
    if scope is not None:
        scope.note_averages([self.moving_mean, self.moving_variance])
    rows = None if scope is None else scope.share.example_mask()
    if scope is None or (rows is None and not self.synchronized):
        return _moments_here(original, self, inputs, mask)
    if rows is None:
        rows = jnp.ones(inputs.shape[:1], bool)
    if inputs.shape[0] % rows.shape[0]:
        raise InputError(
            f"{self.name} of inputs {inputs.shape}",
            f"the batch is padded to {rows.shape[0]} rows, so its mask does not fit these inputs.",
            "inputs whose dim 0 is the rows of the batch",
        )
    # A layer such as TimeDistributed folds another dim into the rows, so one row of the batch may be several of the inputs.
    counts = over_rows(jnp.repeat(rows, inputs.shape[0] // rows.shape[0]), inputs)
    if mask is not None:
        counts = counts & jnp.asarray(mask, bool)[..., None]
    return scope.share.moments(
        inputs, jnp.broadcast_to(counts, inputs.shape), self._reduction_axes, everywhere=self.synchronized
    )


def _moments_here(
    original: Callable[..., _Moments], layer: keras.layers.BatchNormalization, inputs: jax.Array, mask: jax.Array | None
) -> _Moments:
    """Returns the statistics that Keras computes on one device. With `synchronized` it would call TensorFlow."""
    synchronized, layer.synchronized = layer.synchronized, False
    try:
        return original(layer, inputs, mask)
    finally:
        layer.synchronized = synchronized


def _result(original: Callable[..., _R], self: keras.metrics.Metric, *args: PyTree, **kwargs: PyTree) -> _R:
    """Returns a result over all replicas in the steps of Keras's trainer, as what a model computes from it must be that of one device."""
    scope = surrounding_scope()
    if scope is None or not scope.share.is_part:
        return original(self, *args, **kwargs)
    with scope.share.across_replicas(self.variables):
        result: _R = keras.tree.map_structure(
            lambda x: x.value if isinstance(x, keras.Variable) else x, original(self, *args, **kwargs)
        )
        return result


def _extend_metric(metric: type) -> None:
    """Wraps the methods of a metric class and of all its subclasses that exist already."""
    for name, wrapper in (("update_state", _update_state), ("result", _result)):
        if name in vars(metric):
            extend(metric, name)(wrapper)
    subclasses: list[type] = metric.__subclasses__()
    for subclass in subclasses:
        _extend_metric(subclass)


_extend_metric(keras.metrics.Metric)


def _init_subclass(cls: type, **kwargs: PyTree) -> None:
    """Wraps the methods of a metric class that the user defines later."""
    super(keras.metrics.Metric, cls).__init_subclass__(**kwargs)
    _extend_metric(cls)


keras.metrics.Metric.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[arg-type]
