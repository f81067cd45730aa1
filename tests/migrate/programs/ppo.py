"""Proximal policy optimization on recorded steps: ratios, clipping, advantages and an entropy bonus."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

CLIP, EPOCHS = 0.2, 5
rng = np.random.default_rng(0)


def mlp(x, sizes, activation=tf.tanh, output_activation=None):
    for size in sizes[:-1]:
        x = layers.Dense(units=size, activation=activation)(x)
    return layers.Dense(units=sizes[-1], activation=output_activation)(x)


observation_input = keras.Input(shape=(5,), dtype="float32")
actor = keras.Model(inputs=observation_input, outputs=mlp(observation_input, [12, 3]))
critic = keras.Model(observation_input, keras.ops.squeeze(mlp(observation_input, [12, 1], activation="relu"), axis=1))
for model in (actor, critic):
    model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
policy_optimizer = keras.optimizers.Adam(learning_rate=0.02)
value_optimizer = keras.optimizers.Adam(learning_rate=0.05)


def logprobabilities(logits, a):
    return tf.reduce_sum(tf.one_hot(a, 3) * tf.nn.log_softmax(logits), axis=1)


@tf.function
def train_policy(observations, actions, old, advantages):
    with tf.GradientTape() as tape:
        logits = actor(observations)
        ratio = tf.exp(logprobabilities(logits, actions) - old)
        clipped = tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP)
        entropy = -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), axis=-1)
        loss = -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages) + 0.01 * entropy)
    grads = tape.gradient(loss, actor.trainable_variables)
    policy_optimizer.apply_gradients(zip(grads, actor.trainable_variables))
    return loss


@tf.function
def train_value(observations, returns):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((returns - critic(observations)) ** 2)
    grads = tape.gradient(loss, critic.trainable_variables)
    value_optimizer.apply_gradients(zip(grads, critic.trainable_variables))
    return loss


losses = []
for episode in range(4):
    observations = tf.constant(rng.normal(size=(16, 5)), dtype=tf.float32)
    actions = tf.constant(rng.integers(0, 3, 16), dtype=tf.int32)
    rewards = tf.constant(rng.normal(size=16), dtype=tf.float32)
    returns = tf.cumsum(rewards, reverse=True) / 4.0
    advantages = returns - critic(observations)
    advantages = (advantages - tf.reduce_mean(advantages)) / (tf.math.reduce_std(advantages) + 1e-10)
    old = logprobabilities(actor(observations), actions)
    for _ in range(EPOCHS):
        policy_loss = train_policy(observations, actions, old, advantages)
        value_loss = train_value(observations, returns)
        losses.append(policy_loss.numpy() + value_loss.numpy())
