# SPDX-License-Identifier: Apache-2.0
"""What in Keras counts rows: metrics, losses and BatchNormalization leave out those that are padding."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList

from phalanx.compat.hooks import extend
from phalanx.compat.scope import surrounding_scope
from phalanx.errors import InputError


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
    scope, weighed = surrounding_scope(), global_state.get_global_attribute("phalanx_weighed")
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


@extend(keras.losses.Loss, "__call__")
def _loss(
    original: Callable[..., Any], self: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Refuses a mean over one replica's rows, which the sum of the replicas' losses counts once for each replica."""
    scope, reduction = surrounding_scope(), self.reduction
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


@extend(keras.layers.BatchNormalization, "__init__")
def _init_batch_normalization(
    original: Callable[..., None], self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
) -> None:
    # Keras refuses it on JAX, for want of replicas.
    original(self, *args, **kwargs)
    self.synchronized = synchronized


@extend(keras.layers.BatchNormalization, "_moments")
def _moments(original: Callable[..., Any], self: Any, inputs: Any, mask: Any) -> Any:
    """Leaves padded rows out of the statistics, and computes synchronized ones over all replicas."""
    scope = surrounding_scope()
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
        extend(metric, "update_state")(_update_state)
    others: list[type] = metric.__subclasses__()
    for other in others:
        _extend_metric(other)


_extend_metric(keras.metrics.Metric)


def _init_subclass(cls: type, **kwargs: Any) -> None:
    super(keras.metrics.Metric, cls).__init_subclass__(**kwargs)
    _extend_metric(cls)


keras.metrics.Metric.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[arg-type]
