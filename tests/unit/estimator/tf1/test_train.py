"""Optimizers and learning rates of `tf.compat.v1.train`, against formulas by hand."""

import functools

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from one_weight import made, rows
from refusals import refused

import phalanx.estimator as estimator
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.estimator import tf1


def training(make, update=None):
    """A model function whose loss is the weight, so that its gradient is 1."""

    def fn(features, labels, mode):
        weight = keras.Variable(1.0, name="weight")
        loss = weight.value * 1.0
        optimizer = make()
        train_op = update(optimizer, loss) if update else optimizer.minimize(loss, tf1.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return fn


RATE, THREE = 0.1, np.arange(1, 4)
DESCENT = functools.partial(tf1.train.GradientDescentOptimizer, RATE)
# Ftrl without regularization, and with a weight of 1.
LINEAR_TERM = 1 - (np.sqrt(1.1) - np.sqrt(0.1)) / RATE


@pytest.mark.parametrize(
    ("make", "steps", "wanted"),
    [
        (DESCENT, 3, 0.7),
        (lambda: tf1.train.GradientDescentOptimizer(lambda: RATE), 3, 0.7),
        (lambda: tf1.train.MomentumOptimizer(RATE, 0.5), 3, 1 - RATE * (1 + 1.5 + 1.75)),
        (lambda: tf1.train.MomentumOptimizer(RATE, 0.5, use_nesterov=True), 3, 1 - RATE * (1.5 + 1.75 + 1.875)),
        (lambda: tf1.train.AdamOptimizer(RATE), 3, 0.7),
        (lambda: tf1.train.AdagradOptimizer(RATE), 3, 1 - np.sum(RATE / np.sqrt(0.1 + THREE))),
        (lambda: tf1.train.RMSPropOptimizer(RATE), 3, 1 - np.sum(RATE / np.sqrt(1 - 0.9**THREE))),
        (lambda: tf1.train.FtrlOptimizer(RATE), 1, -LINEAR_TERM * RATE / np.sqrt(1.1)),
    ],
)
def test_optimizers_by_hand(make, steps, wanted, tmp_path):
    """With a gradient of 1, the formulas of the optimizers give the weight."""
    model = made(tmp_path, training(make)).train(rows(steps))
    np.testing.assert_allclose(model.get_variable_value("weight"), wanted, rtol=1e-5)


def test_gradients_in_two_parts(tmp_path):
    """`compute_gradients` and `apply_gradients`, with a change between them; the variables are there to read."""

    def halved(optimizer, loss):
        pairs = optimizer.compute_gradients(loss)
        return optimizer.apply_gradients([(g / 2, v) for g, v in pairs], tf1.train.get_global_step())

    model = made(tmp_path, training(DESCENT, halved)).train(rows(2))
    np.testing.assert_allclose(model.get_variable_value("weight"), 0.9, rtol=1e-6)


def test_learning_rates_of_steps(tmp_path):
    """Rates that decay with the number of steps, as the formulas of TensorFlow say."""
    step = keras.Variable(15, dtype="int32")
    for given in (step, 15, jnp.int32(15)):
        found = tf1.train.exponential_decay(0.1, given, 10, 0.5)
        np.testing.assert_allclose(found, 0.1 * 0.5**1.5, rtol=1e-6)
    np.testing.assert_allclose(tf1.train.exponential_decay(0.1, step, 10, 0.5, staircase=True), 0.05, rtol=1e-6)
    np.testing.assert_allclose(tf1.train.polynomial_decay(0.1, step, 30, 0.02, 2), 0.08 * 0.25 + 0.02, rtol=1e-6)
    np.testing.assert_allclose(tf1.train.polynomial_decay(0.1, step, 10, 0.02), 0.02, rtol=1e-6)

    def decaying():
        return tf1.train.GradientDescentOptimizer(
            tf1.train.exponential_decay(0.1, tf1.train.get_or_create_global_step(), 1, 0.5)
        )

    model = made(tmp_path, training(decaying)).train(rows(3))
    np.testing.assert_allclose(model.get_variable_value("weight"), 1 - 0.1 * 1.75, rtol=1e-6)


def test_calls_that_are_refused(tmp_path):
    """A rate that is no number, and updates outside a model function."""
    with refused(InvalidArgumentError, ["learning_rate='fast'", "a number, or an array"]):
        tf1.train.GradientDescentOptimizer("fast")
    with refused(ContextError, ["optimizer.apply_gradients outside a model function"]):
        tf1.train.GradientDescentOptimizer(0.1).apply_gradients([])
    with refused(ContextError, ["optimizer.minimize outside a model function"]):
        tf1.train.GradientDescentOptimizer(0.1).compute_gradients(jnp.float32(1))
    with refused(InvalidArgumentError, ["apply_gradients([])", "no gradients"]):
        made(tmp_path, training(DESCENT, lambda optimizer, loss: optimizer.apply_gradients([]))).train(rows(1))


def test_update_of_several_variables(tmp_path):
    def fn(features, labels, mode):
        spec, second = training(DESCENT)(features, labels, mode), keras.Variable(0.0, name="other", trainable=False)
        update = tf1.group(spec.train_op, tf1.group(lambda: second.assign_add(1.0)))
        return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=update)

    model = made(tmp_path, fn).train(rows(2))
    np.testing.assert_allclose([model.get_variable_value(n) for n in ("weight", "other")], [0.8, 2], rtol=1e-6)
