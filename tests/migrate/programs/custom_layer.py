"""Layers, a metric and a loss of one's own, as in the guide "Making new layers and models via subclassing"."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import backend as K

rng = np.random.default_rng(0)
x = rng.normal(size=(32, 6)).astype("float32")
y = np.stack([x[:, 0] * x[:, 1], x[:, 2]], axis=1).astype("float32")


class Linear(tf.keras.layers.Layer):
    def __init__(self, units=32, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer=tf.zeros_initializer(), trainable=True)

    def call(self, inputs):
        return tf.nn.bias_add(tf.matmul(inputs, self.w), self.b)


class Swish(tf.keras.layers.Layer):
    def call(self, inputs):
        return inputs * tf.math.sigmoid(inputs)


class RootMeanSquare(tf.keras.metrics.Metric):
    def __init__(self, name="root_mean_square", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.square(tf.cast(y_true, self.dtype) - y_pred)
        self.total.assign_add(tf.reduce_sum(error))
        self.count.assign_add(tf.cast(tf.size(error), self.dtype))

    def result(self):
        return tf.sqrt(tf.math.divide_no_nan(self.total, self.count))


def log_cosh(y_true, y_pred):
    error = y_pred - y_true
    return K.mean(error + tf.math.softplus(-2.0 * error) - tf.math.log(2.0), axis=-1)


strategy = tf.distribute.OneDeviceStrategy("CPU:0")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((6,)), Linear(8), Swish(), Linear(2)])
    model.compile(optimizer=tf.keras.optimizers.Adagrad(0.1), loss=log_cosh, metrics=[RootMeanSquare()])
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
history = model.fit(x, y, batch_size=32, epochs=20, shuffle=False, verbose=0)
losses = [a + b for a, b in zip(history.history["loss"], history.history["root_mean_square"])]
