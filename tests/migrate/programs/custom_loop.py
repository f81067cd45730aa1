"""A training loop of its own under two replicas, as the tutorial "Custom training" has it."""

import numpy as np
import tensorflow as tf

GLOBAL_BATCH_SIZE = 16
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.default_rng(0)
x_train = rng.normal(size=(20, GLOBAL_BATCH_SIZE, 5)).astype("float32")
y_train = (x_train.sum(-1, keepdims=True) > 0).astype("float32")

with strategy.scope():
    # The loss of each example: the strategy adds up the replicas.
    loss_object = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction=tf.keras.losses.Reduction.NONE)

    def compute_loss(labels, predictions):
        per_example_loss = loss_object(labels, predictions)
        return tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)

    model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation=tf.nn.tanh), tf.keras.layers.Dense(1)])
    model.build((None, 5))
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.5)
    accuracy = tf.keras.metrics.BinaryAccuracy(threshold=0.0)

weights = np.random.default_rng(1)
model.set_weights([weights.normal(0, 0.5, w.shape) for w in model.get_weights()])


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = compute_loss(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    accuracy.update_state(labels, predictions)
    return loss


@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


losses = []
for step in range(20):
    # Each replica takes half of the batch.
    def rows(context, step=step):
        half = GLOBAL_BATCH_SIZE // context.num_replicas_in_sync
        part = slice(context.replica_id_in_sync_group * half, (context.replica_id_in_sync_group + 1) * half)
        return tf.constant(x_train[step, part]), tf.constant(y_train[step, part])

    batch = strategy.experimental_distribute_values_from_function(rows)
    losses.append(distributed_train_step(batch).numpy())
assert 0 <= accuracy.result() <= 1
