"""Indicator and embedding columns, and tables that columns share."""

import keras
import numpy as np
from refusals import refusals

from phalanx import errors, feature_column

KIND = feature_column.categorical_column_with_identity("kind", 3)
TOWN = feature_column.categorical_column_with_identity("town", 3)
embedding, shared = feature_column.embedding_column, feature_column.shared_embeddings


def test_embedding_starts_with_a_truncated_normal_distribution():
    """Its standard deviation is one over the root of the dimension, and no value is beyond two of them."""
    column = embedding(feature_column.categorical_column_with_identity("kind", 5000), 16)
    layer = feature_column.DenseFeatures(column)
    layer({"kind": [0]})
    (table,) = (keras.ops.convert_to_numpy(weight) for weight in layer.weights)
    assert np.abs(table).max() < 2.3 / 4
    assert 0.21 < table.std() < 0.26


def test_embedding_takes_initializers_of_keras():
    for initializer in ("ones", keras.initializers.Ones, lambda shape, dtype=None: np.ones(shape)):
        layer = feature_column.DenseFeatures(embedding(KIND, 2, initializer=initializer))
        assert layer({"kind": [2, -1]}).tolist() == [[1, 1], [0, 0]]


def test_tables_that_are_not_trained_have_no_gradient():
    """`trainable=False` of a column, and of a layer for all columns."""
    columns = [embedding(KIND, 2, trainable=False), embedding(TOWN, 2)]
    layer = feature_column.DenseFeatures(columns)
    layer({"kind": [2], "town": [1]})
    assert [weight.path.split("/")[-2] for weight in layer.trainable_weights] == ["town_embedding"]
    frozen = feature_column.DenseFeatures(columns, trainable=False)
    frozen({"kind": [2], "town": [1]})
    assert not frozen.trainable_weights
    assert len(frozen.weights) == 2


def test_shared_columns_have_one_table_in_a_layer():
    """Equal ids of different columns have equal rows, and the columns are in the order of the arguments."""
    columns = shared([TOWN, KIND], 4)
    assert [column.name for column in columns] == ["town_shared_embedding", "kind_shared_embedding"]
    layer = feature_column.DenseFeatures(columns)
    rows = np.asarray(layer({"kind": [2], "town": [2]}))
    np.testing.assert_array_equal(rows[:, :4], rows[:, 4:])
    (table,) = layer.weights
    assert table.path == f"{layer.name}/kind_town_shared_embedding/embedding_weights"
    # The kind of a weighted column is that of its ids.
    layer = feature_column.DenseFeatures(shared([KIND, feature_column.weighted_categorical_column(TOWN, "w")], 2))
    assert layer({"kind": [1], "town": [1], "w": [1.0]}).shape == (1, 4)


test_bad_arguments_are_refused = refusals(
    errors.InvalidArgumentError,
    (lambda: embedding(KIND, 0), r"dimension=0: must be a positive integer.\nHINT: dimension=8"),
    (lambda: embedding(KIND, 2, initializer=3), r"initializer=3: must be a Keras initializer .*\nHINT: "),
    (lambda: embedding(KIND, 2, initializer="oens"), r"initializer='oens': must be a Keras initializer .*\nHINT: "),
    (lambda: embedding(KIND, 2, max_norm=0), r"max_norm=0: must be None or a positive number.\nHINT: max_norm=1.0"),
    (lambda: embedding(KIND, 2, trainable=1), r"trainable=1: must be True or False.\nHINT: trainable=True"),
    (lambda: shared(KIND, 2), r"categorical_columns=Ident.*: must be a list of columns.\nHINT: "),
    (lambda: shared([KIND], 2, "max"), r"combiner='max': must be .*\nHINT: "),
    (
        lambda: shared([KIND], 2, shared_embedding_collection_name=3),
        r"shared_embedding_collection_name=3: must be the name .*\nHINT: ",
    ),
    (
        lambda: shared([KIND, feature_column.categorical_column_with_identity("town", 4)], 2),
        r"kinds and sizes .*3.*4.*: columns that share a table must be of one kind and size.\nHINT: embedding_column",
    ),
)
