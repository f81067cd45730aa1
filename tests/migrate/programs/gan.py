"""Two networks, two tapes and two optimizers, as in the tutorial on DCGAN."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

rng = np.random.default_rng(0)
real = rng.normal(2.0, 0.5, (20, 16, 4)).astype("float32")
noise = rng.normal(size=(20, 16, 3)).astype("float32")


def make_generator_model():
    model = tf.keras.Sequential()
    model.add(layers.Input((3,)))
    model.add(layers.Dense(8, use_bias=False))
    model.add(layers.LeakyReLU(negative_slope=0.2))
    model.add(layers.Dense(4))
    return model


def make_discriminator_model():
    return tf.keras.Sequential([layers.Input((4,)), layers.Dense(8, activation="elu"), layers.Dense(1)])


generator, discriminator = make_generator_model(), make_discriminator_model()
for model in (generator, discriminator):
    model.set_weights([rng.normal(0, 0.4, w.shape) for w in model.get_weights()])

cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    return real_loss + fake_loss


def generator_loss(fake_output):
    return cross_entropy(tf.ones_like(fake_output), fake_output)


generator_optimizer = tf.keras.optimizers.Adam(1e-2, beta_1=0.5)
discriminator_optimizer = tf.keras.optimizers.Adam(1e-2)


# Notice the use of `tf.function`.
# This annotation causes the function to be "compiled".
@tf.function
def train_step(images, noise):
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated_images = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated_images, training=True)
        gen_loss = generator_loss(fake_output)
        disc_loss = discriminator_loss(real_output, fake_output)

    gradients_of_generator = gen_tape.gradient(gen_loss, generator.trainable_variables)
    gradients_of_discriminator = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gradients_of_generator, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(gradients_of_discriminator, discriminator.trainable_variables))
    return gen_loss, disc_loss


losses = []
for step in range(20):
    gen_loss, disc_loss = train_step(tf.convert_to_tensor(real[step]), tf.convert_to_tensor(noise[step]))
    losses.append(gen_loss.numpy() + disc_loss.numpy())
