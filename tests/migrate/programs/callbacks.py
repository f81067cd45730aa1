"""Callbacks, a schedule, regularizers and early stopping in `fit`, with class weights."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(80, 4)).astype("float32")
y = tf.keras.utils.to_categorical((x[:, 0] > x[:, 1]).astype(int), 2)


class BatchLosses(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=5, decay_rate=0.9)
model = tf.keras.models.Sequential()
model.add(
    tf.keras.layers.Dense(6, activation=tf.keras.activations.gelu, kernel_regularizer=tf.keras.regularizers.l2(0.01))
)
model.add(tf.keras.layers.BatchNormalization(momentum=0.9))
model.add(tf.keras.layers.Dense(2, activation="softmax"))
model.compile(
    optimizer=tf.keras.optimizers.Nadam(schedule),
    loss=tf.keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=[tf.keras.metrics.AUC(), "accuracy"],
)
model.build((None, 4))
for variable in model.trainable_variables:
    variable.assign(rng.normal(0, 0.4, variable.shape))
recorder = BatchLosses()
stop = tf.keras.callbacks.EarlyStopping(monitor="loss", patience=3)
model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=[recorder, stop])
losses = recorder.losses
