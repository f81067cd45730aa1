"""A mixture density network: logsumexp, softmax, split by sizes and a Student distribution."""

import numpy as np
import tensorflow as tf

K = 3
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (20, 16, 1)).astype("float32")
y = (np.sin(3 * x) + 0.1 * rng.normal(size=x.shape)).astype("float32")

hidden_w = tf.Variable(rng.normal(size=(1, 6)), dtype="float32")
hidden_b = tf.Variable(tf.zeros([6]))
out_w = tf.Variable(tf.cast(rng.normal(0, 0.3, (6, 3 * K)), tf.float32))
parameters = [hidden_w, hidden_b, out_w]
momenta = [tf.Variable(tf.zeros_like(p), trainable=False) for p in parameters]


def log_likelihood(x, y):
    hidden = tf.nn.tanh(tf.add(tf.matmul(x, hidden_w), hidden_b))
    logits, mu, log_sigma = tf.split(tf.matmul(hidden, out_w), [K, K, K], axis=-1)
    log_mix = tf.nn.log_softmax(logits)
    sigma = tf.exp(tf.clip_by_value(log_sigma, -3.0, 3.0))
    nu = tf.constant(5.0)
    # The logarithm of Student's density.
    log_prob = (
        tf.math.lgamma((nu + 1) / 2)
        - tf.math.lgamma(nu / 2)
        - 0.5 * tf.math.log(nu * np.pi)
        - tf.math.log(sigma)
        - (nu + 1) / 2 * tf.math.log1p(tf.square((y - mu) / sigma) / nu)
    )
    return tf.reduce_logsumexp(log_mix + log_prob, axis=-1)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(log_likelihood(x, y))
    for p, m, g in zip(parameters, momenta, tape.gradient(loss, parameters)):
        m.assign(0.8 * m + g)
        p.assign_sub(0.05 * m)
    return loss


losses = []
for i in tf.range(20):
    losses.append(step(tf.constant(x[i]), tf.constant(y[i])))
