"""Layers and a model as `tf.Module`, saved as a SavedModel, as the guide to modules has them."""

import tempfile

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = tf.constant(rng.normal(size=(20, 3)), dtype=tf.float32)
y = tf.reduce_sum(x**2, axis=1, keepdims=True)


class Dense(tf.Module):
    def __init__(self, in_features, out_features, name=None):
        super().__init__(name=name)
        self.w = tf.Variable(rng.normal(0, 0.5, (in_features, out_features)).astype("float32"), name="w")
        self.b = tf.Variable(tf.zeros([out_features]), name="b")

    def __call__(self, x):
        return tf.nn.relu(tf.matmul(x, self.w) + self.b)


class Network(tf.Module):
    def __init__(self):
        super().__init__()
        self.hidden = Dense(3, 8)
        self.out = Dense(8, 1)

    @tf.function
    def __call__(self, x):
        return self.out(self.hidden(x))


network = Network()
losses = []
for _ in range(20):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(network(x) - y))
    gradients = tape.gradient(loss, network.trainable_variables)
    for variable, gradient in zip(network.trainable_variables, gradients):
        variable.assign_sub(0.02 * gradient)
    losses.append(float(loss))
tf.saved_model.save(network, tempfile.mkdtemp())
