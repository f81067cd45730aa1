"""An Estimator under `ParameterServerStrategy`."""

import keras
import numpy as np
import pytest

import phalanx
import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError

ROWS, RATE = 16, 0.05
X = np.random.default_rng(0).normal(size=(160, 3)).astype("float32")
Y = X @ np.float32([[1], [-2], [3]])


@pytest.fixture(scope="module")
def strategy():
    """Two workers and one server."""
    strategy = phalanx.ParameterServerStrategy(workers=2, ps=1)
    yield strategy
    strategy.close()


def model_fn(features, labels, mode):
    """A linear model."""
    predictions = keras.layers.Dense(1, name="line")(features)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"y": predictions})
    loss = keras.losses.MeanSquaredError()(labels, predictions)
    train_op = estimator.minimize(keras.optimizers.SGD(RATE), loss)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def endless():
    """Batches of every worker."""
    while True:
        for i in range(0, len(X), ROWS):
            yield X[i : i + ROWS], Y[i : i + ROWS]


def finite():
    """Ten batches."""
    return [(X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, len(X), ROWS)]


def test_scheduled_steps_learn_the_line(strategy, tmp_path):
    """Workers train, the coordinator saves, and one device evaluates and predicts what NumPy computes of the weights."""
    config = estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=100)
    model = estimator.Estimator(model_fn, tmp_path, config)
    model.train(endless, max_steps=300)
    assert model.get_variable_value("global_step") >= 300  # Steps that were scheduled already are made.
    kernel, bias = (model.get_variable_value(f"line/{name}") for name in ("kernel", "bias"))
    np.testing.assert_allclose(kernel, [[1], [-2], [3]], atol=1e-3)
    found = model.evaluate(finite)
    np.testing.assert_allclose(found["loss"], np.mean((X @ kernel + bias - Y) ** 2), rtol=1e-3, atol=1e-9)
    predicted = np.array([row["y"] for row in model.predict(lambda: [X])])
    np.testing.assert_allclose(predicted, X @ kernel + bias, rtol=1e-5, atol=1e-5)


def test_training_ends_with_the_data(strategy, tmp_path):
    """Each worker has ten batches. The training ends with those of the first worker that has no further one."""
    model = estimator.Estimator(model_fn, tmp_path, estimator.RunConfig(train_distribute=strategy))
    model.train(finite)
    assert 10 <= model.get_variable_value("global_step") <= 20


def test_parameter_servers_do_not_evaluate(strategy):
    """The error names what evaluates instead."""
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)eval_distribute=Parameter.*steps of a training.*HINT: .*Mirrored"
    ):
        estimator.RunConfig(eval_distribute=strategy)
