"""Python's `if` and `while` over tensors in a compiled function, which TensorFlow's autograph rewrites."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(20, 6)).astype("float32")
w = tf.Variable(rng.normal(size=(6,)).astype("float32"))


def newton_root(value):
    """The square root by a loop that ends when it is near."""
    guess = tf.maximum(value, 1.0)
    while tf.abs(guess * guess - value) > 1e-3:
        guess = 0.5 * (guess + value / guess)
    return guess


def shrink(gradient):
    norm = newton_root(tf.reduce_sum(gradient * gradient))
    if norm > 1.0:
        return gradient / norm
    return gradient


@tf.function
def train_step(features):
    with tf.GradientTape() as tape:
        score = tf.reduce_sum(w * features)
        if score > 0:
            loss = tf.square(score - 1.0)
        else:
            loss = tf.abs(score - 1.0)
    gradient = tape.gradient(loss, w)
    w.assign_sub(0.1 * shrink(gradient))
    return loss


losses = []
for step in range(20):
    losses.append(train_step(tf.constant(x[step])).numpy())
