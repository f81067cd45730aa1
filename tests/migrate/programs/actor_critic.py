"""The learning half of an actor and a critic. The environment is NumPy, outside the step."""

import numpy as np
import tensorflow as tf

ACTIONS = 3
rng = np.random.default_rng(0)


class ActorCritic(tf.keras.Model):
    """Combined actor-critic network."""

    def __init__(self, num_actions, num_hidden_units):
        super().__init__()
        self.common = tf.keras.layers.Dense(num_hidden_units, activation="tanh")
        self.actor = tf.keras.layers.Dense(num_actions)
        self.critic = tf.keras.layers.Dense(1)

    def call(self, inputs):
        x = self.common(inputs)
        return self.actor(x), self.critic(x)


model = ActorCritic(ACTIONS, 8)
model(np.zeros((1, 4), "float32"))
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
huber_loss = tf.keras.losses.Huber(reduction="sum")
eps = np.finfo(np.float32).eps.item()


def get_expected_return(rewards, gamma=0.9):
    """Compute expected returns per timestep."""
    n = rewards.shape[0]
    returns = []
    discounted_sum = tf.constant(0.0)
    for i in range(n - 1, -1, -1):
        discounted_sum = rewards[i] + gamma * discounted_sum
        returns.append(discounted_sum)
    returns = tf.stack(returns[::-1])
    return (returns - tf.math.reduce_mean(returns)) / (tf.math.reduce_std(returns) + eps)


def compute_loss(action_probs, values, returns):
    advantage = returns - values
    action_log_probs = tf.math.log(action_probs)
    actor_loss = -tf.math.reduce_sum(action_log_probs * tf.stop_gradient(advantage))
    critic_loss = huber_loss(values, returns)
    return actor_loss + critic_loss


@tf.function
def train_step(states, actions, rewards):
    with tf.GradientTape() as tape:
        logits, values = model(states)
        probs = tf.nn.softmax(logits)
        taken = tf.reduce_sum(probs * tf.one_hot(actions, ACTIONS), axis=1)
        returns = get_expected_return(rewards)
        # Convert training data to appropriate TF tensor shapes
        taken, values, returns = [tf.expand_dims(x, 1) for x in [taken, tf.squeeze(values, axis=1), returns]]
        loss = compute_loss(taken, values, returns)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


losses = []
for episode in range(20):
    states = rng.normal(size=(10, 4)).astype("float32")
    actions = rng.integers(0, ACTIONS, 10).astype("int32")
    rewards = rng.random(10).astype("float32")
    losses.append(train_step(tf.constant(states), tf.constant(actions), tf.constant(rewards)).numpy())
