"""Two inputs, three outputs, losses by name, weights for them, and a layer that adds a loss."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

rng = np.random.default_rng(0)
title = rng.permutation(160).reshape(32, 5)
tags = rng.integers(0, 2, (32, 4)).astype("float32")
priority = rng.random((32, 1)).astype("float32")
department = rng.integers(0, 3, (32,))
length = (title > 79).sum(1, keepdims=True).astype("float32")


class ActivityRegularizer(layers.Layer):
    """Adds the mean square of its input to the loss."""

    def __init__(self, rate=1e-2, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * tf.reduce_mean(tf.square(inputs)))
        return inputs

    def get_config(self):
        return {**super().get_config(), "rate": self.rate}


title_input = keras.Input(shape=(None,), name="title", dtype="int32")
tags_input = keras.Input(shape=(4,), name="tags")
title_features = layers.Embedding(160, 6)(title_input)
title_features = layers.GlobalAveragePooling1D()(title_features)
x = layers.concatenate([title_features, tags_input])
x = ActivityRegularizer(name="activity")(layers.Dense(8, activation="softplus")(x))
priority_pred = layers.Dense(1, activation="sigmoid", name="priority")(x)
department_pred = layers.Dense(3, name="department")(x)
length_pred = layers.Dense(1, activation=tf.nn.softplus, name="length")(x)
model = keras.Model(
    inputs={"title": title_input, "tags": tags_input},
    outputs={"priority": priority_pred, "department": department_pred, "length": length_pred},
)
model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-2),
    loss={
        "priority": keras.losses.BinaryCrossentropy(),
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "length": keras.losses.Poisson(),
    },
    loss_weights={"priority": 1.0, "department": 0.2, "length": 0.5},
)
history = model.fit(
    {"title": title, "tags": tags},
    {"priority": priority, "department": department, "length": length},
    epochs=20, batch_size=32, shuffle=False, verbose=0,
)  # fmt: skip
losses = history.history["loss"]
copy = ActivityRegularizer.from_config(model.get_layer("activity").get_config())
assert copy.rate == 1e-2
