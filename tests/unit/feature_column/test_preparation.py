"""What `prepare` returns: numbers only, under names that two columns of one feature do not share."""

import jax.numpy as jnp
import numpy as np
from refusals import refusals

from phalanx import errors, feature_column

WORD = feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"])
HASH = feature_column.categorical_column_with_hash_bucket("word", 10)
AGE = feature_column.numeric_column("age")


def test_prepared_features_are_numbers():
    """Strings that no column needs are left out; other features stay, and so do numbers of several columns."""
    features = {"word": ["a", "x"], "age": [30, 40], "note": ["so", "so"]}
    features |= {"weight": np.array([1.0, 2.0]), "image": jnp.zeros((2, 4))}
    categories = [feature_column.indicator_column(WORD), feature_column.embedding_column(HASH, 2)]
    prepared = feature_column.prepare(features, [*categories, feature_column.bucketized_column(AGE, [35]), AGE])
    assert {*prepared} == {"word:vocabulary", "word:hashed", "age", "weight", "image"}
    assert prepared["weight"] is features["weight"]
    assert prepared["image"] is features["image"]
    assert prepared["age"].tolist() == [[30.0], [40.0]]


def test_prepared_features_may_be_prepared_again():
    """The second time changes nothing, also for integers of a vocabulary of integers."""
    column = feature_column.categorical_column_with_vocabulary_list("id", [20, 10])
    once = feature_column.prepare({"id": [10, 20]}, [column, column])
    again = feature_column.prepare(once, column)
    assert once["id:vocabulary"].tolist() == [[1], [0]]
    assert again["id:vocabulary"] is once["id:vocabulary"]


def test_features_of_no_rows_have_ids_of_no_rows():
    cross = feature_column.crossed_column(["word", "x"], 9)
    prepared = feature_column.prepare({"word": np.array([], str), "x": np.array([], int)}, [WORD, HASH, cross])
    assert {ids.shape[0] for ids in prepared.values()} == {0}


test_bad_features_are_refused = refusals(
    errors.InvalidArgumentError,
    (([1, 2], AGE), r"features=\[1, 2\]: must be a dict from names to arrays.\nHINT: "),
    (
        ({"word": ["a"], "age": [1, 2]}, [WORD, AGE]),
        r"'word:vocabulary': 1, 'age': 2.* rows: .*one number of.*\nHINT: ",
    ),
    (
        ({"word": ["a"], "x": ["a", "b"]}, feature_column.crossed_column(["word", "x"], 9)),
        r"features with {'word': 1, 'x': 2} rows: all features of a batch have one number of rows.\nHINT: ",
    ),
    (
        ({"word": ["a"]}, [WORD, feature_column.categorical_column_with_vocabulary_list("word", ["b"])]),
        r"ids are named 'word:vocabulary': Voc.* and Voc.*: a program could read only one of them.\nHINT: ",
    ),
    call=lambda case: feature_column.prepare(*case),
)
