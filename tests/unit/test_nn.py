"""Losses of a custom loop."""

import numpy as np
import pytest

import phalanx
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.nn import compute_average_loss, scale_regularization_loss


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    ("loss", "weight", "size", "expected"),
    [
        ([1.0, 3.0], None, None, 2.0),
        ([[1.0, 2.0], [3.0, 4.0]], None, None, 5.0),
        ([1.0, 3.0], [1.0, 0.5], None, 1.25),
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.0], None, 1.5),
        ([1.0, 3.0], 2.0, None, 4.0),
        ([1.0, 3.0], None, 8, 0.5),
        ([1.0, 3.0], None, np.int64(4), 1.0),
        ([1.0, 3.0], None, 0, 0.0),
        ([], None, None, 0.0),
    ],
)
def test_loss_is_weighted_sum_over_rows(loss, weight, size, expected):
    """The weighted sum divided by the number of rows, or by the given size."""
    result = compute_average_loss(np.float32(loss), weight, size)
    assert float(result) == expected
    assert result.dtype == "float32"


def test_replicas_add_up(strategy):
    """The sum over the replicas is the mean over the global batch."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(8.0, dtype="float32")])
    per_replica = strategy.run(compute_average_loss, args=(batch,))
    assert float(strategy.reduce("SUM", per_replica, axis=None)) == 3.5


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_padded_rows_count_for_nothing(strategy, rows, weighted):
    """The default size is the number of real rows."""
    x = np.arange(1, rows + 1, dtype="float32")
    (batch,) = strategy.experimental_distribute_dataset([(x, np.ones_like(x) * 2)])
    fn = lambda x, w: compute_average_loss(x, w if weighted else None)  # noqa: E731
    per_replica = strategy.run(fn, args=batch)
    expected = x.mean() * (2 if weighted else 1)
    np.testing.assert_allclose(strategy.reduce("SUM", per_replica, axis=None), expected, rtol=1e-6)


def test_padding_with_infinite_loss(strategy):
    """Rows that are not there cannot make the loss infinite."""
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 3])])
    replica_fn = lambda x: compute_average_loss(x / phalanx.get_replica_context().example_mask)  # noqa: E731
    loss = strategy.run(replica_fn, args=(batch,))
    assert float(strategy.reduce("SUM", loss, axis=None)) == 2.0


def test_zero_rows_have_loss_zero(strategy):
    """A batch without rows has loss zero, not NaN."""
    (batch,) = strategy.experimental_distribute_dataset([np.zeros((0,), "float32")])
    per_replica = strategy.run(compute_average_loss, args=(batch,))
    assert float(strategy.reduce("SUM", per_replica, axis=None)) == 0.0


def test_cross_replica_with_size(strategy):
    """With the size it may be called in a scope."""
    with strategy.scope():
        assert float(compute_average_loss(np.float32([1, 3]), global_batch_size=4)) == 1.0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: compute_average_loss(np.float32([1.0])),
            "compute_average_loss was called in cross-replica context: .*size is unknown",
        ),
        (
            lambda: scale_regularization_loss(1.0),
            "scale_regularization_loss was called in cross-replica context: it works only in replica context",
        ),
    ],
)
def test_cross_replica_is_refused(strategy, call, match):
    """The message says what to do."""
    with strategy.scope(), pytest.raises(ContextError, match=match):
        call()


@pytest.mark.parametrize(
    ("loss", "size", "match"),
    [
        (1.0, None, r"per_example_loss=np.float32\(1.0\): must have one loss per example, not be a scalar"),
        ([1.0], 2.0, "global_batch_size=2.0: must be an integer"),
        ([1.0], [1, 2], r"global_batch_size=\[1, 2\]: must be an integer"),
        ([1.0], True, "global_batch_size=True: must be an integer"),
        ([1.0], -1, "global_batch_size=-1: must be 0 or more"),
    ],
)
def test_bad_arguments_are_refused(loss, size, match):
    """Typed, with the value."""
    with pytest.raises(InvalidArgumentError, match=match):
        compute_average_loss(np.float32(loss), global_batch_size=size)


def test_loss_with_other_rows_than_the_batch(strategy):
    """The mask of a padded batch does not fit."""
    (batch,) = strategy.experimental_distribute_dataset([np.ones((3, 4), "float32")])
    with pytest.raises(InvalidArgumentError, match=r"shape \(8,\): the batch is padded, and its mask has 2 rows"):
        strategy.run(lambda x: compute_average_loss(x.reshape(-1)), args=(batch,))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(6.0, 3.0), ([1.0, 5.0], 3.0), (np.float32([2, 4]), 3.0), ([], 0.0), ({"a": [3.0], "b": 3.0}, 3.0)],
)
def test_scale_regularization_loss(strategy, loss, expected):
    """The sum divided by the number of replicas; nothing is zero."""
    result = strategy.run(lambda: scale_regularization_loss(loss))
    assert float(strategy.experimental_local_results(result)[0]) == expected
