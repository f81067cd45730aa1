"""A `train_step` of one's own in `fit`, as in the guide "Customizing what happens in fit()"."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

rng = np.random.default_rng(0)
x = rng.normal(size=(32, 5)).astype("float32")
y = (x**2).sum(1, keepdims=True).astype("float32")
strategy = tf.distribute.MirroredStrategy(["CPU:0"])


class CustomModel(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)  # Forward pass
            # Compute our own loss
            loss = tf.reduce_mean(tf.math.squared_difference(y, y_pred))
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


with strategy.scope():
    inputs = keras.Input(shape=(5,))
    hidden = keras.layers.Dense(8, activation=tf.nn.relu)(inputs)
    model = CustomModel(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer=keras.optimizers.SGD(0.01))
model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
history = model.fit(x, y, batch_size=32, epochs=20, shuffle=False, verbose=0)
losses = history.history["mae"]
