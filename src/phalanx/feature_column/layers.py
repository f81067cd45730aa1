# SPDX-License-Identifier: Apache-2.0
"""Keras layers of feature columns, and the functions of tf.compat.v1 that create them."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import keras
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.feature_column.base import AbstractCategoricalColumn, AbstractColumn, AbstractDenseColumn, Table
from phalanx.feature_column.dense import initializer_of
from phalanx.feature_column.lookup import combined_rows
from phalanx.feature_column.names import checked_combiner, sorted_columns
from phalanx.feature_column.preparation import prepared_inputs
from phalanx.typing import PyTree


class _ColumnLayer(keras.layers.Layer):
    """A layer that reads the inputs of columns from a dict, and has the tables of embedding columns."""

    def __init__(self, feature_columns: PyTree, trainable: bool, name: str | None, **kwargs: PyTree) -> None:
        arguments.flag("trainable", trainable)
        # In half precision the boundaries of buckets would move, so inputs keep their dtype.
        super().__init__(trainable=trainable, name=name, **{"autocast": False, **kwargs})
        self.columns = self._checked(sorted_columns(feature_columns))
        self._tables: dict[str, keras.Variable] = {}

    def __call__(self, features: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the layer, with features that are prepared or, outside traced functions, raw."""
        return super().__call__(prepared_inputs(features, self.columns), *args, **kwargs)

    def _checked(self, columns: list[AbstractColumn]) -> list[AbstractColumn]:
        return columns

    @override
    def build(self, input_shape: PyTree = None) -> None:
        # A dict as an ordered set: two columns share a table, and variables
        # must be created in one order on all processes.
        for table in {column.table: None for column in self._dense() if column.table is not None}:
            if table.name in self._tables:
                raise InvalidArgumentError(
                    f"two tables with the name {table.name!r}",
                    "their columns differ in size or in whether they are trained.",
                    'shared_embeddings(..., shared_embedding_collection_name="towns")',
                )
            shape = (table.num_buckets, table.dimension)
            initializer = initializer_of(table)
            variable = self._variable(table.name, "embedding_weights", shape, initializer, table.trainable)
            self._tables[table.name] = variable

    def _dense(self) -> Iterable[AbstractDenseColumn]:
        return (column for column in self.columns if isinstance(column, AbstractDenseColumn))

    def _variable(
        self, scope: str, name: str, shape: tuple[int, ...], initializer: PyTree, trainable: bool = True
    ) -> keras.Variable:
        """Returns a variable whose path has the name of a column, as in TensorFlow."""
        with keras.name_scope(scope):
            return keras.Variable(initializer, shape=shape, dtype="float32", trainable=trainable, name=name)

    def _rows(self, column: AbstractDenseColumn, prepared: Mapping[str, PyTree]) -> jax.Array:
        table: Table | None = column.table
        tables = {} if table is None else {table: self._tables[table.name].value}
        return column.rows(prepared, tables)

    @override
    def get_config(self) -> dict[str, Any]:
        columns = [keras.saving.serialize_keras_object(column) for column in self.columns]
        return {**super().get_config(), "feature_columns": columns}

    @classmethod
    @override
    def from_config(cls, config: dict[str, Any]) -> Self:
        columns = [keras.saving.deserialize_keras_object(column) for column in config["feature_columns"]]
        return cls(**{**config, "feature_columns": columns})


@keras.saving.register_keras_serializable(package="phalanx")
class DenseFeatures(_ColumnLayer):
    """Keras layer that maps a dict of features to one array (batch, width) of float32. May be created in any context.

    The parts are in the order of the names of the columns.

    Inside compiled functions and `fit`, the features must come from `prepare`. Elsewhere the layer prepares them itself.

    Args:
      feature_columns: a dense column, or an iterable of dense columns.
      trainable: whether the tables of embedding columns are trained.
      name: name of the layer.
      **kwargs: other arguments of a Keras layer.

    Raises:
      InvalidArgumentError: an item is not a dense column, there is none, or two have one name.

    Source: tf.compat.v1.keras.layers.DenseFeatures.

    Example:
      >>> import phalanx
      >>> age = phalanx.feature_column.numeric_column("age")
      >>> size = phalanx.feature_column.categorical_column_with_vocabulary_list("size", ["small", "large"])
      >>> layer = phalanx.feature_column.DenseFeatures([phalanx.feature_column.indicator_column(size), age])
      >>> layer({"age": [30, 60], "size": ["small", "large"]}).tolist()
      [[30.0, 1.0, 0.0], [60.0, 0.0, 1.0]]
    """

    def __init__(
        self, feature_columns: PyTree, trainable: bool = True, name: str | None = None, **kwargs: PyTree
    ) -> None:
        super().__init__(feature_columns, trainable, name, **kwargs)

    @override
    def _checked(self, columns: list[AbstractColumn]) -> list[AbstractColumn]:
        for column in columns:
            if not isinstance(column, AbstractDenseColumn):
                raise InvalidArgumentError(
                    f"feature_columns with {shown(column)}",
                    "a categorical column is not dense.",
                    "indicator_column(column) or embedding_column(column, 8)",
                )
        return columns

    @override
    def call(self, features: Mapping[str, PyTree]) -> jax.Array:
        # In the order of the names, as in TensorFlow: kernels of the next layer depend on it.
        return jnp.concatenate([self._rows(column, features) for column in self._dense()], axis=1)


