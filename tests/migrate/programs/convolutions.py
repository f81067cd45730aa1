"""A network of tf.nn: convolution, pooling, normalization by moments, and gradients accumulated over two batches."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
images = rng.random((40, 4, 8, 8, 2)).astype("float32")
labels = rng.integers(0, 3, (40, 4)).astype("int32")
filters = tf.Variable(rng.normal(0, 0.3, (3, 3, 2, 4)).astype("float32"))
gamma = tf.Variable(np.ones(4, "float32"))
beta = tf.Variable(np.zeros(4, "float32"))
dense = tf.Variable(rng.normal(0, 0.3, (64, 3)).astype("float32"))
variables = [filters, gamma, beta, dense]
sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in variables]


def network(x):
    x = tf.nn.conv2d(x, filters, strides=[1, 1, 1, 1], padding="SAME")
    mean, variance = tf.nn.moments(x, axes=[0, 1, 2])
    x = tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)
    x = tf.nn.relu(x)
    x = tf.nn.max_pool2d(x, ksize=2, strides=2, padding="VALID")
    x = tf.pad(x, [[0, 0], [0, 0], [0, 0], [0, 0]])
    return tf.matmul(tf.reshape(x, [-1, 64]), dense)


@tf.function
def accumulate(x, y):
    with tf.GradientTape() as tape:
        logits = network(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    for total, gradient in zip(sums, tape.gradient(loss, variables)):
        total.assign_add(gradient)
    return loss


@tf.function
def update():
    for variable, total in zip(variables, sums):
        variable.assign_sub(0.1 * total / 2.0)
        total.assign(tf.zeros_like(total))


losses = []
for i in range(20):
    pair = [accumulate(tf.constant(images[2 * i + k]), tf.constant(labels[2 * i + k])) for k in range(2)]
    update()
    losses.append(tf.add_n(pair) / 2)
