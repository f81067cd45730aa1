# SPDX-License-Identifier: Apache-2.0
"""What a model and its data are, for any Keras: it is passed in. The same weights and batches in every library."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_CLASSES = 10


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
