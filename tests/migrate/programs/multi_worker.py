"""The program of a worker, as in the tutorial on several workers. Here it is alone: TF_CONFIG is not set."""

import json
import os

import numpy as np
import tensorflow as tf

os.environ.pop("TF_CONFIG", None)
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
num_workers = max(len(tf_config.get("cluster", {}).get("worker", [])), 1)

communication_options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.OneDeviceStrategy("CPU:0")
if num_workers > 1:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication_options)

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 6)).astype("float32")
y = (x @ rng.normal(size=(6, 2))).astype("float32")


def build_model():
    model = tf.keras.Sequential(
        [tf.keras.layers.InputLayer(shape=(6,)), tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(2)]
    )
    model.compile(loss="mse", optimizer=tf.keras.optimizers.Adam(0.02))
    return model


with strategy.scope():
    model = build_model()
model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
history = model.fit(x, y, epochs=20, batch_size=64 * num_workers, shuffle=False, verbose=0)
losses = history.history["loss"]
