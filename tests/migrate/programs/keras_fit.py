"""Fits a small classifier on one replica, as the tutorial "Distributed training with Keras" does."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
images = rng.random((64, 8, 8, 1)).astype("float32")
labels = rng.integers(0, 4, 64)

strategy = tf.distribute.MirroredStrategy(["CPU:0"])

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(4),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1, momentum=0.9),
        metrics=["accuracy"],
    )

weights = np.random.default_rng(1)
model.set_weights([weights.normal(0, 0.3, w.shape) for w in model.get_weights()])


def decay(epoch):
    if epoch < 10:
        return 0.1
    return 0.05


callbacks = [tf.keras.callbacks.LearningRateScheduler(decay)]
history = model.fit(images, labels, batch_size=64, epochs=20, shuffle=False, verbose=0, callbacks=callbacks)
losses = history.history["loss"]
