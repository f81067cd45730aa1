"""`minimize`: gradients and updates in a model function."""

import keras
import numpy as np
from one_weight import WEIGHT_AFTER, X, Y, made, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError, TapeError


def minimizing(loss_fn, optimizer=None, var_list=lambda w, v: None):
    """A model function that minimizes `loss_fn(features, labels, weight, other)`."""

    def fn(features, labels, mode):
        weight, other = keras.Variable(1.0, name="weight"), keras.Variable(1.0, name="other")
        loss = loss_fn(features["x"], labels, weight, other)
        train_op = estimator.minimize(optimizer or keras.optimizers.SGD(0.1), loss, var_list(weight, other))
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return fn


def squared(x, y, weight, other):
    """A mean squared error in which `other` is a factor."""
    return keras.ops.mean((x * weight.value * other.value - y) ** 2)


test_losses_that_are_refused = refusals(
    InvalidArgumentError,
    (minimizing(squared, optimizer=3), ["optimizer=3", "must be"]),
    (minimizing(lambda x, y, w, v: 3.0), ["loss=3.0", "is not an array"]),
    (minimizing(lambda x, y, w, v: "text"), ["loss='text'", "is not an array"]),
    (minimizing(lambda x, y, w, v: keras.ops.mean(x)), ["minimize(loss=", "depends on no trainable variable"]),
    (minimizing(squared, var_list=lambda w, v: 3), ["var_list=3", "a list of variables"]),
    (minimizing(squared, var_list=lambda w, v: []), ["minimize(loss=", "depends on no trainable variable"]),
    (minimizing(lambda x, y, w, v: x * w.value), ["a loss of float32[2]", "a floating scalar"]),
    call=lambda fn: made("model", fn).train(rows()),
)


def test_names_are_no_variables(tmp_path):
    with refused((InvalidArgumentError, TapeError), ["'weight'", "variable"]):
        made(tmp_path, minimizing(squared, var_list=lambda w, v: ["weight"])).train(rows())


def test_only_the_listed_variables_are_trained(tmp_path):
    """The others keep their values. An evaluation trains nothing, although the model function calls `minimize`."""
    model = made(tmp_path, minimizing(squared, var_list=lambda w, v: [w])).train(rows(2))
    losses = [model.evaluate(rows(2))["loss"] for _ in range(2)]
    assert losses[0] == losses[1]
    np.testing.assert_allclose(model.get_variable_value("weight"), WEIGHT_AFTER[2], rtol=1e-6)
    assert model.get_variable_value("other") == 1


def test_layer_from_outside_is_no_part_of_the_model(tmp_path):
    """Its variables are not those of the graph, so that there is nothing to train."""
    layer = keras.layers.Dense(1)
    layer.build((None, 1))

    def fn(features, labels, mode):
        loss = keras.ops.mean((layer(features["x"][:, None])[:, 0] - labels) ** 2)
        return estimator.EstimatorSpec(mode, loss=loss, train_op=estimator.minimize(keras.optimizers.SGD(), loss))

    with refused(InvalidArgumentError, ["depends on no trainable variable", "create the layers in the model_fn"]):
        made(tmp_path, fn).train(lambda: [(X, Y)])
