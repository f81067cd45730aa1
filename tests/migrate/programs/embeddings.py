"""Word vectors with negative samples, as in the tutorial "word2vec"."""

import numpy as np
import tensorflow as tf

VOCAB_SIZE, EMBEDDING_DIM, NUM_NS = 12, 4, 3
rng = np.random.default_rng(0)
targets = rng.integers(0, VOCAB_SIZE, (20, 16)).astype("int32")
contexts = rng.integers(0, VOCAB_SIZE, (20, 16, NUM_NS + 1)).astype("int32")
labels = np.tile(np.array([1, 0, 0, 0], "float32"), (16, 1))

target_embedding = tf.Variable(rng.normal(0, 0.5, (VOCAB_SIZE, EMBEDDING_DIM)), dtype=tf.float32)
context_embedding = tf.Variable(rng.normal(0, 0.5, (VOCAB_SIZE, EMBEDDING_DIM)), dtype=tf.float32)
optimizer = tf.optimizers.SGD(0.5)


def word2vec(target, context):
    word_emb = tf.nn.embedding_lookup(target_embedding, target)
    context_emb = tf.gather(context_embedding, context)
    # dots: (batch, context)
    return tf.einsum("be,bce->bc", word_emb, context_emb)


@tf.function
def step(target, context, label):
    with tf.GradientTape() as tape:
        dots = word2vec(target, context)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=dots))
        loss += 1e-3 * (tf.nn.l2_loss(target_embedding) + tf.nn.l2_loss(context_embedding))
    variables = [target_embedding, context_embedding]
    gradients, norm = tf.clip_by_global_norm(
        tape.gradient(loss, variables),
        0.5,  # The largest norm.
    )
    optimizer.apply_gradients(zip(gradients, variables))
    return loss + 0.01 * norm


losses = []
for target, context in zip(targets, contexts):
    losses.append(step(tf.constant(target), tf.constant(context), tf.constant(labels)).numpy())
