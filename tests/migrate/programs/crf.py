"""A linear chain of labels: the forward algorithm with logsumexp, scores by gather_nd, and transitions that are learned."""

import numpy as np
import tensorflow as tf

TAGS, LENGTH = 3, 5
rng = np.random.default_rng(0)
features = rng.normal(size=(20, 6, LENGTH, 4)).astype("float32")
tags = rng.integers(0, TAGS, (20, 6, LENGTH)).astype("int32")

emission = tf.keras.layers.Dense(TAGS, use_bias=False)
emission.build((None, None, 4))
emission.set_weights([rng.normal(0, 0.4, (4, TAGS))])
transitions = tf.Variable(rng.normal(0, 0.2, (TAGS, TAGS)), dtype=tf.float32, name="transitions")
optimizer = tf.keras.optimizers.Nadam(0.05)


def path_score(logits, labels):
    unary = tf.reduce_sum(logits * tf.one_hot(labels, TAGS), axis=[1, 2])
    pairs = tf.stack([labels[:, :-1], labels[:, 1:]], axis=-1)
    return unary + tf.reduce_sum(tf.gather_nd(transitions, pairs), axis=-1)


def log_normalizer(logits):
    alpha = logits[:, 0]
    for t in range(1, LENGTH):
        scores = tf.expand_dims(alpha, 2) + transitions[tf.newaxis] + tf.expand_dims(logits[:, t], axis=1)
        alpha = tf.reduce_logsumexp(scores, axis=1)
    return tf.reduce_logsumexp(alpha, axis=-1)


@tf.function
def train_step(x, labels):
    variables = emission.trainable_variables + [transitions]
    with tf.GradientTape() as tape:
        logits = emission(x)
        loss = tf.reduce_mean(log_normalizer(logits) - path_score(logits, labels))
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), clip_norm=5.0)
    optimizer.apply_gradients(list(zip(gradients, variables)))
    return loss + 0.0 * norm


losses = []
for step in range(20):
    x, labels = tf.identity(features[step]), tf.identity(tags[step])
    losses.append(train_step(x, labels).numpy())

greedy = tf.argmax(emission(features[0]), axis=-1, output_type=tf.int32)
right = tf.math.count_nonzero(tf.equal(greedy, tags[0]))
assert 0 <= int(right) <= tf.size(greedy)
