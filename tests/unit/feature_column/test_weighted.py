"""Categorical columns with weights."""

import numpy as np
from refusals import refused

from phalanx import errors, feature_column

WORD = feature_column.categorical_column_with_vocabulary_list("word", ["a", "b", "c"])
WEIGHTED = feature_column.weighted_categorical_column(WORD, "count")


def test_weights_of_missing_words_count_for_nothing():
    """The weights are floats of the prepared features, also if they were integers."""
    features = {"word": [["a", "a", ""], ["c", "x", "b"]], "count": [[1, 2, 9], [3, 9, 0]]}
    prepared = feature_column.prepare(features, WEIGHTED)
    dtypes = {key: value.dtype.name for key, value in prepared.items()}
    assert dtypes == {"word:vocabulary": "int32", "count": "float32"}
    rows = feature_column.DenseFeatures(feature_column.indicator_column(WEIGHTED))(prepared)
    assert rows.tolist() == [[3, 0, 0], [0, 0, 3]]


def test_other_weights_are_refused():
    """There must be a weight per id, and the key is a string."""
    layer = feature_column.LinearFeatures(WEIGHTED)
    match = r"weights 'count' of shape \(2, 2\): the ids of 'word' have the shape \(2, 1\).\nHINT: one weight per id"
    with refused(errors.InvalidArgumentError, f"the {match}"):
        layer({"word": ["a", "b"], "count": np.ones((2, 2))})
    with refused(errors.InvalidArgumentError, r"weight_feature_key=3: must be the name .*\nHINT: "):
        feature_column.weighted_categorical_column(WORD, 3)
