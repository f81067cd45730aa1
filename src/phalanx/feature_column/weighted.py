# SPDX-License-Identifier: Apache-2.0
"""Columns of categories with weights: `weighted_categorical_column`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from phalanx.errors import InvalidArgumentError
from phalanx.feature_column.base import AbstractCategoricalColumn, AbstractInput, AbstractRawInput, Occurrences
from phalanx.feature_column.names import checked_categorical, checked_key
from phalanx.feature_column.raw import Feature, in_columns, numbers_of
from phalanx.typing import PyTree


@dataclass(frozen=True)
class _Weights(AbstractRawInput):
    """The weights of the ids of a column."""

    key: str

    @override
    def array(self, features: Mapping[str, PyTree]) -> Feature:
        weights = numbers_of(features, self.key, "float32")
        return in_columns(weights) if isinstance(weights, np.ndarray) else weights


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class WeightedColumn(AbstractCategoricalColumn):
    """A categorical column whose ids have weights."""

    categorical_column: AbstractCategoricalColumn
    weight_feature_key: str

    @property
    @override
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    @override
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    @override
    def inputs(self) -> Iterator[AbstractInput]:
        yield from self.categorical_column.inputs()
        yield _Weights(self.weight_feature_key)

    @override
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        return self.categorical_column.occurrences(features)

    @override
    def ids(self, prepared: Mapping[str, Any]) -> jax.Array:
        return self.categorical_column.ids(prepared)

    @override
    def weights(self, prepared: Mapping[str, Any]) -> jax.Array | None:
        weights: jax.Array = in_columns(jnp.asarray(prepared[self.weight_feature_key], jnp.float32))
        # Checked in the program, where both are known; shapes are static, so it costs nothing per step.
        if weights.shape != (shape := self.ids(prepared).shape):
            raise InvalidArgumentError(
                f"the weights {self.weight_feature_key!r} of shape {weights.shape}",
                f"the ids of {self.categorical_column.name!r} have the shape {shape}.",
                'one weight per id, and padding of ids with "" or -1',
            )
        return weights


def weighted_categorical_column(
    categorical_column: AbstractCategoricalColumn, weight_feature_key: str
) -> WeightedColumn:
    """Returns a categorical column whose ids have weights. May be called in any context.

    Args:
      categorical_column: the column of the ids.
      weight_feature_key: name of the feature with a weight per id.

    Raises:
      InvalidArgumentError: the column is not categorical, or the key is not a string.

    Source: tf.feature_column.weighted_categorical_column.

    Example:
      >>> from phalanx import feature_column
      >>> word = feature_column.categorical_column_with_identity("word", 3)
      >>> word = feature_column.weighted_categorical_column(word, "count")
      >>> features = {"word": [[0, 2]], "count": [[0.5, 2.0]]}
      >>> feature_column.DenseFeatures([feature_column.indicator_column(word)])(features).tolist()
      [[0.5, 0.0, 2.0]]
    """
    column = checked_categorical(categorical_column)
    return WeightedColumn(column, checked_key(weight_feature_key, "weight_feature_key"))
