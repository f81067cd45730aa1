"""Affine coupling layers of a flow: custom Keras layers, split, concat, reverse, and the change of variables."""

import math

import numpy as np
import tensorflow as tf

LAYERS = 4
rng = np.random.default_rng(0)
points = rng.normal(size=(20, 24, 2)).astype("float32")
points[..., 1] += points[..., 0] ** 2


class Coupling(tf.keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(units, activation=tf.nn.leaky_relu)
        self.scale = tf.keras.layers.Dense(1, activation="tanh")
        self.shift = tf.keras.layers.Dense(1)

    def call(self, x):
        kept, changed = tf.split(x, num_or_size_splits=2, axis=-1)
        hidden = self.hidden(kept)
        log_scale = self.scale(hidden)
        changed = changed * tf.exp(log_scale) + self.shift(hidden)
        return tf.concat([changed, kept], axis=-1), tf.squeeze(log_scale, axis=-1)


class Flow(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.couplings = [Coupling(6) for _ in range(LAYERS)]

    def call(self, x):
        total = tf.zeros_like(x[:, 0])
        for coupling in self.couplings:
            x, log_scale = coupling(x)
            total += log_scale
        return x, total


def log_normal(z):
    return -0.5 * tf.reduce_sum(z**2 + tf.math.log(2.0 * math.pi), axis=-1)


flow = Flow()
flow(points[0])
for variable in flow.trainable_variables:
    variable.assign(rng.normal(0, 0.3, variable.shape))
optimizer = tf.keras.optimizers.Adamax(learning_rate=0.02)


@tf.function(reduce_retracing=True)
def train_step(x):
    with tf.GradientTape() as tape:
        z, log_determinant = flow(x)
        loss = -tf.reduce_mean(log_normal(z) + log_determinant)
    gradients = tape.gradient(loss, flow.trainable_variables)
    optimizer.apply_gradients(zip(gradients, flow.trainable_variables))
    return loss


losses = [float(train_step(tf.constant(points[i]))) for i in range(20)]
reversed_points = tf.reverse(tf.constant(points[0]), axis=[1])
np.testing.assert_allclose(reversed_points.numpy(), points[0][:, ::-1])
