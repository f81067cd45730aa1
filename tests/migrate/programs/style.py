"""Optimizes a picture: Gram matrices by einsum, total variation, clipping, and intermediate outputs of a frozen model."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
content = tf.constant(rng.random((1, 12, 12, 3)), dtype=tf.float32)
style = tf.constant(rng.random((1, 12, 12, 3)), dtype=tf.float32)

inputs = tf.keras.Input((12, 12, 3))
first = tf.keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="block1")(inputs)
pooled = tf.keras.layers.MaxPool2D()(first)
second = tf.keras.layers.Conv2D(6, 3, padding="same", activation="relu", name="block2")(pooled)
vgg = tf.keras.Model(inputs, second)
vgg.set_weights([rng.normal(0, 0.3, w.shape) for w in vgg.get_weights()])
vgg.trainable = False


def vgg_layers(layer_names):
    outputs = [vgg.get_layer(name).output for name in layer_names]
    return tf.keras.Model([vgg.input], outputs)


extractor = vgg_layers(["block1", "block2"])


def gram_matrix(input_tensor):
    result = tf.linalg.einsum("bijc,bijd->bcd", input_tensor, input_tensor)
    input_shape = tf.shape(input_tensor)
    num_locations = tf.cast(input_shape[1] * input_shape[2], tf.float32)
    return result / num_locations


style_targets = [gram_matrix(output) for output in extractor(style)]
content_target = extractor(content)[1]
image = tf.Variable(content)
opt = tf.keras.optimizers.Adam(learning_rate=0.02, beta_1=0.99, epsilon=1e-1)


def clip_0_1(image):
    return tf.clip_by_value(image, clip_value_min=0.0, clip_value_max=1.0)


@tf.function()
def train_step(image):
    with tf.GradientTape() as tape:
        outputs = extractor(image)
        style_loss = tf.add_n(
            [tf.reduce_mean((gram_matrix(output) - target) ** 2) for output, target in zip(outputs, style_targets)]
        )
        content_loss = tf.reduce_mean((outputs[1] - content_target) ** 2)
        rows = tf.abs(image[:, 1:, :, :] - image[:, :-1, :, :])
        loss = 10.0 * style_loss + content_loss + 1e-3 * tf.reduce_sum(rows)
    grad = tape.gradient(loss, image)
    opt.apply_gradients([(grad, image)])
    image.assign(clip_0_1(image))
    return loss


losses = [float(train_step(image)) for _ in range(20)]
picture = np.array(tf.cast(image * 255, tf.uint8))
assert picture.dtype == np.uint8
