# SPDX-License-Identifier: Apache-2.0
"""The models and batches on which everything is measured."""

from typing import Any

from benchmarks.case import NUM_CLASSES, Case, initial, sizes
from benchmarks.zoo import ZOO

__all__ = ["CASES", "COMPARED_STEPS", "LEARNING_RATE", "MLP", "NUM_CLASSES", "Case", "initial", "sizes"]

LEARNING_RATE = 1e-3
COMPARED_STEPS = 16
_VOCABULARY, _LENGTH, _WIDTH = 1000, 32, 64


def _dense_stack(keras: Any, width: int, widths: list[int]) -> Any:
    layers = [keras.layers.Dense(w, activation="relu") for w in widths]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(NUM_CLASSES)])


def _small_mlp(keras: Any) -> Any:
    return _dense_stack(keras, 32, [64, 64])


def _mlp(keras: Any) -> Any:
    return _dense_stack(keras, 784, [512, 512])


def _deep_mlp(keras: Any) -> Any:
    return _dense_stack(keras, 784, [128] * 49)


def _lstm(keras: Any) -> Any:
    inputs = keras.Input((_LENGTH, _WIDTH))
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(keras.layers.LSTM(_WIDTH)(inputs)))


def _transformer(keras: Any) -> Any:
    inputs = keras.Input((_LENGTH,), dtype="int32")
    x = keras.layers.Embedding(_VOCABULARY, _WIDTH)(inputs)
    for _ in range(2):
        normal = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, _WIDTH // 4)(normal, normal)
        hidden = keras.layers.Dense(4 * _WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(_WIDTH)(hidden)
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(pooled))


def _cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(NUM_CLASSES),
        ]
    )


CASES = {
    "small_mlp": Case(_small_mlp, (32,)),
    "mlp": Case(_mlp, (784,)),
    "mlp_50_layers": Case(_deep_mlp, (784,)),
    "lstm": Case(_lstm, (_LENGTH, _WIDTH)),
    "transformer": Case(_transformer, (_LENGTH,), per_replica_batch=16, vocabulary=_VOCABULARY),
    "cnn": Case(_cnn, (28, 28, 1)),
    **ZOO,
}
MLP = CASES["mlp"]
