"""Loops and branches as functions: while_loop, map_fn, scan and cond in a trained recurrence."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
sequences = tf.constant(rng.normal(size=(20, 6, 3)), tf.float32)
w = tf.Variable(rng.normal(0, 0.4, (3, 3)).astype("float32"))
b = tf.Variable(tf.zeros([3]))


def fold(sequence):
    """The last state of a recurrence, by `while_loop`."""

    def body(i, state):
        return i + 1, tf.tanh(tf.linalg.matvec(w, state) + sequence[i] + b)

    _, state = tf.while_loop(lambda i, state: i < 6, body, (tf.constant(0), tf.zeros([3])), maximum_iterations=6)
    return state


def states(sequence):
    """All states, by `scan`."""
    return tf.scan(
        lambda state, row: tf.tanh(tf.linalg.matvec(w, state) + row + b), sequence, initializer=tf.zeros([3])
    )


def penalty(value):
    return tf.cond(value > 1.0, lambda: value * 0.1, lambda: value * value * 0.1)


@tf.function
def train_step(sequence, which):
    with tf.GradientTape() as tape:
        all_states = states(sequence)
        norms = tf.map_fn(lambda state: tf.reduce_sum(tf.abs(state)), all_states)
        largest = tf.cond(which > 1, true_fn=lambda: tf.reduce_max(norms), false_fn=lambda: tf.reduce_sum(norms) / 3.0)
        chosen = tf.cond(which > 0, lambda: largest, lambda: tf.reduce_mean(norms))
        loss = tf.square(chosen - 0.5) + penalty(tf.reduce_sum(tf.square(all_states[-1])))
    dw, db = tape.gradient(loss, [w, b])
    w.assign_sub(0.1 * dw)
    b.assign_sub(0.1 * db)
    return loss


losses = []
for step in range(20):
    np.testing.assert_allclose(fold(sequences[step]), states(sequences[step])[-1], rtol=1e-4, atol=1e-5)
    losses.append(train_step(sequences[step], tf.constant(step % 3)).numpy())
