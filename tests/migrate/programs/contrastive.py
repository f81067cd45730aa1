"""Contrastive learning: normalized outputs, a matrix of similarities, and a temperature."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, Model, Input

rng = np.random.default_rng(0)
first = rng.normal(size=(20, 8, 6)).astype(np.float32)
second = (first + 0.1 * rng.normal(size=first.shape)).astype(np.float32)
TEMPERATURE = 0.5


def get_encoder():
    inputs = Input(shape=(6,))
    x = layers.Dense(8, activation="relu")(inputs)
    x = layers.Dropout(0.0)(x)
    return Model(inputs, layers.Dense(4)(x), name="encoder")


encoder = get_encoder()
encoder.set_weights([rng.normal(0, 0.4, w.shape) for w in encoder.get_weights()])
optimizer = tf.keras.optimizers.AdamW(0.01, weight_decay=0.001)


def contrastive_loss(projections_1, projections_2):
    projections_1 = tf.math.l2_normalize(projections_1, axis=1)
    projections_2 = tf.math.l2_normalize(projections_2, axis=1)
    similarities = tf.matmul(projections_1, projections_2, transpose_b=True) / TEMPERATURE
    batch_size = tf.shape(projections_1)[0]
    contrastive_labels = tf.range(batch_size)
    loss_1_2 = tf.keras.losses.sparse_categorical_crossentropy(contrastive_labels, similarities, from_logits=True)
    loss_2_1 = tf.keras.losses.sparse_categorical_crossentropy(
        contrastive_labels, tf.transpose(similarities), from_logits=True
    )
    return tf.reduce_mean(loss_1_2 + loss_2_1) / 2


@tf.function
def train_step(a, b):
    with tf.GradientTape(persistent=True) as tape:
        loss = contrastive_loss(encoder(a, training=True), encoder(b, training=True))
    gradients = tape.gradient(loss, encoder.trainable_weights)
    del tape
    optimizer.apply_gradients(zip(gradients, encoder.trainable_weights))
    return loss


losses = [train_step(tf.convert_to_tensor(a), tf.convert_to_tensor(b)).numpy() for a, b in zip(first, second)]
