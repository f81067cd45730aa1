"""Gradients of several small batches for one step, an average of the weights, and early stopping by hand."""

import numpy as np
import tensorflow as tf

ACCUMULATE, DECAY = 4, 0.9
rng = np.random.default_rng(0)
x = rng.normal(size=(20 * ACCUMULATE, 5, 4)).astype("float32")
y = np.argmax(x[..., :2], axis=-1)

model = tf.keras.Sequential(
    [
        tf.keras.layers.InputLayer(shape=(4,)),
        tf.keras.layers.Dense(8, kernel_initializer=tf.keras.initializers.HeNormal(seed=1)),
        tf.keras.layers.PReLU(alpha_initializer=tf.keras.initializers.Constant(0.25)),
        tf.keras.layers.Dense(2, kernel_constraint=tf.keras.constraints.MaxNorm(2)),
    ]
)
model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
optimizer = tf.keras.optimizers.SGD(0.3)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accumulated = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]
averages = [tf.Variable(v, trainable=False) for v in model.trainable_variables]
count = tf.Variable(0, trainable=False)


@tf.function
def accumulate(features, labels):
    with tf.GradientTape() as tape:
        loss = loss_fn(labels, model(features, training=True))
    for total, gradient in zip(accumulated, tape.gradient(loss, model.trainable_variables)):
        total.assign_add(gradient / ACCUMULATE)
    count.assign_add(1)
    return loss


@tf.function
def apply():
    optimizer.apply_gradients(zip(accumulated, model.trainable_variables))
    for total in accumulated:
        total.assign(tf.zeros_like(total))
    for average, v in zip(averages, model.trainable_variables):
        average.assign(DECAY * average + (1.0 - DECAY) * v)


losses = []
best, waited = float("inf"), 0
for step in range(20):
    parts = []
    for i in range(ACCUMULATE):
        k = step * ACCUMULATE + i
        parts.append(accumulate(tf.constant(x[k]), tf.constant(y[k])))
    apply()
    losses.append(tf.reduce_mean(tf.stack(parts)).numpy())
    waited = 0 if losses[-1] < best else waited + 1
    best = min(best, losses[-1])
    if waited > 25:
        break
assert count.numpy() == 20 * ACCUMULATE
norm = tf.linalg.global_norm(averages)
assert norm > 0.0
