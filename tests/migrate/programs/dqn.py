"""Q-learning with a replay memory and a target network that follows slowly."""

import collections
import random

import numpy as np
import tensorflow as tf

ACTIONS, GAMMA, TAU = 3, 0.9, 0.2
rng = np.random.default_rng(0)
random.seed(0)
Transition = collections.namedtuple("Transition", ["state", "action", "reward", "next_state", "done"])


def make_network():
    return tf.keras.Sequential(
        [tf.keras.Input((4,)), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(ACTIONS)]
    )


online, target = make_network(), make_network()
online.set_weights([rng.normal(0, 0.4, w.shape) for w in online.get_weights()])
target.set_weights(online.get_weights())
optimizer = tf.keras.optimizers.RMSprop(0.01, rho=0.95, momentum=0.1)
huber = tf.keras.losses.Huber(delta=1.5)
memory = collections.deque(maxlen=200)


@tf.function
def learn(states, actions, rewards, next_states, dones):
    best = tf.math.argmax(online(next_states), axis=1)
    next_q = tf.gather(target(next_states), best, axis=1, batch_dims=1)
    goal = rewards + GAMMA * next_q * (1.0 - dones)
    mask = tf.one_hot(actions, ACTIONS, on_value=1.0, off_value=0.0)
    with tf.GradientTape() as tape:
        q = tf.reduce_sum(online(states) * mask, axis=1)
        loss = huber(tf.stop_gradient(goal), q)
    gradients = tape.gradient(loss, online.trainable_variables)
    gradients = [tf.clip_by_norm(gradient, 0.5) for gradient in gradients]
    optimizer.apply_gradients(zip(gradients, online.trainable_variables))
    return loss


def update_target():
    for slow, fast in zip(target.variables, online.variables):
        slow.assign(slow * (1 - TAU) + fast * TAU)


state = rng.normal(size=4)
for _ in range(60):
    action = rng.integers(ACTIONS)
    next_state = 0.9 * state + 0.1 * rng.normal(size=4)
    memory.append(Transition(state, action, float(state[action]), next_state, float(rng.random() < 0.1)))
    state = next_state

losses = []
for episode in range(20):
    batch = Transition(*zip(*random.sample(memory, 12)))
    arrays = [np.asarray(column, "float32") for column in batch]
    states, actions, rewards, next_states, dones = (tf.convert_to_tensor(array) for array in arrays)
    losses.append(float(learn(states, tf.cast(actions, tf.int32), rewards, next_states, dones)))
    update_target()
