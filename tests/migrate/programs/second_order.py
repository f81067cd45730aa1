"""A network for a differential equation: the loss contains a derivative of the network."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
t = tf.constant(np.linspace(0.0, 1.0, 16)[:, None], dtype=tf.float32)
w1 = tf.Variable(rng.normal(size=(1, 8)).astype("float32"))
b1 = tf.Variable(tf.zeros(8))
w2 = tf.Variable(rng.normal(0, 0.5, (8, 1)).astype("float32"))
weights = [w1, b1, w2]


def u(t):
    return tf.matmul(tf.sin(tf.matmul(t, w1) + b1), w2)


@tf.function
def train():
    with tf.GradientTape() as outer:
        # u' = -u, and u(0) = 1
        slope = tf.matmul(tf.cos(tf.matmul(t, w1) + b1) * tf.squeeze(w1, 0), w2)
        residual = tf.reduce_mean(tf.square(slope + u(t)))
        start = tf.reduce_sum(tf.square(u(tf.zeros((1, 1))) - 1.0))
        loss = residual + start
    gradients = outer.gradient(loss, weights)
    for weight, gradient in zip(weights, gradients):
        weight.assign_sub(0.02 * gradient)
    return loss


losses = [train().numpy() for _ in range(20)]
