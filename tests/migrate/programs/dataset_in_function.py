"""A whole epoch in one compiled function, with a loop over the dataset, as the tutorial "Custom training" also has it."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(32, 3)).astype("float32")
y = x @ rng.normal(size=(3, 1)).astype("float32")
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
train_dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
with strategy.scope():
    w = tf.Variable(tf.zeros([3, 1]))


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(features, w) - labels))
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss


@tf.function
def distributed_train_epoch(dataset):
    total_loss = 0.0
    num_batches = 0
    for batch in dataset:
        per_replica_losses = strategy.run(train_step, args=(batch,))
        total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        num_batches += 1
    return total_loss / tf.cast(num_batches, dtype=tf.float32)


losses = []
for epoch in range(20):
    losses.append(float(distributed_train_epoch(train_dist_dataset)))
