"""Layers of `tf.compat.v1.layers`: functions that create and apply a layer of Keras."""

import keras
import numpy as np

from phalanx.estimator.tf1 import layers

X = np.arange(32, dtype="float32").reshape(1, 4, 4, 2)


def test_layers_without_variables_against_numpy():
    """Pooling, flattening, and dropout outside a training."""
    blocks = X.reshape(1, 2, 2, 2, 2, 2)
    np.testing.assert_allclose(layers.max_pooling2d(X, 2, 2), blocks.max(axis=(2, 4)))
    np.testing.assert_allclose(layers.average_pooling2d(X, 2, 2), blocks.mean(axis=(2, 4)))
    np.testing.assert_allclose(layers.flatten(X), X.reshape(1, 32))
    np.testing.assert_array_equal(layers.dropout(X, 0.5), X)
    dropped = np.asarray(layers.dropout(np.ones((1000,)), 0.25, training=True))
    assert set(np.round(np.unique(dropped), 5)) == {0, np.float32(1.33333)}


def test_layers_with_variables_against_numpy():
    """Ones as weights, and the moments of a batch."""
    found = layers.dense(X[0, 0], 3, kernel_initializer="ones", activation="relu")
    np.testing.assert_allclose(found, np.tile(X[0, 0].sum(axis=1, keepdims=True), 3))
    found = layers.conv2d(X, 1, 4, kernel_initializer="ones", name="mine")
    np.testing.assert_allclose(found, [[[[X.sum()]]]])
    found = layers.batch_normalization(X, training=True, epsilon=0.0)
    np.testing.assert_allclose(found, (X - X.mean((0, 1, 2))) / X.std((0, 1, 2)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layers.batch_normalization(X, epsilon=0.0), X)
    assert layers.Dense is keras.layers.Dense
