# SPDX-License-Identifier: Apache-2.0
"""Ten models that people train, for any Keras. Global batches of 64 rows on two replicas. None has dropout: losses are compared."""

from typing import Any

from benchmarks.case import NUM_CLASSES, Case

ROWS = 64
_VOCABULARY, _LENGTH, _WIDTH = 2000, 64, 64
_TABLE_ROWS = 50_000


def _convnet(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(NUM_CLASSES),
        ]
    )


def _resnet(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    for number, width in enumerate((16, 32, 64)):
        for block in range(2):
            strides = 2 if number and not block else 1
            y = layers.Activation("relu")(layers.BatchNormalization()(x))
            short = x if x.shape[-1] == width else layers.Conv2D(width, 1, strides=strides, use_bias=False)(y)
            y = layers.Conv2D(width, 3, strides=strides, padding="same", use_bias=False)(y)
            y = layers.Activation("relu")(layers.BatchNormalization()(y))
            x = layers.Add()([short, layers.Conv2D(width, 3, padding="same", use_bias=False)(y)])
    x = layers.GlobalAveragePooling2D()(layers.Activation("relu")(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))


def _transformer(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, _WIDTH)(inputs)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(4, _WIDTH // 4)(x, x)]))
    hidden = layers.Dense(2 * _WIDTH, activation="relu")(x)
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(_WIDTH)(hidden)]))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.GlobalAveragePooling1D()(x)))


def _lstm(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((_LENGTH,), dtype="int32")
    x = layers.LSTM(_WIDTH)(layers.Embedding(_VOCABULARY, _WIDTH)(inputs))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))


def _bidirectional_lstm(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, _WIDTH, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Bidirectional(layers.LSTM(_WIDTH // 2))(x)))


def _gru(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((32, 16))
    x = layers.GRU(_WIDTH)(layers.GRU(_WIDTH, return_sequences=True)(inputs))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))


def _autoencoder(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((28, 28, 1))
    x = inputs
    for _ in range(2):
        x = layers.Conv2D(32, 3, activation="relu", padding="same")(x)
        x = layers.MaxPooling2D(padding="same")(x)
    for _ in range(2):
        x = layers.Conv2DTranspose(32, 3, strides=2, activation="relu", padding="same")(x)
    # All models have classes as labels, so the image becomes logits.
    x = layers.Conv2D(NUM_CLASSES, 3, padding="same")(x)
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


def _u_net(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, strides=2, padding="same")(inputs)
    x = before = layers.Activation("relu")(layers.BatchNormalization()(x))
    for width in (32, 64):
        x = layers.SeparableConv2D(width, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.SeparableConv2D(width, 3, padding="same")(layers.Activation("relu")(layers.BatchNormalization()(x)))
        x = layers.MaxPooling2D(3, strides=2, padding="same")(layers.BatchNormalization()(x))
        x = before = layers.Add()([x, layers.Conv2D(width, 1, strides=2, padding="same")(before)])
    for width in (32, 16):
        x = layers.Conv2DTranspose(width, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.UpSampling2D()(layers.BatchNormalization()(x))
        x = before = layers.Add()([x, layers.Conv2D(width, 1, padding="same")(layers.UpSampling2D()(before))])
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(NUM_CLASSES, 3, padding="same")(x)))


def _mixer(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 64))(layers.Conv2D(64, 4, strides=4)(inputs))
    for _ in range(4):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(64)(layers.Dense(128, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.GlobalAveragePooling1D()(x)))


def _wide_and_deep(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((8,), dtype="int32")
    wide = layers.Flatten()(layers.Embedding(_TABLE_ROWS, 1)(inputs))
    x = layers.Flatten()(layers.Embedding(_TABLE_ROWS, 16)(inputs))
    for _ in range(2):
        x = layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.Concatenate()([wide, x])))


_WORDS = {"per_replica_batch": ROWS // 2, "vocabulary": _VOCABULARY}
ZOO = {
    "convnet": Case(_convnet, (28, 28, 1), ROWS // 2),
    "resnet": Case(_resnet, (32, 32, 3), ROWS // 2),
    "text transformer": Case(_transformer, (_LENGTH,), **_WORDS),
    "LSTM": Case(_lstm, (_LENGTH,), **_WORDS),
    "bidirectional LSTM": Case(_bidirectional_lstm, (_LENGTH,), **_WORDS),
    "GRU": Case(_gru, (32, 16), ROWS // 2),
    "autoencoder": Case(_autoencoder, (28, 28, 1), ROWS // 2),
    "U-Net": Case(_u_net, (32, 32, 3), ROWS // 2),
    "MLP-mixer": Case(_mixer, (32, 32, 3), ROWS // 2),
    "wide and deep": Case(_wide_and_deep, (8,), ROWS // 2, _TABLE_ROWS),
}
