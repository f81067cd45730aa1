"""Metrics of `tf.compat.v1.metrics`, against NumPy."""

import numpy as np
import pytest

from phalanx.estimator.tf1 import metrics

RANDOM = np.random.default_rng(0)
Y, P, W = RANDOM.random((3, 6)).astype("float32")
YES, GUESS = np.array([1, 1, 0, 0, 1, 0]), np.array([1, 0, 1, 0, 1, 0])


@pytest.mark.parametrize("weights", [None, W])
def test_errors_against_numpy(weights):
    """Each row counts by its weight, whether rows have a dim or not."""
    for shape in ((6,), (6, 1)):
        y, p = Y.reshape(shape), P.reshape(shape)
        absolute = np.average(np.abs(Y - P), weights=weights)
        squared = np.average(np.square(Y - P), weights=weights)
        found = {name: getattr(metrics, name)(y, p, weights)[0] for name in dir(metrics) if name.endswith("_error")}
        np.testing.assert_allclose(found["mean_absolute_error"], absolute, rtol=1e-6)
        np.testing.assert_allclose(found["mean_squared_error"], squared, rtol=1e-6)
        np.testing.assert_allclose(found["root_mean_squared_error"], np.sqrt(squared), rtol=1e-6)
    np.testing.assert_allclose(metrics.mean(Y, weights)[0], np.average(Y, weights=weights), rtol=1e-6)


def test_pairs_of_values():
    """Both parts are the value of the rows so far, whatever a program of TensorFlow 1 does with them. A short batch counts by its rows."""
    value, update_op = metrics.accuracy(YES, GUESS)
    assert float(value) == float(update_op) == pytest.approx(4 / 6)
    metric = metrics.mean_absolute_error(Y[:4], P[:4])
    again = metrics._updated(metric.metric, Y[4:], P[4:], None)
    np.testing.assert_allclose(again[0], np.abs(Y - P).mean(), rtol=1e-6)


def test_classes_against_numpy():
    """How often predictions are right, of all, of the predicted, and of the wanted."""
    assert metrics.accuracy(YES[:, None], GUESS)[0] == pytest.approx(4 / 6)
    assert metrics.precision(YES, GUESS)[0] == pytest.approx(2 / 3)
    assert metrics.recall(YES, GUESS)[0] == pytest.approx(2 / 3)
    assert metrics.auc(YES, YES.astype("float32"), name="mine").metric.name == "mine"
    assert metrics.auc(YES, YES.astype("float32"))[0] == pytest.approx(1)
    pairs = [(a, b) for a in P[YES == 1] for b in P[YES == 0]]
    area = np.mean([a > b for a, b in pairs])
    assert metrics.auc(YES, P, num_thresholds=1000)[0] == pytest.approx(area, abs=0.02)
