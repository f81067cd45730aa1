"""Numeric and bucketized columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals, refused

from phalanx import errors, feature_column


def test_normalizer_runs_in_the_program_and_on_the_dtype():
    """It sees the values once, in the dtype of the column, prepared or not; the column is float32."""
    seen = []

    def normalizer(x):
        seen.append(str(x.dtype))
        return jnp.where(x % 2 == 0, x / 2, -1)

    column = feature_column.numeric_column("x", dtype="int32", normalizer_fn=normalizer)
    layer = feature_column.DenseFeatures(column)
    prepared = feature_column.prepare({"x": [4, 5]}, column)
    assert prepared["x"].dtype == np.int32
    assert not seen
    assert jax.jit(layer)(prepared).tolist() == layer({"x": [4, 5]}).tolist() == [[2.0], [-1.0]]
    assert {*seen} == {"int32"}


def test_rows_of_a_shape_are_flattened():
    """A row of a feature of several dims has them in order, and a flat feature is fine too."""
    column = feature_column.numeric_column("x", shape=(2, 3))
    x = np.arange(12.0)
    assert feature_column.prepare({"x": x.reshape(2, 6)}, column)["x"].shape == (2, 2, 3)
    np.testing.assert_array_equal(feature_column.DenseFeatures(column)({"x": x.reshape(2, 2, 3)}), x.reshape(2, 6))


def test_buckets_are_the_same_on_the_host_and_in_a_program():
    """A boundary belongs to the bucket above it, also for NaN and infinity, for one dim and for two."""
    source = feature_column.numeric_column("x", shape=2, normalizer_fn=lambda x: x + 1)
    column = feature_column.bucketized_column(source, [0.0, 0.1, 2])
    x = np.array([[-1.0, -0.9], [np.inf, np.nan], [1.0, -5.0]], np.float32)
    expected = np.digitize(x + 1, np.float32([0.0, 0.1, 2])) + [0, 4]
    assert column.occurrences({"x": x}).values.tolist() == expected.tolist()
    assert jax.jit(column.ids)({"x": x}).tolist() == expected.tolist()


test_bad_arguments_are_refused = refusals(
    errors.InvalidArgumentError,
    (lambda: feature_column.numeric_column("x", dtype=str), r"numeric_column\('x', dtype=.*must be an int.*\nHINT: "),
    (lambda: feature_column.numeric_column("x", dtype=bool), r"must be an integer or float dtype.\nHINT: dtype="),
    (lambda: feature_column.numeric_column("x", shape=(2, 0)), r"shape=0: must be positive integers.\nHINT: shape="),
    (lambda: feature_column.numeric_column("x", normalizer_fn=3), r"normalizer_fn=3: is not callable.\nHINT: "),
    (
        lambda: feature_column.bucketized_column(feature_column.numeric_column("x", shape=(2, 2)), [0]),
        r"source_column=.*: must be a numeric_column with one dim at most.\nHINT: bucketized_column",
    ),
    (lambda: feature_column.bucketized_column("x", [0]), r"source_column='x': must be a numeric_column .*\nHINT: "),
)


@pytest.mark.parametrize(
    "boundaries", [[], [1, 1], [2, 1], ["a"], 3, [[1, 2]], "12", [1, float("nan")], np.array(3), np.ma.array([1, 2])]
)
def test_boundaries_must_increase(boundaries):
    with refused(errors.InvalidArgumentError, r"(?s)boundaries=.*: must be numbers in increasing order.\nHINT: "):
        feature_column.bucketized_column(feature_column.numeric_column("x"), boundaries)


def test_rows_of_another_shape_are_refused():
    """The message has both shapes, also in a traced function."""
    layer = feature_column.DenseFeatures(feature_column.numeric_column("x", shape=3))
    match = (
        r"'x' of shape \(2, 4\): its column has the shape \(3,\) per row.\nHINT: numeric_column\('x', shape=\(4,\)\)"
    )
    for call in (lambda x: layer({"x": x}), jax.jit(lambda x: layer({"x": x}))):
        with refused(errors.InvalidArgumentError, match):
            call(np.zeros((2, 4)))
