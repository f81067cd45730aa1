"""Losses of `tf.compat.v1.losses`, against NumPy."""

import numpy as np
from refusals import refusals

from phalanx.errors import InvalidArgumentError
from phalanx.estimator.tf1 import losses

RANDOM = np.random.default_rng(0)
Y, P = RANDOM.random((2, 4, 3)).astype("float32")
IDS = np.array([0, 2, 1, 1])
ONE_HOT = np.eye(3, dtype="float32")[IDS]
LOG_SHARES = P - np.log(np.exp(P).sum(axis=1, keepdims=True))


def test_means_against_numpy():
    """Over all elements, or over rows for classes."""
    np.testing.assert_allclose(losses.mean_squared_error(Y, P), np.square(Y - P).mean(), rtol=1e-6)
    np.testing.assert_allclose(losses.absolute_difference(Y, P, 2), 2 * np.abs(Y - P).mean(), rtol=1e-6)
    found = losses.sigmoid_cross_entropy(Y, P)
    np.testing.assert_allclose(found, (np.log1p(np.exp(P)) - Y * P).mean(), rtol=1e-6)
    wanted = -(ONE_HOT * LOG_SHARES).sum(axis=1).mean()
    np.testing.assert_allclose(losses.softmax_cross_entropy(ONE_HOT, P), wanted, rtol=1e-6)
    for ids in (IDS, IDS[:, None]):
        np.testing.assert_allclose(losses.sparse_softmax_cross_entropy(ids, P), wanted, rtol=1e-6)


def test_reductions_to_a_mean_and_a_sum():
    """With equal weights, three reductions are one."""
    for name in ("MEAN", "SUM_OVER_BATCH_SIZE", "SUM_BY_NONZERO_WEIGHTS"):
        found = losses.mean_squared_error(Y, P, reduction=getattr(losses.Reduction, name))
        np.testing.assert_allclose(found, np.square(Y - P).mean(), rtol=1e-6)
    found = losses.mean_squared_error(Y, P, reduction=losses.Reduction.SUM)
    np.testing.assert_allclose(found, np.square(Y - P).sum(), rtol=1e-6)


def test_weight_cancels_in_the_weighted_mean():
    """`Reduction.MEAN` divides by the sum of the weights, the other means by the number of elements."""
    mean = np.square(Y - P).mean()
    for name, weights, wanted in (("MEAN", 3.0, mean), ("MEAN", 0, 0), ("SUM_OVER_BATCH_SIZE", 3.0, 3 * mean)):
        loss = losses.mean_squared_error(Y, P, weights, getattr(losses.Reduction, name))
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)


test_options_that_are_refused = refusals(
    InvalidArgumentError,
    ({"weights": np.ones(4)}, ["weights=", "only a number", "sample_weight"]),
    ({"reduction": "none"}, ["reduction='none'", "must be one of"]),
    ({"reduction": ["a"]}, ["reduction=['a']", "must be one of"]),
    call=lambda options: losses.mean_squared_error(Y, P, **options),
)
