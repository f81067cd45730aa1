"""Identity and hashed columns."""

import jax
import numpy as np
import pytest
from refusals import refusals

from phalanx import errors, feature_column


@pytest.mark.parametrize("default", [None, 1])
def test_identity_works_on_traced_integers(default):
    """In a traced function the ids are those of the host; one that is too large is missing, because a program cannot raise."""
    column = feature_column.categorical_column_with_identity("id", 3, default)
    layer = feature_column.DenseFeatures(feature_column.indicator_column(column))
    ids = np.array([0, 2, -1, -2])
    expected = layer({"id": ids})
    traced = jax.jit(lambda x: layer({"id": x}))
    np.testing.assert_array_equal(traced(ids), expected)
    np.testing.assert_array_equal(traced(ids[:, None]), expected)
    assert traced(np.array([7])).sum() == (default is not None)


def test_identity_refuses_other_values():
    """Only integers may be ids, and only those of the range."""
    column = feature_column.categorical_column_with_identity("id", 3)
    layer = feature_column.DenseFeatures(feature_column.indicator_column(column))
    with pytest.raises(errors.ContextError, match=r"raw feature 'id'.*\nHINT: "):
        jax.jit(lambda x: layer({"id": x}))(np.zeros(2, np.float32))
    match = r"'id' with the value 7: its column has the ids 0 to 2.\nHINT: .*identity\('id', 8\), or a default_value"
    with pytest.raises(errors.InvalidArgumentError, match=match):
        feature_column.prepare({"id": [1, 7]}, column)


test_bad_sizes_of_identity_are_refused = refusals(
    errors.InvalidArgumentError,
    (("id", 0), r"num_buckets=0: must be an integer from 1 to 2\*\*31 - 1.\nHINT: num_buckets=100"),
    (("id", 3, 3), r"default_value=3: must be None or an integer from 0 to 2.\nHINT: default_value=0"),
    call=lambda arguments: feature_column.categorical_column_with_identity(*arguments),
)
