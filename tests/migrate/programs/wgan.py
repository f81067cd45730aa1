"""A Wasserstein GAN with a gradient penalty: a tape in a tape, and several critic steps for one of the generator."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

CRITIC_STEPS, PENALTY = 2, 10.0
rng = np.random.default_rng(0)
real = rng.normal(1.0, 0.3, (20, 12, 2)).astype("float32")
noise = rng.normal(size=(20, CRITIC_STEPS + 1, 12, 3)).astype("float32")
mixes = rng.random((20, CRITIC_STEPS, 12, 1)).astype("float32")

generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8), keras.layers.ELU(), keras.layers.Dense(1)])
for model in (generator, critic):
    model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])
generator_optimizer = keras.optimizers.Adam(learning_rate=0.01, beta_1=0.5, beta_2=0.9)
critic_optimizer = keras.optimizers.Adam(learning_rate=0.01, beta_1=0.5, beta_2=0.9)


def gradient_penalty(real_images, fake_images, mix):
    interpolated = real_images + mix * (fake_images - real_images)
    with tf.GradientTape() as gp_tape:
        gp_tape.watch(interpolated)
        pred = critic(interpolated, training=True)
    grads = gp_tape.gradient(pred, [interpolated])[0]
    norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1]))
    return tf.reduce_mean((norm - 1.0) ** 2)


@tf.function
def critic_step(real_images, random_latent_vectors, mix):
    with tf.GradientTape() as tape:
        fake_images = generator(random_latent_vectors, training=True)
        cost = tf.reduce_mean(critic(fake_images, training=True)) - tf.reduce_mean(critic(real_images, training=True))
        loss = cost + gradient_penalty(real_images, fake_images, mix) * PENALTY
    gradient = tape.gradient(loss, critic.trainable_variables)
    critic_optimizer.apply_gradients(zip(gradient, critic.trainable_variables))
    return loss


@tf.function
def generator_step(random_latent_vectors):
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(critic(generator(random_latent_vectors, training=True), training=True))
    gradient = tape.gradient(loss, generator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gradient, generator.trainable_variables))
    return loss


losses = []
for step in range(20):
    for i in range(CRITIC_STEPS):
        d_loss = critic_step(tf.constant(real[step]), tf.constant(noise[step, i]), tf.constant(mixes[step, i]))
    g_loss = generator_step(tf.convert_to_tensor(noise[step, CRITIC_STEPS]))
    losses.append(float(d_loss) + float(g_loss))
