# SPDX-License-Identifier: Apache-2.0
"""Dense columns of categories: `indicator_column`, `embedding_column` and `shared_embeddings`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.feature_column.base import AbstractCategoricalColumn, AbstractDenseColumn, AbstractInput, Table
from phalanx.feature_column.lookup import combined_rows, multi_hot
from phalanx.feature_column.names import checked_categorical, checked_combiner, checked_key
from phalanx.feature_column.weighted import WeightedColumn
from phalanx.typing import PyTree


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class IndicatorColumn(AbstractDenseColumn):
    """How often each id occurs."""

    categorical_column: AbstractCategoricalColumn

    @property
    @override
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    @override
    def width(self) -> int:
        return self.categorical_column.num_buckets

    @override
    def inputs(self) -> Iterator[AbstractInput]:
        return self.categorical_column.inputs()

    @override
    def rows(self, prepared: Mapping[str, Any], tables: Mapping[Table, jax.Array]) -> jax.Array:
        column = self.categorical_column
        return multi_hot(column.ids(prepared), column.weights(prepared), self.width)


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class EmbeddingColumn(AbstractDenseColumn):
    """Combined rows of a table. The table of a shared column has another name."""

    categorical_column: AbstractCategoricalColumn
    embedding: Table
    combiner: str
    max_norm: float | None

    @property
    @override
    def name(self) -> str:
        # feature_column_v2.py names the two kinds so, and layers sort their columns by these names.
        suffix = (
            "embedding" if self.embedding.name == f"{self.categorical_column.name}_embedding" else "shared_embedding"
        )
        return f"{self.categorical_column.name}_{suffix}"

    @property
    @override
    def width(self) -> int:
        return self.embedding.dimension

    @property
    @override
    def table(self) -> Table:
        return self.embedding

    @override
    def inputs(self) -> Iterator[AbstractInput]:
        return self.categorical_column.inputs()

    @override
    def rows(self, prepared: Mapping[str, Any], tables: Mapping[Table, jax.Array]) -> jax.Array:
        column = self.categorical_column
        ids, weights = column.ids(prepared), column.weights(prepared)
        return combined_rows(tables[self.embedding], ids, weights, self.combiner, self.max_norm)


def indicator_column(categorical_column: AbstractCategoricalColumn) -> IndicatorColumn:
    """Returns a dense column that counts each id of a row. May be called in any context.

    Args:
      categorical_column: the column of the ids. If it is weighted, the weights of an id are added.

    Raises:
      InvalidArgumentError: the column is not categorical.

    Source: tf.feature_column.indicator_column.

    Example:
      >>> from phalanx import feature_column
      >>> size = feature_column.categorical_column_with_vocabulary_list("size", ["small", "large"])
      >>> features = {"size": [["small", ""], ["large", "large"]]}
      >>> feature_column.DenseFeatures([feature_column.indicator_column(size)])(features).tolist()
      [[1.0, 0.0], [0.0, 2.0]]
    """
    return IndicatorColumn(checked_categorical(categorical_column))


def embedding_column(
    categorical_column: AbstractCategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: PyTree = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """Returns a dense column that looks up ids in a table and combines the rows. May be called in any context.

    Args:
      categorical_column: the column of the ids.
      dimension: length of a row.
      combiner: "mean", "sqrtn" or "sum": how the rows of several ids are combined.
      initializer: initializer of Keras, or a function of a shape and a dtype. None for a truncated normal distribution with the
        standard deviation `1 / sqrt(dimension)`.
      max_norm: largest norm of a row. Longer rows are scaled when they are looked up.
      trainable: whether the table is trained.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or a number is not positive.

    Source: tf.feature_column.embedding_column. A table cannot be loaded from a checkpoint of TensorFlow.

    Example:
      >>> from phalanx import feature_column
      >>> size = feature_column.categorical_column_with_vocabulary_list("size", ["small", "large"])
      >>> layer = feature_column.DenseFeatures([feature_column.embedding_column(size, 4)])
      >>> layer({"size": ["small", "huge"]}).shape
      (2, 4)
    """
    column = checked_categorical(categorical_column)
    table = _table(f"{column.name}_embedding", column.num_buckets, dimension, initializer, trainable)
    return EmbeddingColumn(column, table, checked_combiner(combiner), _norm(max_norm))


def shared_embeddings(
    categorical_columns: Sequence[AbstractCategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: PyTree = None,
    shared_embedding_collection_name: str | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[EmbeddingColumn]:
    """Returns a dense column per categorical column. They share one table in each layer. May be called in any context.

    Args:
      categorical_columns: columns of one kind, with the same number of ids.
      dimension: length of a row.
      combiner: "mean", "sqrtn" or "sum": how the rows of several ids are combined.
      initializer: see `embedding_column`.
      shared_embedding_collection_name: name of the table. None for the names of the columns.
      max_norm: largest norm of a row. Longer rows are scaled when they are looked up.
      trainable: whether the table is trained.

    Raises:
      InvalidArgumentError: the columns differ in kind or number of ids, an argument has the wrong type, or a number is not
        positive.

    Source: tf.feature_column.shared_embeddings.

    Example:
      >>> from phalanx import feature_column
      >>> towns = [feature_column.categorical_column_with_identity(key, 10) for key in ("from", "to")]
      >>> layer = feature_column.DenseFeatures(feature_column.shared_embeddings(towns, 4))
      >>> layer({"from": [1, 2], "to": [2, 3]}).shape, [table.shape for table in layer.weights]
      ((2, 8), [(10, 4)])
    """
    if not isinstance(categorical_columns, (list, tuple)) or not categorical_columns:
        raise InvalidArgumentError(
            f"categorical_columns={shown(categorical_columns)}", "must be a list of columns.", "[origin, destination]"
        )
    columns = [checked_categorical(column) for column in categorical_columns]
    # TensorFlow's rule: rows of one table must mean the same in each column.
    kinds = {(type(_unweighted(column)).__name__, column.num_buckets) for column in columns}
    if len(kinds) > 1:
        raise InvalidArgumentError(
            f"shared_embeddings of columns with the kinds and sizes {sorted(kinds)}",
            "columns that share a table must be of one kind and size.",
            "embedding_column for each column",
        )
    if (name := shared_embedding_collection_name) is None:
        # Sorted, so that the name of the variable does not depend on the order of the list.
        name = "_".join(sorted(column.name for column in columns)) + "_shared_embedding"
    name = checked_key(name, "shared_embedding_collection_name")
    table = _table(name, columns[0].num_buckets, dimension, initializer, trainable)
    combiner, norm = checked_combiner(combiner), _norm(max_norm)
    return [EmbeddingColumn(column, table, combiner, norm) for column in columns]


def _unweighted(column: AbstractCategoricalColumn) -> AbstractCategoricalColumn:
    return column.categorical_column if isinstance(column, WeightedColumn) else column


def _table(name: str, num_buckets: int, dimension: object, initializer: PyTree, trainable: object) -> Table:
    dimension = arguments.integer("dimension", dimension, hint="dimension=8")
    try:
        if hasattr(initializer, "dtype") and not callable(initializer):
            raise TypeError("it is an array.")
        # Keras returns a new object for a class or a name, and None and objects unchanged.
        initializer = keras.initializers.get(initializer)
    except Exception as e:
        raise InvalidArgumentError(
            f"initializer={shown(initializer)}", "must be a Keras initializer or a function.", 'initializer="zeros"'
        ) from e
    return Table(name, num_buckets, dimension, initializer, arguments.flag("trainable", trainable))


def initializer_of(table: Table) -> PyTree:
    """Returns the initializer of a table, or the default one."""
    if table.initializer is not None:
        return table.initializer
    # The default of tf.feature_column.embedding_column: rows have a norm near 1 for every dimension.
    return keras.initializers.TruncatedNormal(stddev=1 / math.sqrt(table.dimension))


def _norm(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidArgumentError(f"max_norm={shown(value)}", "must be None or a positive number.", "max_norm=1.0")
    return float(value)
