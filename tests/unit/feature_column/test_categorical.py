"""Identity and hashed columns."""

import jax
import numpy as np
import pytest

from phalanx import errors, feature_column


@pytest.mark.parametrize("default", [None, 1])
def test_identity_works_on_traced_integers(default):
    """In a traced function the ids are those of the host; one that is too large is missing, because a program cannot raise."""
    column = feature_column.categorical_column_with_identity("id", 3, default)
    layer = feature_column.DenseFeatures(feature_column.indicator_column(column))
    ids = np.array([0, 2, -1, -2])
    expected = layer({"id": ids})
    np.testing.assert_array_equal(jax.jit(lambda x: layer({"id": x}))(ids), expected)
    np.testing.assert_array_equal(jax.jit(lambda x: layer({"id": x}))(ids[:, None]), expected)
    assert jax.jit(lambda x: layer({"id": x}))(np.array([7])).sum() == (default is not None)


def test_identity_refuses_traced_floats():
    """Only integers may be ids."""
    layer = feature_column.DenseFeatures(
        feature_column.indicator_column(feature_column.categorical_column_with_identity("id", 3))
    )
    with pytest.raises(errors.ContextError, match=r"raw feature 'id'.*\nHINT: "):
        jax.jit(lambda x: layer({"id": x}))(np.zeros(2, np.float32))


def test_identity_refuses_ids_that_are_too_large():
    """The message has the id and the range."""
    column = feature_column.categorical_column_with_identity("id", 3)
    match = r"'id' with the value 7: its column has the ids 0 to 2.\nHINT: .*identity\('id', 8\), or a default_value"
    with pytest.raises(errors.InvalidArgumentError, match=match):
        feature_column.prepare({"id": [1, 7]}, column)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("id", 0), r"num_buckets=0: must be an integer from 1 to 2\*\*31 - 1.\nHINT: num_buckets=100"),
        (("id", 3, 3), r"default_value=3: must be None or an integer from 0 to 2.\nHINT: default_value=0"),
    ],
)
def test_bad_sizes_of_identity_are_refused(arguments, match):
    """Each message has the argument, its value and a line to write instead."""
    with pytest.raises(errors.InvalidArgumentError, match=match):
        feature_column.categorical_column_with_identity(*arguments)


def test_integers_are_hashed_as_decimal_strings():
    """An integer has the id of its digits, and -1 is missing."""
    integers = feature_column.categorical_column_with_hash_bucket("x", 1000, dtype="int64")
    strings = feature_column.categorical_column_with_hash_bucket("x", 1000)
    (ids,) = feature_column.prepare({"x": [12, -5, -1]}, integers).values()
    (expected,) = feature_column.prepare({"x": ["12", "-5", ""]}, strings).values()
    np.testing.assert_array_equal(ids, expected)
