"""Features as lists, arrays of strings, bytes, objects and numbers, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals, refused

from phalanx import errors, feature_column

WORDS = feature_column.categorical_column_with_vocabulary_list("word", ["a", "é"])
NUMBERS = feature_column.numeric_column("x")
IDS = feature_column.categorical_column_with_identity("id", 3)


def ids_of(column, **features):
    (ids,) = feature_column.prepare(features, column).values()
    assert ids.dtype == np.int32
    return ids.tolist()


@pytest.mark.parametrize(
    "words",
    [
        ["é", "a", "", "b"],
        np.array(["é", "a", "", "b"]),
        np.array(["é", "a", "", "b"], object),
        np.array(["é".encode(), b"a", b"", b"b"]),
        np.array(["é".encode(), "a", None, b"\xff"], object),
        np.array(["é", "a", "", "b"], np.dtypes.StringDType()),
    ],
)
def test_strings_of_all_dtypes_have_the_same_ids(words):
    """Strings, bytes and objects of both are one vocabulary; "" and None are missing."""
    assert ids_of(WORDS, word=words) == [[1], [0], [-1], [-1]]


def test_bytes_that_are_not_text_have_a_hash():
    """The hash of bytes is that of these bytes, also if they are not UTF-8."""
    column = feature_column.categorical_column_with_hash_bucket("word", 10**9)
    (one,), (other,) = ids_of(column, word=np.array([b"\xff", b"\xfe"], object))
    assert one != other


@pytest.mark.parametrize("ids", [[2, 0, -1], np.array([2, 0, -1], np.int8), jnp.array([[2], [0], [-1]])])
def test_integers_of_all_dtypes_have_the_same_ids(ids):
    assert ids_of(IDS, id=ids) == [[2], [0], [-1]]


test_bad_features_are_refused = refusals(
    errors.InvalidArgumentError,
    (({"y": [1.0]}, NUMBERS), r"'x' of a column: the features are \['y'\].\nHINT: features = "),
    (({"x": 1.0}, NUMBERS), r"'x' with the value array\(1.\): it must have a batch dim.\nHINT: "),
    (({"id": [[1], [1, 2]]}, IDS), r"'id': its rows differ in length.\nHINT: .*padded"),
    (({"x": ["a"]}, NUMBERS), r"'x' of dtype <U1: its column needs real numbers.\nHINT: "),
    (({"x": [1j]}, NUMBERS), r"'x' of dtype complex128: its column needs real numbers.\nHINT: "),
    (
        ({"x": [0.5]}, feature_column.numeric_column("x", dtype="int32")),
        r"'x' of dtype float64: the dtype of its column is int32.\nHINT: numeric_column",
    ),
    (({"id": [[[1]]]}, IDS), r"'id' of shape \(1, 1, 1\): categories have at most two dims.\nHINT: "),
    (({"id": [0.5]}, IDS), r"'id' of dtype float64: its column needs integers.\nHINT: "),
    (({"id": [True]}, IDS), r"'id' of dtype bool: its column needs integers.\nHINT: "),
    (({"word": [1]}, WORDS), r"'word' of dtype int64: its column needs strings.\nHINT: "),
    (
        ({"a": [True], "b": [1]}, feature_column.crossed_column(["a", "b"], 9)),
        r"'a' of dtype bool: its column needs strings or integers.\nHINT: ",
    ),
    (({"word": np.array(["a", 1.5], object)}, WORDS), r"'word' with the value 1.5: an array of objects .*\nHINT: "),
    call=lambda case: feature_column.prepare(*case),
)


def test_raw_features_in_a_traced_function_are_refused():
    buckets = feature_column.bucketized_column(feature_column.numeric_column("id"), [1])
    vocabulary = feature_column.categorical_column_with_vocabulary_list("id", [1, 2])
    for column in (vocabulary, feature_column.crossed_column([buckets, buckets], 9)):
        layer = feature_column.DenseFeatures(feature_column.indicator_column(column))
        with refused(errors.ContextError, r"raw feature 'id' .*traced.*on the host.*\nHINT: .*prepare\("):
            jax.jit(lambda ids: layer({"id": ids}))(jnp.arange(3))
