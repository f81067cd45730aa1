"""The model functions with which the recorder has seen steps, hooks and files."""

import itertools

import jax.numpy as jnp
import keras
from one_weight import X, Y

import phalanx.estimator as estimator
from phalanx.estimator import tf1


def rows(count=None):
    """An input function of `count` batches of two rows, or of batches without end."""
    return lambda: itertools.repeat((X, Y)) if count is None else [(X, Y)] * count


def unlabelled(count=None):
    return lambda: itertools.repeat(X) if count is None else [X] * count


def model_fn(features, labels, mode, params):
    weight = keras.Variable(1.0, name="weight")
    output = features["x"] * weight.value
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = jnp.mean((output - labels) ** 2) if labels is not None else jnp.mean(output**2)
    train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, tf1.train.get_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def counting_model_fn(features, labels, mode, params):
    """A model whose variable counts steps. Its loss is NaN from the step that the parameters name."""
    weight = keras.Variable(1.0, name="weight")
    step = estimator.identity(tf1.train.get_global_step().value, "steps")
    value = estimator.identity(weight.value, "value")
    loss = jnp.where(step == params.get("nan_at", -1), jnp.nan, value) + 0 * features["x"].sum()
    mean = keras.metrics.Mean()
    mean.update_state(value)
    return estimator.EstimatorSpec(
        mode,
        predictions=features,
        loss=loss,
        train_op=lambda: weight.assign_add(1.0),
        eval_metric_ops={"mean": mean},
        training_hooks=[hook() for hook in params.get("training_hooks", [])],
    )


def counting(folder, params=None, **options):
    config = estimator.RunConfig(**{"save_summary_steps": 0, "log_step_count_steps": None, **options})
    return estimator.Estimator(counting_model_fn, str(folder), config, params or {})
