# Linear regression without Keras, as in the guide "Basic training loops".
import numpy as np
import tensorflow as tf

TRUE_W = 3.0
TRUE_B = 2.0

rng = np.random.default_rng(0)
x = tf.constant(rng.normal(size=64), dtype=tf.float32)
noise = tf.constant(rng.normal(size=64), tf.float32)
y = x * TRUE_W + TRUE_B + noise

w = tf.Variable(5.0)
b = tf.Variable(0.0, name="bias")


def f(x):
    return x * w + b


# This computes a single loss value for an entire batch
def loss(target_y, predicted_y):
    return tf.reduce_mean(tf.square(target_y - predicted_y))


@tf.function
def train(x, y, learning_rate):
    with tf.GradientTape() as t:
        # Trainable variables are automatically tracked by GradientTape
        current_loss = loss(y, f(x))
    dw, db = t.gradient(current_loss, [w, b])
    # Subtract the gradient scaled by the learning rate
    w.assign_sub(learning_rate * dw)
    b.assign_sub(learning_rate * db)
    return current_loss


losses = []
for epoch in tf.range(20):
    losses.append(float(train(x, y, 0.1)))
print(f"W = {w.numpy():1.2f}, b = {b.numpy():1.2f}")
