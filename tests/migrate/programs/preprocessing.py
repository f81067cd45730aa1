"""A table through tf.data: normalization and lookup layers in `map`, shuffling, batches, prefetching, and `fit`."""

import numpy as np
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
rng = np.random.default_rng(0)
ages = rng.uniform(20, 70, 48).astype("float32")
breeds = rng.choice(["cat", "dog", "fish"], 48)
targets = ((ages > 45) | (breeds == "dog")).astype("float32")

normalization = tf.keras.layers.Normalization(axis=None)
normalization.adapt(ages)
lookup = tf.keras.layers.StringLookup(vocabulary=["cat", "dog", "fish"], output_mode="int")


def df_to_dataset(batch_size=16):
    ds = tf.data.Dataset.from_tensor_slices(({"age": ages, "breed": breeds}, targets))
    return ds.batch(batch_size).prefetch(AUTOTUNE)


def encode(row, target):
    age = tf.expand_dims(tf.cast(row["age"], tf.float32), -1)
    breed = tf.one_hot(lookup(row["breed"]), depth=4)
    return tf.concat([normalization(age), breed], axis=1), target


train_ds = df_to_dataset().map(encode, num_parallel_calls=AUTOTUNE).cache()
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
with strategy.scope():
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((5,)), tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)]
    )
    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.05),
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
losses = model.fit(train_ds, epochs=20, shuffle=False, verbose=0).history["loss"]
