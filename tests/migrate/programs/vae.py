"""A variational autoencoder, as in the tutorial "Convolutional variational autoencoder". The noise comes from NumPy."""

import numpy as np
import tensorflow as tf

LATENT = 2
rng = np.random.default_rng(0)
data = (rng.random((32, 12)) > 0.5).astype("float32")
noise = rng.normal(size=(20, 32, LATENT)).astype("float32")


class CVAE(tf.keras.Model):
    """Variational autoencoder."""

    def __init__(self, latent_dim):
        super().__init__()
        self.latent_dim = latent_dim
        self.encoder = tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(shape=(12,)),
                tf.keras.layers.Dense(8, activation="relu"),
                tf.keras.layers.Dense(latent_dim + latent_dim),
            ]
        )
        self.decoder = tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(shape=(latent_dim,)),
                tf.keras.layers.Dense(8, activation=tf.nn.relu),
                tf.keras.layers.Dense(12),
            ]
        )

    def encode(self, x):
        mean, logvar = tf.split(self.encoder(x), num_or_size_splits=2, axis=1)
        return mean, logvar

    def reparameterize(self, mean, logvar, eps):
        return eps * tf.exp(logvar * 0.5) + mean

    def decode(self, z, apply_sigmoid=False):
        logits = self.decoder(z)
        if apply_sigmoid:
            probs = tf.sigmoid(logits)
            return probs
        return logits


def log_normal_pdf(sample, mean, logvar, raxis=1):
    log2pi = tf.math.log(2.0 * np.pi)
    return tf.reduce_sum(-0.5 * ((sample - mean) ** 2.0 * tf.exp(-logvar) + logvar + log2pi), axis=raxis)


def compute_loss(model, x, eps):
    mean, logvar = model.encode(x)
    z = model.reparameterize(mean, logvar, eps)
    x_logit = model.decode(z)
    cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
    logpx_z = -tf.reduce_sum(cross_ent, axis=[1])
    logpz = log_normal_pdf(z, 0.0, 0.0)
    logqz_x = log_normal_pdf(z, mean, logvar)
    return -tf.reduce_mean(logpx_z + logpz - logqz_x)


model = CVAE(LATENT)
for part in (model.encoder, model.decoder):
    part.set_weights([rng.normal(0, 0.3, w.shape) for w in part.get_weights()])
variables = model.encoder.trainable_variables + model.decoder.trainable_variables
optimizer = tf.keras.optimizers.Adam(1e-2)


@tf.function
def train_step(x, eps):
    """Executes one training step and returns the loss."""
    with tf.GradientTape() as tape:
        loss = compute_loss(model, x, eps)
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))
    return loss


losses = [train_step(tf.constant(data), tf.constant(eps)).numpy() for eps in noise]
