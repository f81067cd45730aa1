"""Fits the kernel of a Gaussian process: Cholesky factors, triangular solves and log-determinants."""

import math

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
inputs = tf.constant(np.sort(rng.uniform(-2, 2, (10, 1)), axis=0), dtype=tf.float32)
outputs = tf.sin(2.0 * inputs) + tf.constant(rng.normal(0, 0.1, (10, 1)), tf.float32)

log_length = tf.Variable(0.3, dtype=tf.float32)
log_scale = tf.Variable(0.0)
log_noise = tf.Variable(tf.constant(-1.0))
variables = [log_length, log_scale, log_noise]
optimizer = tf.keras.optimizers.Adam(0.1)


def kernel(a, b):
    squared = tf.reduce_sum(tf.math.squared_difference(tf.expand_dims(a, 1), tf.expand_dims(b, 0)), axis=-1)
    return tf.exp(2.0 * log_scale) * tf.exp(-0.5 * squared / tf.exp(2.0 * log_length))


def negative_log_likelihood():
    n = inputs.shape[0]
    covariance = kernel(inputs, inputs) + tf.exp(2.0 * log_noise) * tf.eye(n)
    factor = tf.linalg.cholesky(covariance)
    whitened = tf.linalg.triangular_solve(factor, outputs, lower=True)
    log_determinant = 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))
    return 0.5 * (tf.reduce_sum(whitened**2) + log_determinant + n * math.log(2 * math.pi))


@tf.function
def train_step():
    with tf.GradientTape() as tape:
        loss = negative_log_likelihood()
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss


losses = [train_step().numpy() for _ in range(20)]

# Prediction at one of the inputs is near to its output.
solved = tf.linalg.solve(kernel(inputs, inputs) + tf.exp(2.0 * log_noise) * tf.eye(10), outputs)
mean = tf.matmul(kernel(inputs[3:4], inputs), solved)
np.testing.assert_allclose(mean.numpy(), outputs[3:4].numpy(), atol=1.0)
