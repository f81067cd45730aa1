"""Saves, trains on, restores and trains again, as in the guide "Training checkpoints"."""

import tempfile

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = tf.constant(rng.normal(size=(16, 3)), dtype=tf.float32)
y = tf.constant(rng.normal(size=(16, 1)), dtype=tf.float32)
w = tf.Variable(rng.normal(size=(3, 1)).astype("float32"), name="w")
step_counter = tf.Variable(0, trainable=False, dtype=tf.int32)

directory = tempfile.mkdtemp()
ckpt = tf.train.Checkpoint(step=step_counter, w=w)
manager = tf.train.CheckpointManager(ckpt, directory, max_to_keep=3)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    step_counter.assign_add(1)
    return loss


losses = []
for _ in range(10):
    losses.append(float(train_step(x, y)))
    if int(step_counter) == 5:
        save_path = manager.save()
# Back to the fifth step: the next losses are those of the steps 6 to 15.
ckpt.restore(tf.train.latest_checkpoint(directory))
for _ in range(10):
    losses.append(float(train_step(x, y)))
assert int(step_counter) == 15
