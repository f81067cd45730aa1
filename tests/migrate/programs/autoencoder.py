"""A convolutional autoencoder that removes noise: strided and transposed convolutions, upsampling and cropping."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, losses as keras_losses
from tensorflow.keras.models import Model

rng = np.random.default_rng(0)
images = rng.random((16, 8, 8, 1)).astype("float32")
noisy = np.clip(images + 0.2 * rng.normal(size=images.shape), 0.0, 1.0).astype("float32")


class Denoise(Model):
    def __init__(self):
        super().__init__()
        self.encoder = tf.keras.Sequential(
            [
                layers.Input(shape=(8, 8, 1)),
                layers.Conv2D(6, (3, 3), activation="relu", padding="same", strides=2),
                layers.ZeroPadding2D(1),
                layers.SeparableConv2D(4, 3, activation="relu", padding="valid"),
                layers.AveragePooling2D(pool_size=(2, 2)),
            ]
        )
        self.decoder = tf.keras.Sequential(
            [
                layers.Conv2DTranspose(4, kernel_size=3, strides=2, activation="relu", padding="same"),
                layers.UpSampling2D(size=(2, 2), interpolation="bilinear"),
                layers.Conv2D(1, kernel_size=(3, 3), activation="sigmoid", padding="same"),
            ]
        )

    def call(self, x):
        encoded = self.encoder(x)
        decoded = self.decoder(encoded)
        return decoded


autoencoder = Denoise()
autoencoder(images[:1])
for variable in autoencoder.trainable_variables:
    variable.assign(rng.normal(0, 0.3, variable.shape))
autoencoder.compile(optimizer="adam", loss=keras_losses.MeanSquaredError())
history = autoencoder.fit(noisy, images, epochs=20, batch_size=16, shuffle=False, verbose=0)
losses = history.history["loss"]
encoded = autoencoder.encoder(noisy).numpy()
assert encoded.shape == (16, 2, 2, 4)
assert autoencoder.decoder(encoded).numpy().shape == images.shape
