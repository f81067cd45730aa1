"""Rows of a table are combined as NumPy combines them, and their gradients are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phalanx.feature_column.lookup import combined_rows

TABLE = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, -2.0]], np.float32)
IDS = np.array([[0, 2, -1], [-1, -1, -1], [1, 1, 0]])
WEIGHTS = np.array([[0.5, 2.0, 9.0], [1.0, 1.0, 1.0], [-1.0, 3.0, 0.25]], np.float32)


def expected_row(ids, weights, combiner, table):
    """Returns the combined row, computed id by id."""
    used = [(i, w) for i, w in zip(ids, weights, strict=True) if i >= 0 and (combiner == "sum" or w > 0)]
    total = sum((w * table[i] for i, w in used), np.zeros(2))
    divisors = {"sum": 1, "mean": sum(w for _, w in used), "sqrtn": np.sqrt(sum(w * w for _, w in used))}
    return total / divisors[combiner] if used else total


@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "sum"])
def test_rows_are_combined_with_weights(combiner, weights, max_norm):
    """Missing ids count for nothing, and a mean leaves out weights that are not positive."""
    norms = np.linalg.norm(TABLE, axis=1, keepdims=True)
    table = TABLE if max_norm is None else TABLE * np.minimum(1, max_norm / np.maximum(norms, 1e-9))
    all_weights = np.ones(IDS.shape) if weights is None else weights
    expected = [expected_row(*row, combiner, table) for row in zip(IDS, all_weights, strict=True)]
    np.testing.assert_allclose(combined_rows(TABLE, IDS, weights, combiner, max_norm), expected, rtol=1e-6)


def test_gradients_of_empty_and_zero_rows_are_finite():
    """A row without ids and a row of the table with the norm 0 have no gradient that is not finite."""
    for combiner in ("mean", "sqrtn", "sum"):
        gradient = jax.grad(lambda table: combined_rows(table, IDS, WEIGHTS, combiner, 2.0).sum())(jnp.asarray(TABLE))
        assert jnp.isfinite(gradient).all(), combiner


def test_ids_beyond_the_table_are_not_silent():
    """An id that no column would compute makes its row NaN, instead of another row of the table."""
    assert np.isnan(combined_rows(jnp.asarray(TABLE), np.array([[3]]), None, "sum")).all()
