"""Functions of `tf.compat.v1.nn`, against NumPy."""

import numpy as np

from phalanx.estimator.tf1 import nn

X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
IDS = np.array([0, 2, 1, 1])
LOG_SHARES = X - np.log(np.exp(X).sum(axis=1, keepdims=True))


def test_losses_per_row_against_numpy():
    one_hot = np.eye(3, dtype="float32")[IDS]
    wanted = -LOG_SHARES[range(4), IDS]
    np.testing.assert_allclose(nn.softmax_cross_entropy_with_logits(labels=one_hot, logits=X), wanted, rtol=1e-5)
    np.testing.assert_allclose(nn.sparse_softmax_cross_entropy_with_logits(labels=IDS, logits=X), wanted, rtol=1e-5)
    found = nn.sigmoid_cross_entropy_with_logits(labels=one_hot, logits=X)
    p = 1 / (1 + np.exp(-X))
    np.testing.assert_allclose(found, -(one_hot * np.log(p) + (1 - one_hot) * np.log(1 - p)), rtol=1e-5)
    np.testing.assert_allclose(nn.log_softmax(X), LOG_SHARES, rtol=1e-5)
