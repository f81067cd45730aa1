"""REINFORCE for a bandit: log_softmax, one_hot, cumulative sums and an entropy bonus."""

import numpy as np
import tensorflow as tf

ACTIONS = 4
rng = np.random.default_rng(0)
model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(ACTIONS)])
model.set_weights([rng.normal(0, 0.5, w.shape) for w in model.get_weights()])
optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.05)


def update(observations, actions, rewards):
    returns = tf.cumsum(rewards, reverse=True)
    advantage = (returns - tf.reduce_mean(returns)) / (tf.math.reduce_std(returns) + 1e-8)
    with tf.GradientTape() as tape:
        log_probs = tf.nn.log_softmax(model(observations))
        chosen = tf.reduce_sum(tf.one_hot(actions, depth=ACTIONS) * log_probs, axis=-1)
        entropy = -tf.reduce_sum(tf.exp(log_probs) * log_probs, -1)
        loss = tf.reduce_mean(-chosen * tf.stop_gradient(advantage) - 0.01 * entropy)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    best = tf.argmax(log_probs, axis=1)
    return loss + 0.1 * tf.reduce_mean(tf.cast(best == tf.cast(actions, best.dtype), tf.float32))


losses = []
for episode in range(20):
    observations = tf.constant(rng.normal(size=(12, 3)), tf.float32)
    actions = tf.constant(rng.integers(0, ACTIONS, 12), tf.int32)
    rewards = tf.constant(rng.random(12), tf.float32)
    losses.append(float(update(observations, actions, rewards)))
