"""Computes in 16 bits with variables of 32 bits, in `fit` and in a loop whose loss is scaled."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision

policy = mixed_precision.Policy("mixed_bfloat16")
mixed_precision.set_global_policy(policy)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype("float32")
y = rng.integers(0, 3, 64)

inputs = keras.Input(shape=(8,), name="digits")
h = layers.Dense(16, activation="relu", name="dense_1")(inputs)
h = layers.Dense(3, name="dense_logits")(h)
outputs = layers.Activation("softmax", dtype="float32", name="predictions")(h)
model = keras.Model(inputs=inputs, outputs=outputs)
assert model.layers[1].compute_dtype == "bfloat16"
assert model.layers[1].variable_dtype == tf.float32
assert outputs.dtype == tf.float32
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
model.compile(loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.SGD(0.1))
history = model.fit(x, y, batch_size=64, epochs=10, shuffle=False, verbose=0)
losses = history.history["loss"]

optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
loss_object = keras.losses.SparseCategoricalCrossentropy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x)
        loss = loss_object(y, predictions)
        scaled_loss = optimizer.scale_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply_gradients(zip(scaled_gradients, model.trainable_variables))
    return loss


for _ in range(10):
    losses.append(float(train_step(tf.constant(x), tf.constant(y))))
mixed_precision.set_global_policy("float32")