@keras.saving.register_keras_serializable(package="phalanx")
class LinearFeatures(_ColumnLayer):
    """Keras layer of a linear model of columns: (batch, units) of float32. May be created in any context.

    Each column has weights, which start at 0: a row per id, or per number of a dense column. There is one bias.

    Args:
      feature_columns: a column, or an iterable of columns, dense or categorical.
      units: number of outputs.
      sparse_combiner: "mean", "sqrtn" or "sum": how the weights of several ids of a row are combined.
      trainable: whether the weights are trained.
      name: name of the layer.
      **kwargs: other arguments of a Keras layer.

    Raises:
      InvalidArgumentError: an item is not a column, there is none, two have one name, or an argument has the wrong type.

    Source: the linear model of tf.estimator.LinearClassifier, whose variables have the same names.

    Example:
      >>> import phalanx
      >>> age = phalanx.feature_column.numeric_column("age")
      >>> layer = phalanx.feature_column.LinearFeatures([age], name="linear_model")
      >>> layer({"age": [30, 60]}).tolist(), [weights.path for weights in layer.weights]
      ([[0.0], [0.0]], ['linear_model/age/weights', 'linear_model/bias_weights'])
    """

    def __init__(
        self,
        feature_columns: PyTree,
        units: int = 1,
        sparse_combiner: str = "sum",
        trainable: bool = True,
        name: str | None = None,
        **kwargs: PyTree,
    ) -> None:
        super().__init__(feature_columns, trainable, name, **kwargs)
        self.units = arguments.integer(
            "units", units, most=2**31 - 1, kind="an integer from 1 to 2**31 - 1", hint="units=1"
        )
        self.sparse_combiner = checked_combiner(sparse_combiner, "sparse_combiner")
        self._column_weights: dict[str, keras.Variable] = {}

    @override
    def build(self, input_shape: PyTree = None) -> None:
        super().build(input_shape)
        for column in self.columns:
            size = column.num_buckets if isinstance(column, AbstractCategoricalColumn) else column.width  # type: ignore[attr-defined]
            self._column_weights[column.name] = self._variable(column.name, "weights", (size, self.units), "zeros")
        # The name is that of TensorFlow's linear model. So a warm start can name it.
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", dtype="float32", name="bias_weights")

    @override
    def call(self, features: Mapping[str, PyTree]) -> jax.Array:
        sums = [self._sum(column, features) for column in self.columns]
        outputs: jax.Array = sum(sums[1:], sums[0]) + self.bias.value
        return outputs

    def _sum(self, column: AbstractColumn, features: Mapping[str, PyTree]) -> jax.Array:
        # A bucketized column is dense and categorical. Categories come first: a
        # lookup is cheaper than a product with zeros.
        weights = self._column_weights[column.name].value
        if isinstance(column, AbstractCategoricalColumn):
            return combined_rows(weights, column.ids(features), column.weights(features), self.sparse_combiner)
        assert isinstance(column, AbstractDenseColumn)
        return jnp.matmul(self._rows(column, features), weights)

    @override
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units, "sparse_combiner": self.sparse_combiner}


def input_layer(features: Mapping[str, PyTree], feature_columns: PyTree, *, trainable: bool = True) -> jax.Array:
    """Returns the rows of dense columns, (batch, width), from a new `DenseFeatures` layer. May be called in any context.

    Args:
      features: dict of prepared features, or outside traced functions of raw ones.
      feature_columns: a dense column, or an iterable of dense columns.
      trainable: whether the tables of embedding columns are trained.

    Raises:
      InvalidArgumentError: see `DenseFeatures`.

    Source: tf.compat.v1.feature_column.input_layer.

    Example:
      >>> import phalanx
      >>> age = phalanx.feature_column.numeric_column("age")
      >>> phalanx.feature_column.input_layer({"age": [30, 60]}, [age]).tolist()
      [[30.0], [60.0]]
    """
    return DenseFeatures(feature_columns, trainable, name="input_layer")(features)  # type: ignore[no-any-return]


def linear_model(
    features: Mapping[str, PyTree],
    feature_columns: PyTree,
    units: int = 1,
    sparse_combiner: str = "sum",
    *,
    trainable: bool = True,
) -> jax.Array:
    """Returns the outputs of a linear model, (batch, units), from a new `LinearFeatures` layer. May be called in any context.

    Args:
      features: dict of prepared features, or outside traced functions of raw ones.
      feature_columns: a column, or an iterable of columns.
      units: number of outputs.
      sparse_combiner: "mean", "sqrtn" or "sum": how the weights of several ids of a row are combined.
      trainable: whether the weights are trained.

    Raises:
      InvalidArgumentError: see `LinearFeatures`.

    Source: tf.compat.v1.feature_column.linear_model.

    Example:
      >>> import phalanx
      >>> age = phalanx.feature_column.numeric_column("age")
      >>> phalanx.feature_column.linear_model({"age": [30, 60]}, [age]).tolist()
      [[0.0], [0.0]]
    """
    layer = LinearFeatures(feature_columns, units, sparse_combiner, trainable, name="linear_model")
    return layer(features)  # type: ignore[no-any-return]
