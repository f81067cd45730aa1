# SPDX-License-Identifier: Apache-2.0
"""The models and batches on which everything is measured, for any Keras: it is passed in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
NUM_CLASSES = 10
COMPARED_STEPS = 16
_VOCABULARY, _LENGTH, _WIDTH = 1000, 32, 64


@dataclass(frozen=True)
class Case:
    """One model and its data.

    Args:
      build: makes the model with the Keras it is given; it returns logits.
      example_shape: the shape of one example.
      per_replica_batch: how many examples a replica gets.
      vocabulary: examples are integers below it; 0 for floats.
    """

    build: Callable[[Any], Any]
    example_shape: tuple[int, ...]
    per_replica_batch: int = 64
    vocabulary: int = 0

    def batch(self, replicas: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and labels for all replicas."""
        rng = np.random.default_rng(0)
        shape = (self.per_replica_batch * replicas, *self.example_shape)
        x = rng.integers(self.vocabulary, size=shape) if self.vocabulary else rng.random(shape)
        y = rng.integers(NUM_CLASSES, size=shape[0])
        return x.astype("int32" if self.vocabulary else "float32"), y.astype("int32")

    def model(self, keras: Any) -> Any:
        """Returns the built model, with the same weights whatever Keras it is."""
        model = self.build(keras)
        model.set_weights(initial(model.get_weights()))
        return model


def initial(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the weights a model begins with: those of its layers, but the same kernels in every library."""
    rng = np.random.default_rng(1)
    return [_filled(w, rng) for w in weights]


def sizes(weights: Sequence[np.ndarray]) -> list[float]:
    """Returns the mean size of the elements of each weight, to compare models in several processes."""
    return [float(np.abs(w).mean()) for w in weights]


def _filled(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if weight.ndim < 2:
        return weight
    fan_in = math.prod(weight.shape[:-1])
    return (rng.standard_normal(weight.shape) * math.sqrt(2 / fan_in)).astype(weight.dtype)


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
}
MLP = CASES["mlp"]
