"""Random numbers of every kind: dropout, noise, augmentation, initializers and draws in a step. Only the trend is the same."""

import numpy as np
import tensorflow as tf

tf.random.set_seed(42)
rng = np.random.default_rng(0)
images = rng.random((32, 8, 8, 3)).astype("float32")
labels = (images.mean((1, 2, 3)) > 0.5).astype("float32")[:, None]

data_augmentation = tf.keras.Sequential(
    [tf.keras.layers.RandomFlip("horizontal"), tf.keras.layers.RandomContrast(0.1)], name="augmentation"
)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 3)),
        data_augmentation,
        tf.keras.layers.GaussianNoise(0.01),
        tf.keras.layers.Conv2D(4, 3, kernel_initializer="he_normal", activation="relu"),
        tf.keras.layers.SpatialDropout2D(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(rate=0.2),
        tf.keras.layers.Dense(1),
    ]
)
optimizer = tf.keras.optimizers.Adam(1e-2)
bce = tf.keras.losses.BinaryCrossentropy(from_logits=True)
scale = tf.Variable(tf.random.uniform([], 0.9, 1.1, seed=3))


@tf.function
def train_step(x, y):
    noise = tf.random.normal(shape=tf.shape(x), stddev=0.01)
    keep = tf.cast(tf.random.uniform([32, 1]) < 0.9, tf.float32)
    with tf.GradientTape() as tape:
        logits = model(scale * x + noise, training=True)
        loss = bce(y, logits * keep) + tf.reduce_sum(model.losses)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss


losses = []
for epoch in range(20):
    order = tf.random.shuffle(tf.range(32))
    x, y = tf.gather(images, order), tf.gather(labels, order)
    losses.append(float(train_step(x, y)))
dropped = tf.nn.dropout(tf.ones([100]), rate=0.5)
assert set(np.unique(dropped.numpy())) == {0.0, 2.0}
