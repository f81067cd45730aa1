"""Categorical columns with weights."""

import numpy as np
import pytest

from phalanx import errors, feature_column

WORD = feature_column.categorical_column_with_vocabulary_list("word", ["a", "b", "c"])
WEIGHTED = feature_column.weighted_categorical_column(WORD, "count")


def test_weights_of_missing_words_count_for_nothing():
    """The weights are floats of the prepared features, also if they were integers."""
    features = {"word": [["a", "a", ""], ["c", "x", "b"]], "count": [[1, 2, 9], [3, 9, 0]]}
    prepared = feature_column.prepare(features, WEIGHTED)
    assert {key: value.dtype.name for key, value in prepared.items()} == {
        "word:vocabulary": "int32",
        "count": "float32",
    }
    rows = feature_column.DenseFeatures(feature_column.indicator_column(WEIGHTED))(prepared)
    assert rows.tolist() == [[3, 0, 0], [0, 0, 3]]


def test_weights_of_another_shape_are_refused():
    """There must be a weight per id."""
    layer = feature_column.LinearFeatures(WEIGHTED)
    match = (
        r"the weights 'count' of shape \(2, 2\): the ids of 'word' have the shape \(2, 1\).\nHINT: one weight per id"
    )
    with pytest.raises(errors.InvalidArgumentError, match=match):
        layer({"word": ["a", "b"], "count": np.ones((2, 2))})


def test_key_of_the_weights_must_be_a_string():
    """The message names the argument."""
    with pytest.raises(errors.InvalidArgumentError, match=r"weight_feature_key=3: must be the name .*\nHINT: "):
        feature_column.weighted_categorical_column(WORD, 3)
