"""A small U-Net with a weight for each pixel, `evaluate` and `predict`."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(devices=["CPU:0"])
print(f"Number of devices: {strategy.num_replicas_in_sync}")
rng = np.random.default_rng(0)
images = rng.random((8, 8, 8, 3)).astype("float32")
masks = (images.sum(-1) > 1.5).astype("int32") + (images[..., 0] > 0.8).astype("int32")
pixel_weights = np.where(masks == 2, 2.0, 1.0).astype("float32")


def downsample(filters, size):
    result = tf.keras.Sequential()
    result.add(tf.keras.layers.Conv2D(filters, size, strides=2, padding="same", use_bias=False))
    result.add(tf.keras.layers.LeakyReLU())
    return result


def unet_model(output_channels):
    inputs = tf.keras.layers.Input(shape=[8, 8, 3])
    down = [downsample(4, 3), downsample(8, 3)]
    x = inputs
    skips = []
    for layer in down:
        x = layer(x)
        skips.append(x)
    for skip in reversed(skips[:-1]):
        x = tf.keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(x)
        x = tf.keras.layers.Concatenate()([x, skip])
    last = tf.keras.layers.Conv2DTranspose(filters=output_channels, kernel_size=3, strides=2, padding="same")
    return tf.keras.Model(inputs=inputs, outputs=last(x))


with strategy.scope():
    model = unet_model(output_channels=3)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.01),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
history = model.fit(images, masks, sample_weight=pixel_weights, batch_size=8, epochs=19, shuffle=False, verbose=0)
loss, *_ = model.evaluate(images, masks, sample_weight=pixel_weights, batch_size=8, verbose=0)
losses = history.history["loss"] + [loss]


def create_mask(pred_mask):
    pred_mask = tf.math.argmax(pred_mask, axis=-1)
    pred_mask = pred_mask[..., tf.newaxis]
    return pred_mask[0]


assert create_mask(model.predict(images, verbose=0)).shape == (8, 8, 1)
