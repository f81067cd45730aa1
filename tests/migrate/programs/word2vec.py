"""Skip-gram with negative samples: lookups, sigmoid cross-entropy of logits, normalized vectors and nearest words."""

import numpy as np
import tensorflow as tf

VOCABULARY, DIM, NEGATIVES = 15, 6, 4
rng = np.random.default_rng(0)
targets = rng.integers(0, VOCABULARY, (20, 8)).astype("int32")
contexts = rng.integers(0, VOCABULARY, (20, 8, NEGATIVES + 1)).astype("int32")


class Word2Vec(tf.keras.Model):
    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.target_embedding = tf.keras.layers.Embedding(vocab_size, embedding_dim, name="w2v_embedding")
        self.context_embedding = tf.keras.layers.Embedding(vocab_size, embedding_dim)

    def call(self, pair):
        target, context = pair
        # target: (batch,), context: (batch, context)
        word_emb = self.target_embedding(target)
        context_emb = self.context_embedding(context)
        return tf.einsum("be,bce->bc", word_emb, context_emb)


model = Word2Vec(VOCABULARY, DIM)
model((targets[0], contexts[0]))
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
optimizer = tf.keras.optimizers.SGD(learning_rate=0.5, momentum=0.9)
labels = tf.concat([tf.ones((8, 1), tf.int64), tf.zeros((8, NEGATIVES), tf.int64)], axis=1)


def custom_loss(x_logit, y_true):
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=tf.cast(y_true, x_logit.dtype))
    return tf.reduce_mean(tf.reduce_sum(cross_entropy, 1))


@tf.function
def train_step(target, context):
    with tf.GradientTape() as tape:
        loss = custom_loss(model((target, context), training=True), labels)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


losses = []
for step in range(20):
    losses.append(train_step(tf.constant(targets[step]), tf.constant(contexts[step])).numpy())

vectors = tf.math.l2_normalize(model.target_embedding.embeddings, axis=1)
similarity = tf.matmul(tf.nn.embedding_lookup(vectors, tf.constant([1, 2])), vectors, transpose_b=True)
nearest = tf.argsort(similarity, direction="DESCENDING")[:, 0]
np.testing.assert_array_equal(nearest.numpy(), [1, 2])
