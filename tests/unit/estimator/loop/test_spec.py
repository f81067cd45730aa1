"""`EstimatorSpec` and `Scaffold`: what a model function returns."""

import jax.numpy as jnp
import keras
from refusals import refusals, refused

import phalanx
import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError

ONE = jnp.float32(1)
TRAIN, EVAL, PREDICT = "train", "eval", "infer"


test_specifications_that_are_refused = refusals(
    InvalidArgumentError,
    ({"mode": "other"}, ["mode='other'", "must be one of"]),
    ({"mode": TRAIN, "loss": ONE}, ["mode='train'", "without train_op", "train_op=estimator.minimize"]),
    ({"mode": TRAIN, "train_op": []}, ["mode='train'", "without loss"]),
    ({"mode": EVAL}, ["mode='eval'", "without loss"]),
    ({"mode": PREDICT}, ["mode='infer'", "without predictions"]),
    ({"mode": EVAL, "loss": jnp.ones(2)}, ["a loss of float32[2]", "a floating scalar"]),
    ({"mode": EVAL, "loss": 3}, ["a loss of int32[]", "a floating scalar"]),
    ({"mode": EVAL, "loss": "text"}, ["loss='text'", "not an array"]),
    ({"mode": EVAL, "loss": ONE, "eval_metric_ops": 3}, ["eval_metric_ops=3", "must be a dict"]),
    ({"mode": EVAL, "loss": ONE, "eval_metric_ops": {"a": 3}}, ["eval_metric_ops={'a': 3}", "Keras metrics"]),
    ({"mode": EVAL, "loss": ONE, "eval_metric_ops": {3: (ONE, ONE)}}, ["eval_metric_ops={3", "Keras metrics"]),
    ({"mode": EVAL, "loss": ONE, "evaluation_hooks": [3]}, ["evaluation_hooks=[3]", "not a SessionRunHook"]),
    ({"mode": EVAL, "loss": ONE, "training_chief_hooks": 3}, ["training_chief_hooks=3", "not a SessionRunHook"]),
    ({"mode": EVAL, "loss": ONE, "scaffold": 3}, ["scaffold=3", "must be a Scaffold"]),
    ({"mode": TRAIN, "loss": ONE, "train_op": 3}, ["train_op=3", "not an update"]),
    ({"mode": TRAIN, "loss": ONE, "train_op": [print, ["text"]]}, ["train_op='text'", "not an update"]),
    ({"mode": PREDICT, "predictions": "text"}, ["predictions='text'", "an array"]),
    ({"mode": PREDICT, "predictions": {}}, ["predictions={}", "an array"]),
    ({"mode": PREDICT, "predictions": ONE, "export_outputs": 3}, ["export_outputs=3", "must be a dict"]),
    call=lambda options: estimator.EstimatorSpec(**options),
)


def test_losses_and_updates_of_all_kinds():
    """A loss of one element is a scalar, as in TensorFlow. Updates are functions, variables, arrays, and lists of these."""
    assert estimator.EstimatorSpec(EVAL, loss=jnp.ones(1)).loss.shape == ()
    assert estimator.EstimatorSpec(EVAL, loss=ONE).metrics == {}
    spec = estimator.EstimatorSpec(TRAIN, loss=ONE, train_op=[print, [keras.Variable(0.0), ONE]])
    assert len(spec.train_op) == 2


def test_saver_of_a_scaffold():
    assert estimator.Scaffold().saver is None
    checkpoint = phalanx.train.Checkpoint(step=keras.Variable(0))
    assert estimator.Scaffold(checkpoint).saver is checkpoint
    with refused(InvalidArgumentError, ["saver=3", "must be a Checkpoint"]):
        estimator.Scaffold(3)
