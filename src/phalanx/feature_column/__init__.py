# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.feature_column`: descriptions of features, and the Keras layers that read them."""

from phalanx.errors.names import suggest_names
from phalanx.feature_column.categorical import categorical_column_with_hash_bucket, categorical_column_with_identity
from phalanx.feature_column.crossed import crossed_column
from phalanx.feature_column.dense import embedding_column, indicator_column, shared_embeddings
from phalanx.feature_column.layers import DenseFeatures, LinearFeatures, input_layer, linear_model
from phalanx.feature_column.numeric import bucketized_column, numeric_column
from phalanx.feature_column.preparation import prepare
from phalanx.feature_column.vocabulary import (
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)
from phalanx.feature_column.weighted import weighted_categorical_column

__all__ = [
    "DenseFeatures",
    "LinearFeatures",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "input_layer",
    "linear_model",
    "numeric_column",
    "prepare",
    "shared_embeddings",
    "weighted_categorical_column",
]

suggest_names(__name__)
