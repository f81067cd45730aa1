# SPDX-License-Identifier: Apache-2.0
"""Layers of `tf.compat.v1.layers`: the Keras classes, and functions that create and apply one."""

import jax
import keras
from jax.typing import ArrayLike
from keras.layers import (
    AveragePooling1D,
    AveragePooling2D,
    AveragePooling3D,
    BatchNormalization,
    Conv1D,
    Conv2D,
    Conv3D,
    Dense,
    Dropout,
    Flatten,
    MaxPooling1D,
    MaxPooling2D,
    MaxPooling3D,
)


def dense(inputs: ArrayLike, units: int, activation: object = None, **options: object) -> jax.Array:
    """Applies a new `keras.layers.Dense`. Call it in a model function."""
    return _applied(keras.layers.Dense(units, activation=activation, **options), inputs)


def conv2d(inputs: ArrayLike, filters: int, kernel_size: object, **options: object) -> jax.Array:
    """Applies a new `keras.layers.Conv2D`. Call it in a model function."""
    return _applied(keras.layers.Conv2D(filters, kernel_size, **options), inputs)


def max_pooling2d(inputs: ArrayLike, pool_size: object, strides: object, **options: object) -> jax.Array:
    """Applies `keras.layers.MaxPooling2D`. Call it in a model function."""
    return _applied(keras.layers.MaxPooling2D(pool_size, strides, **options), inputs)


def average_pooling2d(inputs: ArrayLike, pool_size: object, strides: object, **options: object) -> jax.Array:
    """Applies `keras.layers.AveragePooling2D`. Call it in a model function."""
    return _applied(keras.layers.AveragePooling2D(pool_size, strides, **options), inputs)


def batch_normalization(inputs: ArrayLike, training: bool = False, **options: object) -> jax.Array:
    """Applies a new `keras.layers.BatchNormalization`. Call it in a model function."""
    return _applied(keras.layers.BatchNormalization(**options), inputs, training=training)


def dropout(inputs: ArrayLike, rate: float = 0.5, training: bool = False, **options: object) -> jax.Array:
    """Applies a new `keras.layers.Dropout`. Call it in a model function."""
    return _applied(keras.layers.Dropout(rate, **options), inputs, training=training)


def flatten(inputs: ArrayLike) -> jax.Array:
    """Applies `keras.layers.Flatten`. Call it in a model function."""
    return _applied(keras.layers.Flatten(), inputs)


def _applied(layer: keras.layers.Layer, inputs: ArrayLike, **options: bool) -> jax.Array:
    # A new layer per call, as in TensorFlow 1: the graph finds its variables by name in later traces.
    outputs: jax.Array = layer(inputs, **options)
    return outputs
