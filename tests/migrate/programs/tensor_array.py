"""A recurrence that writes its states into a TensorArray, in a loop whose length is a tensor."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
sequences = rng.normal(size=(20, 5, 3)).astype("float32")
cell = tf.keras.layers.GRUCell(3)
cell.build((None, 3))
for variable in cell.trainable_variables:
    variable.assign(rng.normal(0, 0.4, variable.shape))
optimizer = tf.keras.optimizers.SGD(0.3)


def unroll(sequence, length):
    outputs = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    state = tf.zeros([1, 3])
    for t in tf.range(length):
        output, (state,) = cell(sequence[t][tf.newaxis], [state])
        outputs = outputs.write(t, output[0])
    return outputs.stack()


@tf.function
def train_step(sequence, length):
    with tf.GradientTape() as tape:
        outputs = unroll(sequence, length)
        loss = tf.reduce_mean(tf.square(outputs - 0.5))
    gradients = tape.gradient(loss, cell.trainable_variables)
    optimizer.apply_gradients(zip(gradients, cell.trainable_variables))
    return loss


losses = []
for step in range(20):
    losses.append(float(train_step(tf.constant(sequences[step]), tf.constant(5))))
