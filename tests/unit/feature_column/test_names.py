"""What the builders of columns refuse: keys, dtypes, combiners, lists of columns."""

import keras
import numpy as np
from refusals import refusals

from phalanx import errors, feature_column
from phalanx.feature_column.names import dtype_name, sorted_columns

AGE = feature_column.numeric_column("age")
KIND = feature_column.categorical_column_with_identity("kind", 3)


class TensorFlowString:
    name = "string"


def test_dtypes_have_one_name():
    """Names, classes and objects of NumPy and of other libraries."""
    assert (dtype_name("float32"), dtype_name(np.int64), dtype_name(int)) == ("float32", "int64", "int64")
    for dtype in (np.dtype("<U3"), "string", str, bytes, TensorFlowString, TensorFlowString()):
        assert dtype_name(dtype) == "str"


test_bad_arguments_are_refused = refusals(
    errors.InvalidArgumentError,
    (lambda: feature_column.numeric_column(3), r"key=3: must be the name of a feature.\nHINT: key="),
    (lambda: feature_column.numeric_column("x", dtype="float33"), r"dtype='float33': is not a dtype.\nHINT: dtype="),
    (
        lambda: feature_column.categorical_column_with_hash_bucket("x", 3, dtype="float32"),
        r"dtype='float32' of the column of 'x': must be a string or an integer.\nHINT: ",
    ),
    (
        lambda: feature_column.categorical_column_with_hash_bucket("x", 2**31),
        r"hash_bucket_size=2147483648: must be an integer from 1 to 2\*\*31 - 1.\nHINT: hash_bucket_size=100",
    ),
    (
        lambda: feature_column.embedding_column(KIND, 2, combiner="max"),
        r"combiner='max': must be \"mean\", \"sqrtn\" or \"sum\".\nHINT: combiner=",
    ),
    (lambda: feature_column.indicator_column(AGE), r"categorical_column=Num.*: must be a categorical.*\nHINT: "),
    (lambda: feature_column.DenseFeatures("age"), r"feature_columns='age': must be a list of columns.\nHINT: "),
    (lambda: feature_column.DenseFeatures({"age": AGE}), r"must be a list of columns.\nHINT: "),
    (lambda: feature_column.DenseFeatures(3), r"feature_columns=3: must be a list of columns.\nHINT: "),
    (lambda: feature_column.DenseFeatures([]), r"with \[\]: must be a list of columns, not empty.\nHINT: "),
    (lambda: feature_column.DenseFeatures([AGE, "x"]), r"with 'x': must be a list of columns.*\nHINT: "),
    (lambda: feature_column.DenseFeatures([AGE, AGE]), r"two columns with the name 'age': .*differ.\nHINT: "),
    (
        lambda: feature_column.LinearFeatures([AGE], sparse_combiner="max"),
        r"sparse_combiner='max': must be .*\nHINT: sparse_combiner=",
    ),
)


def test_columns_are_in_the_order_of_their_names():
    """As in TensorFlow, not in the order of the list; an iterator of columns is fine."""
    columns = [feature_column.numeric_column(key) for key in "bca"]
    assert [column.name for column in sorted_columns(iter(columns))] == ["a", "b", "c"]
    layer = feature_column.DenseFeatures(columns)
    assert keras.ops.convert_to_numpy(layer({"a": [1], "b": [2], "c": [3]})).tolist() == [[1, 2, 3]]
