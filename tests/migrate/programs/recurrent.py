"""A recurrent cell written by hand, with tf.scan, and a Newton iteration with tf.while_loop."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
sequences = rng.normal(size=(20, 5, 8, 3)).astype("float32")  # steps, time, batch, features
goals = np.tanh(sequences.sum((1, 3))).astype("float32")
kernel = tf.Variable(rng.normal(0, 0.4, (3, 4)).astype("float32"))
recurrent = tf.Variable(rng.normal(0, 0.4, (4, 4)).astype("float32"))
readout = tf.Variable(rng.normal(0, 0.4, (4, 1)).astype("float32"))


def cell(state, inputs):
    return tf.tanh(tf.matmul(inputs, kernel) + tf.matmul(state, recurrent))


def root(a):
    """Returns the square root, by Newton's method."""
    _, x = tf.while_loop(
        lambda i, x: i < 20,
        lambda i, x: (i + 1, 0.5 * (x + a / x)),
        [tf.constant(0), tf.ones_like(a)],
    )
    return x


@tf.function(jit_compile=False)
def train(inputs, goal):
    with tf.GradientTape() as tape:
        states = tf.scan(cell, inputs, initializer=tf.zeros((8, 4)))
        output = tf.squeeze(tf.matmul(states[-1], readout), axis=-1)
        loss = tf.reduce_mean(tf.math.squared_difference(output, goal))
    variables = [kernel, recurrent, readout]
    for variable, gradient in zip(variables, tape.gradient(loss, variables)):
        variable.assign_sub(0.2 * gradient)
    return loss


losses = []
for inputs, goal in zip(sequences, goals):
    loss = train(tf.constant(inputs), tf.constant(goal))
    losses.append(root(loss).numpy())
