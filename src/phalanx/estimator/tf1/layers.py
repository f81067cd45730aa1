# SPDX-License-Identifier: Apache-2.0
"""Layers of `tf.compat.v1.layers`: the classes of Keras, and functions that create and apply one."""

from typing import Any

import keras
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


def dense(inputs: Any, units: int, activation: Any = None, **options: Any) -> Any:
    """Applies a new `keras.layers.Dense`. Call it in a model function."""
    return keras.layers.Dense(units, activation=activation, **options)(inputs)


def conv2d(inputs: Any, filters: int, kernel_size: Any, **options: Any) -> Any:
    """Applies a new `keras.layers.Conv2D`. Call it in a model function."""
    return keras.layers.Conv2D(filters, kernel_size, **options)(inputs)


def max_pooling2d(inputs: Any, pool_size: Any, strides: Any, **options: Any) -> Any:
    """Applies `keras.layers.MaxPooling2D`. Call it in a model function."""
    return keras.layers.MaxPooling2D(pool_size, strides, **options)(inputs)


def average_pooling2d(inputs: Any, pool_size: Any, strides: Any, **options: Any) -> Any:
    """Applies `keras.layers.AveragePooling2D`. Call it in a model function."""
    return keras.layers.AveragePooling2D(pool_size, strides, **options)(inputs)


def batch_normalization(inputs: Any, training: bool = False, **options: Any) -> Any:
    """Applies a new `keras.layers.BatchNormalization`. Call it in a model function."""
    return keras.layers.BatchNormalization(**options)(inputs, training=training)


def dropout(inputs: Any, rate: float = 0.5, training: bool = False, **options: Any) -> Any:
    """Applies a new `keras.layers.Dropout`. Call it in a model function."""
    return keras.layers.Dropout(rate, **options)(inputs, training=training)


def flatten(inputs: Any) -> Any:
    """Applies `keras.layers.Flatten`. Call it in a model function."""
    return keras.layers.Flatten()(inputs)
