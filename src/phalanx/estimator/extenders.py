# SPDX-License-Identifier: Apache-2.0
"""`add_metrics`: an Estimator with more metrics."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.config import RunConfig
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys
from phalanx.typing import PyTree

_PARAMETERS = ("features", "labels", "predictions", "config")


def add_metrics(estimator: Estimator, metric_fn: Callable[..., dict[str, Any]]) -> Estimator:
    """Returns an Estimator that also computes more metrics. May be called outside all scopes.

    Args:
      estimator: the Estimator. It is not modified.
      metric_fn: function that takes any of the parameters `features`, `labels`, `predictions` and `config`. Returns a dict like
        `eval_metric_ops`.

    Raises:
      InvalidArgumentError: `estimator` is not an Estimator, or `metric_fn` has another parameter.

    Source: tf.estimator.add_metrics.

    Example:
      >>> import keras
      >>> import phalanx.estimator as estimator
      >>> def mean_error(labels, predictions):
      ...     metric = keras.metrics.MeanAbsoluteError()
      ...     metric.update_state(labels, predictions["predictions"])
      ...     return {"mean_error": metric}
      >>> def extended(model):
      ...     return estimator.add_metrics(model, mean_error)
    """
    arguments.instance("estimator", estimator, Estimator, "add_metrics(estimator, metric_fn)")
    arguments.function("metric_fn", metric_fn, "def metric_fn(labels, predictions)")
    # By name: the rule of extenders.py in tf.estimator. A metric_fn asks for what it needs.
    names = list(inspect.signature(metric_fn).parameters)
    if not set(names) <= set(_PARAMETERS):
        raise InvalidArgumentError(
            f"metric_fn={shown(metric_fn)} with the parameters {names}",
            f"the parameters are {_PARAMETERS}.",
            "def metric_fn(labels, predictions)",
        )
    inner = estimator.model_fn

    def model_fn(features: PyTree, labels: PyTree, mode: str, config: RunConfig) -> EstimatorSpec:
        spec = inner(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        values = {"features": features, "labels": labels, "predictions": spec.predictions, "config": config}
        metrics = metric_fn(**{name: values[name] for name in names})
        if not isinstance(metrics, Mapping):
            raise InvalidArgumentError(
                f"a metric_fn that returns {shown(metrics)}", "must return a dict.", 'return {"error": metric}'
            )
        # The new metrics come last, so they replace those of the same name, as in tf.estimator.
        return replace(spec, eval_metric_ops={**spec.metrics, **metrics})

    return estimator.extended(model_fn)
