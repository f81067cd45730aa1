"""Feature columns make of features what TensorFlow 2.15 makes of them, in each recorded case."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from phalanx import errors, feature_column
from phalanx.feature_column.fingerprint import fingerprint64

RECORDED = json.loads(Path(__file__).with_name("recorded_columns.json").read_text(encoding="utf-8"))
CASES = RECORDED["cases"]
MOST_BUCKETS = 2**31 - 1  # Ids are int32. TensorFlow's are int64.

NOT_THE_SAME = {
    "numeric with a default": "no examples are parsed, so absent features have no default",
    "numeric with a default per place": "as above",
    "numeric with a default of wrong shape": "as above",
    "numeric of a sparse feature": "there are no sparse features",
    "cross of sparse features": "there are no sparse features, whose missing values are not crossed",
    "cross of floats by key": "TensorFlow truncates floats, which is an error here",
    "identity beyond the buckets": "the error comes with the ids, not with the table",
    "indicator of identity beyond the buckets": "as above",
    "embedding from a checkpoint without a name": "tables are not loaded from checkpoints",
    "weighted by integers": "there is no dtype, because each real dtype is cast",
    "weighted by strings": "as above",
    "weighted of dense features": "TensorFlow moves the weights of another id to a missing one",
    "weighted with weights of another shape": "padding makes weights out of missing ones",
    "weighted indicator with other weights": "as above",
    "linear sums of a cross": "there are no sparse features, whose missing values are not crossed",
}
WEIGHT_KEY = "w"


def built(description, folder):
    """Returns the column, or the argument of one, that a description stands for."""
    if isinstance(description, list):
        return [built(item, folder) for item in description]
    if not isinstance(description, dict):
        return description
    if "column" in description:
        named = {name: built(item, folder) for name, item in description.items() if name != "column"}
        size = named.get("hash_bucket_size", 0)
        column = getattr(feature_column, description["column"])(
            **named | ({"hash_bucket_size": MOST_BUCKETS} if size > MOST_BUCKETS else {})
        )
        return dataclasses.replace(column, hash_bucket_size=size) if size > MOST_BUCKETS else column
    if "dtype" in description:
        return description["dtype"]
    if "function" in description:
        return eval(description["function"])
    if "constant" in description:
        return lambda shape, dtype=None: np.array(description["constant"], np.float32)
    path = folder / "vocabulary.txt"
    path.write_text(description["file"], encoding="utf-8")
    return path


def array_of(feature, key):
    """Returns the array of a described feature. Sparse ones are padded with missing values."""
    dtype = str if feature["dtype"] == "string" else feature["dtype"]
    if "indices" not in feature:
        return np.array(feature["values"], dtype)
    padding = 0 if key == WEIGHT_KEY else "" if dtype is str else -1
    dense = np.full(feature["dense_shape"], padding, object)
    for index, value in zip(feature["indices"], feature["values"], strict=True):
        dense[tuple(index)] = value
    return dense.astype(dtype)


def features_of(case):
    """Returns the features of a case."""
    return {key: array_of(feature, key) for key, feature in case["features"].items()}


def cases(kind):
    """Returns the names of the cases with a result of a kind that Phalanx is to have too."""
    return [name for name, case in CASES.items() if f"{kind}_result" in case and name not in NOT_THE_SAME]


def is_valid(case):
    """Returns whether TensorFlow raised no error."""
    return "exception" not in case["about_columns"] and all(
        "exception" not in case[f"{kind}_result"] for kind in case["want"]
    )


def compare(kind, name, compute, folder):
    """Compares a result with the recorded one; if TensorFlow raises an error, so must Phalanx."""
    case = CASES[name]
    expected = case[f"{kind}_result"]
    if "exception" in expected:
        with pytest.raises(errors.InvalidArgumentError, match="HINT: "):
            compute(built(case["columns"], folder), features_of(case), case)
        return
    compute(built(case["columns"], folder), features_of(case), expected | {"linear": case.get("linear")})


def check_ids(columns, features, expected):
    """The ids of each row are those of TensorFlow, in the same order."""
    feature_column.prepare(features, columns)
    values, is_present = columns[0].occurrences(features)
    rows = [row[present].tolist() for row, present in zip(values, is_present, strict=True)]
    wanted = [[] for _ in rows]
    for (row, _), value in zip(expected["ids"]["indices"], expected["ids"]["values"], strict=True):
        wanted[row].append(value)
    assert rows == wanted


def check_rows(columns, features, expected):
    """The rows are those of TensorFlow, and so are the parts of each column alone."""
    rows = feature_column.DenseFeatures(columns)(features)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected["rows"]["values"], rtol=1e-6)
    if not any(column.table for column in columns):
        for column in columns:
            part = feature_column.DenseFeatures(column)(features)
            np.testing.assert_allclose(part, expected["by_column"][column.name]["values"], rtol=1e-6)


def check_sums(columns, features, expected):
    """A linear model has the variables of TensorFlow's and, with the same weights, the same outputs."""
    layer = feature_column.LinearFeatures(columns, name="linear_model", **expected["linear"])
    layer(features)
    shapes = {f"{variable.path}:0": list(variable.shape) for variable in layer.weights}
    assert shapes == {name: shape["values"] for name, shape in expected["variables"].items()}
    for variable in layer.weights:
        rows = np.arange(1, variable.shape[0] + 1)[:, None] + 0.5 * np.arange(variable.shape[-1])
        variable.assign(np.full(variable.shape, 0.25) if "bias" in variable.path else rows)
    np.testing.assert_allclose(layer(features), expected["sums"]["values"], rtol=1e-6)


@pytest.mark.parametrize("name", cases("ids"))
def test_ids_are_those_of_tensorflow(name, tmp_path):
    """Each categorical column has TensorFlow's ids, or raises an error if TensorFlow does."""
    compare("ids", name, check_ids, tmp_path)


@pytest.mark.parametrize("name", cases("dense"))
def test_rows_are_those_of_tensorflow(name, tmp_path):
    """`DenseFeatures` returns TensorFlow's rows, or raises an error if TensorFlow does."""
    compare("dense", name, check_rows, tmp_path)


@pytest.mark.parametrize("name", cases("linear"))
def test_linear_sums_are_those_of_tensorflow(name, tmp_path):
    """`LinearFeatures` has TensorFlow's variables and outputs, or raises an error if TensorFlow does."""
    compare("linear", name, check_sums, tmp_path)


@pytest.mark.parametrize("name", [name for name in cases("ids") + cases("dense") if is_valid(CASES[name])])
def test_columns_have_the_names_of_tensorflow(name, tmp_path):
    """The names and the numbers of ids are TensorFlow's."""
    case = CASES[name]
    for column, expected in zip(built(case["columns"], tmp_path), case["about_columns"], strict=True):
        assert column.name == expected["name"]
        assert getattr(column, "num_buckets", None) == expected.get("num_buckets")


def test_hashes_are_those_of_tensorflow():
    """Fingerprints of strings of many lengths, and fingerprints of two fingerprints, are TensorFlow's."""
    hashes = RECORDED["hashes"]
    fingerprints = fingerprint64([text.encode() for text in hashes["strings"]])
    assert fingerprints.tolist() == [int(value) for value in hashes["fingerprint64"]]
    assert (fingerprints % hashes["num_buckets"]).tolist() == hashes["to_hash_bucket_fast"]


def test_every_difference_is_a_recorded_case():
    """The table of differences names only cases that exist."""
    assert {*NOT_THE_SAME} <= {*CASES}
