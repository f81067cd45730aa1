"""Attention with a causal mask and a padding mask, as in the tutorial on transformers."""

import numpy as np
import tensorflow as tf

VOCABULARY, DEPTH, HEADS, LENGTH = 11, 8, 2, 6
rng = np.random.default_rng(0)
tokens = rng.integers(1, VOCABULARY, (20, 8, LENGTH + 1)).astype("int32")
tokens[:, :, -2:] = 0


def positional_encoding(length, depth):
    depth = depth / 2
    positions = np.arange(length)[:, np.newaxis]
    depths = np.arange(depth)[np.newaxis, :] / depth
    angle_rads = positions * (1 / (10000**depths))
    pos_encoding = np.concatenate([np.sin(angle_rads), np.cos(angle_rads)], axis=-1)
    return tf.cast(pos_encoding, dtype=tf.float32)


def create_padding_mask(seq):
    seq = tf.cast(tf.math.equal(seq, 0), tf.float32)
    return seq[:, tf.newaxis, tf.newaxis, :]  # (batch_size, 1, 1, seq_len)


def create_look_ahead_mask(size):
    mask = 1 - tf.linalg.band_part(tf.ones((size, size)), -1, 0)
    return mask  # (seq_len, seq_len)


def scaled_dot_product_attention(q, k, v, mask):
    matmul_qk = tf.matmul(q, k, transpose_b=True)  # (..., seq_len_q, seq_len_k)
    dk = tf.cast(tf.shape(k)[-1], tf.float32)
    scaled_attention_logits = matmul_qk / tf.math.sqrt(dk)
    # add the mask to the scaled tensor.
    if mask is not None:
        scaled_attention_logits += mask * -1e9
    attention_weights = tf.nn.softmax(scaled_attention_logits, axis=-1)
    return tf.matmul(attention_weights, v)


class Attention(tf.keras.layers.Layer):
    def __init__(self, depth, heads):
        super().__init__()
        self.heads, self.depth = heads, depth
        self.wq = tf.keras.layers.Dense(depth)
        self.wk = tf.keras.layers.Dense(depth)
        self.wv = tf.keras.layers.Dense(depth)
        self.norm = tf.keras.layers.LayerNormalization(epsilon=1e-6)

    def split_heads(self, x, batch_size):
        x = tf.reshape(x, (batch_size, -1, self.heads, self.depth // self.heads))
        return tf.transpose(x, perm=[0, 2, 1, 3])

    def call(self, x, look_mask=None):
        batch_size = tf.shape(x)[0]
        q = self.split_heads(self.wq(x), batch_size)
        k = self.split_heads(self.wk(x), batch_size)
        v = self.split_heads(self.wv(x), batch_size)
        attention = scaled_dot_product_attention(q, k, v, look_mask)
        attention = tf.transpose(attention, perm=[0, 2, 1, 3])
        return self.norm(x + tf.reshape(attention, (batch_size, -1, self.depth)))


class Decoder(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(VOCABULARY, DEPTH)
        self.attention = Attention(DEPTH, HEADS)
        self.final = tf.keras.layers.Dense(VOCABULARY)

    def call(self, x, training=False):
        mask = tf.maximum(create_padding_mask(x), create_look_ahead_mask(LENGTH))
        h = self.embedding(x)
        h *= tf.math.sqrt(tf.cast(DEPTH, tf.float32))
        h += positional_encoding(LENGTH, DEPTH)[tf.newaxis, :, :]
        return self.final(self.attention(h, look_mask=mask))


model = Decoder()
model(tokens[0, :, :-1])
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)


def loss_function(real, pred):
    mask = tf.math.logical_not(tf.math.equal(real, 0))
    loss_ = loss_object(real, pred)
    mask = tf.cast(mask, dtype=loss_.dtype)
    loss_ *= mask
    return tf.reduce_sum(loss_) / tf.reduce_sum(mask)


@tf.function
def train_step(inp, tar):
    with tf.GradientTape() as tape:
        predictions = model(inp, training=True)
        loss = loss_function(tar, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


losses = [float(train_step(tf.constant(batch[:, :-1]), tf.constant(batch[:, 1:]))) for batch in tokens]
