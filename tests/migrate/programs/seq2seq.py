"""Translation of toy sequences with masks: Embedding(mask_zero), GRU states, additive attention, teacher forcing."""

import numpy as np
import tensorflow as tf

VOCAB, UNITS, LENGTH = 9, 8, 5
rng = np.random.default_rng(0)
source = rng.integers(1, VOCAB, (20, 6, LENGTH)).astype("int32")
source[:, ::2, 3:] = 0  # Padding.
goal = np.where(source > 0, VOCAB - source, 0).astype("int32")


class Encoder(tf.keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(VOCAB, units, mask_zero=True)
        self.rnn = tf.keras.layers.Bidirectional(tf.keras.layers.GRU(units, return_sequences=True), merge_mode="sum")

    def call(self, x):
        x = self.embedding(x)
        return self.rnn(x)


class CrossAttention(tf.keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.query, self.value = tf.keras.layers.Dense(units), tf.keras.layers.Dense(units)
        self.attention = tf.keras.layers.AdditiveAttention(use_scale=False)
        self.add = tf.keras.layers.Add()

    def call(self, x, context, mask):
        attended = self.attention([self.query(x), self.value(context)], mask=[tf.ones_like(mask), mask])
        return self.add([x, attended])


class Translator(tf.keras.Model):
    def __init__(self, units):
        super().__init__()
        self.encoder = Encoder(units)
        self.embedding = tf.keras.layers.Embedding(VOCAB, units)
        self.rnn = tf.keras.layers.GRU(units, return_sequences=True, return_state=True)
        self.attention = CrossAttention(units)
        self.logits = tf.keras.layers.Dense(VOCAB)

    def call(self, inputs):
        context, x = inputs
        mask = tf.not_equal(context, 0)
        context = self.encoder(context)
        x, state = self.rnn(self.embedding(x))
        x = self.attention(x, context, mask)
        return self.logits(x) + 0.01 * tf.reduce_sum(state)


def masked_loss(y_true, y_pred):
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_fn(y_true, y_pred)
    mask = tf.cast(y_true != 0, loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


model = Translator(UNITS)
shifted = np.pad(goal[:, :, :-1], [(0, 0), (0, 0), (1, 0)], constant_values=1)
model((source[0], shifted[0]))
for variable in model.trainable_variables:
    variable.assign(rng.normal(0, 0.3, variable.shape))
model.compile(optimizer=tf.keras.optimizers.SGD(0.5, clipnorm=1.0), loss=masked_loss)
losses = []
for step in range(20):
    losses.append(float(model.train_on_batch((source[step], shifted[step]), goal[step])))
