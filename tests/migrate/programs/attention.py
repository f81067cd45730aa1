"""Attention with a causal mask and a padding mask, written out with einsum, band_part and sequence_mask."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

HEADS, DIM, LENGTH = 2, 8, 6
rng = np.random.default_rng(0)
tokens = rng.integers(1, 12, (20, 4, LENGTH)).astype("int32")
lengths = rng.integers(2, LENGTH + 1, (20, 4)).astype("int32")


def positional_encoding(length, depth):
    half = depth // 2
    positions = np.arange(length)[:, np.newaxis]
    rates = 1 / 10000 ** (np.arange(half)[np.newaxis, :] / half)
    angles = positions * rates
    return tf.cast(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1), dtype=tf.float32)


class SelfAttention(layers.Layer):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def build(self, input_shape):
        depth = input_shape[-1]
        self.qkv = self.add_weight(name="qkv", shape=(depth, 3, self.heads, depth // self.heads))
        self.out = self.add_weight(name="out", shape=(self.heads, depth // self.heads, depth))

    def call(self, x, mask):
        q, k, v = tf.unstack(tf.einsum("bld,dchk->cblhk", x, self.qkv), axis=0)
        scores = tf.einsum("blhk,bmhk->bhlm", q, k) / tf.math.sqrt(tf.cast(tf.shape(q)[-1], tf.float32))
        scores += (1.0 - mask) * -1e9
        return tf.einsum("bhlm,bmhk,hkd->bld", tf.nn.softmax(scores, axis=-1), v, self.out)


class LanguageModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(12, DIM)
        self.attention = SelfAttention(HEADS)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.positions = positional_encoding(LENGTH, DIM)

    def call(self, ids, lengths):
        x = self.embedding(ids) * tf.math.sqrt(tf.cast(DIM, tf.float32)) + self.positions[tf.newaxis, :, :]
        causal = tf.linalg.band_part(tf.ones((LENGTH, LENGTH)), -1, 0)
        padding = tf.sequence_mask(lengths, maxlen=LENGTH, dtype=tf.float32)[:, tf.newaxis, tf.newaxis, :]
        x = self.norm(x + self.attention(x, mask=causal * padding))
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)


model = LanguageModel()
model(tokens[0], lengths[0])
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
optimizer = tf.keras.optimizers.Adam(0.01)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train_step(ids, lengths):
    targets = tf.roll(ids, shift=-1, axis=1)
    mask = tf.sequence_mask(lengths - 1, LENGTH, tf.float32)
    with tf.GradientTape() as tape:
        per_token = loss_object(targets, model(ids, lengths)) * mask
        loss = tf.reduce_sum(per_token) / tf.reduce_sum(mask)
    gradients = tape.gradient(loss, model.trainable_variables)
    clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(clipped, model.trainable_variables))
    return loss


losses = [float(train_step(tf.constant(tokens[i]), tf.constant(lengths[i]))) for i in range(20)]
