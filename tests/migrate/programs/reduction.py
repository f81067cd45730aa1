"""Evaluation under two replicas: `all_reduce`, `gather`, local results, metrics, and the replica's number."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.default_rng(0)
data = rng.normal(size=(20, 8, 3)).astype("float32")

with strategy.scope():
    weights = tf.Variable(rng.normal(size=(3, 1)).astype("float32"))
    bias = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN, synchronization=tf.VariableSynchronization.ON_READ)
    seen = tf.keras.metrics.Sum(name="seen")
    mean = tf.keras.metrics.Mean(name="mean")
optimizer_rate = 0.1


def step_fn(x):
    context = tf.distribute.get_replica_context()
    n = context.num_replicas_in_sync
    with tf.GradientTape() as tape:
        predictions = tf.matmul(x, weights)
        loss = tf.nn.compute_average_loss(
            tf.square(predictions[:, 0] - x[:, 0]), global_batch_size=tf.shape(x)[0] * n
        ) + tf.nn.scale_regularization_loss(0.01 * tf.nn.l2_loss(weights))
    gradient = tape.gradient(loss, weights)
    gradient = context.all_reduce(tf.distribute.ReduceOp.SUM, gradient)
    weights.assign_sub(optimizer_rate * gradient)
    seen.update_state(tf.cast(tf.shape(x)[0], tf.float32))
    mean.update_state(predictions)
    return loss, predictions


@tf.function
def train(values):
    per_replica_loss, per_replica_predictions = strategy.run(step_fn, args=(values,))
    total = strategy.reduce("SUM", per_replica_loss, axis=None)
    return total, strategy.gather(per_replica_predictions, axis=0)


losses = []
for step in range(20):
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(data[step, context.replica_id_in_sync_group :: 2])
    )
    locals_ = strategy.experimental_local_results(values)
    assert len(locals_) == strategy.num_replicas_in_sync
    loss, predictions = train(values)
    assert predictions.shape == (8, 1)
    losses.append(loss.numpy())
assert seen.result().numpy() == 160.0
assert np.isfinite(mean.result().numpy())
