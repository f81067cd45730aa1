"""Crosses of features and columns."""

import json
import runpy
from pathlib import Path

import numpy as np
from refusals import refusals

from phalanx import errors, feature_column

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "recorded_hashes.json").read_text(encoding="utf-8"))["crosses"]
CROSSES = runpy.run_path(str(HERE / "record_hashes.py"))["CROSSES"]
cross = feature_column.crossed_column
NINE = feature_column.categorical_column_with_identity("b", 9)


def test_crosses_of_raw_features_are_those_of_tensorflow():
    """Strings and integers; "" and -1 are values as others."""
    for name, (a, b) in CROSSES.items():
        ids = feature_column.prepare({"a": a, "b": b}, cross(["a", "b"], 10**9))["a_X_b:crossed"]
        assert ids[:, 0].tolist() == RECORDED[name], name


def test_missing_words_of_a_column_are_not_crossed():
    """A row has an id per combination of present words, and words that are not in the vocabulary are present."""
    word = feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"])
    features = {"word": [["a", ""], ["", ""], ["x", "b"]], "y": [["1", "2"]] * 3}
    ids = feature_column.prepare(features, cross([word, "y"], 1000))["word_X_y:crossed"]
    assert (ids >= 0).sum(axis=1).tolist() == [2, 0, 4]


test_bad_crosses_are_refused = refusals(
    errors.InvalidArgumentError,
    (lambda: cross(["a"], 9), r"keys=\['a'\]: must be a list of two keys or more.\nHINT: crossed_column"),
    (lambda: cross("ab", 9), r"keys='ab': must be a list of two keys or more.\nHINT: "),
    (lambda: cross(["a", 3], 9), r"a cross of 3: must be the name of a feature, or a categorical column.*\nHINT: "),
    (lambda: cross(["a", "b"], 0), r"hash_bucket_size=0: must be an integer from 1 to .*\nHINT: hash_bucket_size"),
    (lambda: cross(["a", "b"], 9, hash_key=-1), r"hash_key=-1: must be an integer below 2\*\*64.\nHINT: hash_key=0"),
    (
        lambda: cross(["a", feature_column.categorical_column_with_hash_bucket("b", 9)], 9),
        r"a cross of HashedColumn.*: hashes of hashes would collide.\nHINT: crossed_column\(\['b', ...\], ...\)",
    ),
    (
        lambda: cross(["a", feature_column.weighted_categorical_column(NINE, "w")], 9),
        r"a cross of Weighted.*: must be the name of a feature, or a categorical column without weights.\nHINT: ",
    ),
)


def test_floats_are_crossed_without_fractions():
    """The ids are those that TensorFlow 2.15 computes."""
    layer = feature_column.DenseFeatures([feature_column.indicator_column(cross(["age", "sex"], 100))])
    rows = layer({"age": np.array([22.0, 3.5, -1.5, 40.9]), "sex": ["m", "f", "f", "m"]})
    assert np.argmax(rows, axis=1).tolist() == [87, 4, 5, 46]
    least = np.iinfo("int64").min
    missing, number = (layer({"age": [age], "sex": ["m"]}) for age in (np.nan, least))
    assert missing.tolist() == number.tolist()
