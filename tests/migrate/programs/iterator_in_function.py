"""An iterator in a compiled function, over a distributed dataset, as the guide to distributed input has it."""

import numpy as np
import tensorflow as tf

GLOBAL_BATCH_SIZE = 8
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
rng = np.random.default_rng(0)
x = rng.normal(size=(160, 4)).astype("float32")
y = x[:, :1] * x[:, 1:2]

dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(GLOBAL_BATCH_SIZE)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)
dist_dataset = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(1)]
    )
    optimizer = tf.keras.optimizers.Adam(0.05)
    train_loss = tf.keras.metrics.Mean(name="train_loss")
    loss_object = tf.keras.losses.MeanSquaredError(reduction="none")
model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])


@tf.function
def train_step(iterator):
    """The step function for one training step."""

    def step_fn(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            per_example = loss_object(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH_SIZE)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(list(zip(grads, model.trainable_variables)))
        train_loss.update_state(loss * strategy.num_replicas_in_sync)

    strategy.run(step_fn, args=(next(iterator),))


train_iterator = iter(dist_dataset)
losses = []
for step in range(20):
    train_step(train_iterator)
    losses.append(train_loss.result().numpy())
    train_loss.reset_state()
