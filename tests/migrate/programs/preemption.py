"""A loop that saves when the machine is about to be taken away, and goes on from the last save."""

import tempfile

import numpy as np
import tensorflow as tf

STEPS_PER_EPOCH = 5
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
rng = np.random.default_rng(0)
x = rng.normal(size=(20, 8, 3)).astype("float32")
y = (x.sum(-1, keepdims=True) ** 2).astype("float32")
directory = tempfile.mkdtemp()

with strategy.scope():
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(6, "elu"), tf.keras.layers.Dense(1)]
    )
    optimizer = tf.keras.optimizers.Adam(0.05)
    epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="epoch")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
model.set_weights([rng.normal(0, 0.5, w.shape) for w in model.get_weights()])
manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=1)


@tf.function
def train_step(features, labels):
    def step_fn(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True) - labels))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    per_replica = strategy.run(step_fn, args=(features, labels))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica, axis=None)


losses = []
for step in range(20):
    if step % STEPS_PER_EPOCH == 0:
        epoch.assign_add(1)
    losses.append(float(train_step(tf.constant(x[step]), tf.constant(y[step]))))
    if step == 9:
        # What a handler of SIGTERM would do.
        manager.save()
saved = [w.copy() for w in model.get_weights()]
status = checkpoint.restore(manager.latest_checkpoint)
assert epoch.numpy() == 2
assert manager.latest_checkpoint.startswith(directory)
again = [float(train_step(tf.constant(x[step]), tf.constant(y[step]))) for step in range(10, 20)]
np.testing.assert_allclose(again, losses[10:], rtol=1e-3)
np.testing.assert_allclose(model.get_weights()[0], saved[0], rtol=1e-3, atol=1e-5)
