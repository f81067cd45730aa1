"""A step that TensorFlow runs eagerly: nothing compiles the function with the tape."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

rng = np.random.default_rng(0)
features = rng.normal(size=(32, 3)).astype(np.float32)
targets = np.tanh(features @ np.array([[1.0], [-2.0], [0.5]], np.float32))

inputs = keras.Input(shape=(3,))
hidden = layers.Dense(6, activation="relu")(inputs)
outputs = layers.Dense(1)(hidden)
model = keras.Model(inputs=inputs, outputs=outputs)
model.set_weights([rng.normal(0, 0.5, w.shape) for w in model.get_weights()])
optimizer = keras.optimizers.RMSprop(0.01)
loss_fn = keras.losses.Huber()


def train_on(x, y):
    with tf.GradientTape() as tape:
        prediction = model(x, training=True)
        value = loss_fn(y, prediction)
    grads = tape.gradient(value, model.trainable_weights)
    grads = [tf.clip_by_norm(g, 0.5) for g in grads]
    optimizer.apply_gradients(zip(grads, model.trainable_weights))
    return value


losses = []
for _ in range(20):
    losses.append(train_on(features, targets).numpy())
