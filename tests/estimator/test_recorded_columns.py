"""Feature columns make of features what TensorFlow 2.15 makes of them, in each recorded case."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.estimator.recorded import built

from phalanx import errors, feature_column
from phalanx.feature_column.fingerprint import fingerprint64

RECORDED = json.loads(Path(__file__).with_name("recorded_columns.json").read_text(encoding="utf-8"))
CASES = RECORDED["cases"]
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


def array_of(key, feature):
    """Returns the array of a described feature. Sparse ones are padded with missing values."""
    dtype = str if feature["dtype"] == "string" else feature["dtype"]
    if "indices" not in feature:
        return np.array(feature["values"], dtype)
    padding = 0 if key == "w" else "" if dtype is str else -1
    dense = np.full(feature["dense_shape"], padding, object)
    for index, value in zip(feature["indices"], feature["values"], strict=True):
        dense[tuple(index)] = value
    return dense.astype(dtype)


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


CHECKS = {"ids": check_ids, "dense": check_rows, "linear": check_sums}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in CHECKS for name in CASES if f"{kind}_result" in CASES[name] and name not in NOT_THE_SAME],
)
def test_columns_compute_what_tensorflow_does(kind, name, tmp_path):
    """Ids, dense rows and linear sums, names of columns and numbers of ids; what is an error in TensorFlow is one here."""
    case = CASES[name] | CASES[name][f"{kind}_result"]
    features = {key: array_of(key, feature) for key, feature in case["features"].items()}
    if "exception" in case:
        with pytest.raises(errors.InvalidArgumentError, match="HINT: "):
            CHECKS[kind](built(case["columns"], tmp_path), features, case)
        return
    columns = built(case["columns"], tmp_path)
    CHECKS[kind](columns, features, case)
    for column, about in zip(columns, case["about_columns"], strict=True):
        assert column.name == about["name"]
        assert getattr(column, "num_buckets", None) == about.get("num_buckets")


def test_hashes_are_those_of_tensorflow():
    """Fingerprints of strings of many lengths, and fingerprints of two fingerprints, are TensorFlow's."""
    hashes = RECORDED["hashes"]
    fingerprints = fingerprint64([text.encode() for text in hashes["strings"]])
    assert fingerprints.tolist() == [int(value) for value in hashes["fingerprint64"]]
    assert (fingerprints % hashes["num_buckets"]).tolist() == hashes["to_hash_bucket_fast"]


def test_every_difference_is_a_recorded_case():
    assert {*NOT_THE_SAME} <= {*CASES}
