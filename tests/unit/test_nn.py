"""Losses of a custom loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx
from phalanx import RunOptions
from phalanx.errors import ContextError, InvalidArgumentError, TraceError
from phalanx.nn import compute_average_loss, scale_regularization_loss


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def loss_of(strategy, fn, *rows):
    """The sum over the replicas of a loss of a batch."""
    (batch,) = strategy.experimental_distribute_dataset([rows])
    return float(strategy.reduce("SUM", strategy.run(fn, args=batch), axis=None))


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


def test_loss_has_the_dtype_of_a_mean():
    """Weights of integers may be fractions, and the sum of float16 losses may exceed the largest float16."""
    integers = compute_average_loss(np.int32([1, 4]), [0.5, 1.0])
    assert (float(integers), integers.dtype) == (2.25, "float32")
    halves = compute_average_loss(np.full(4096, 20, "float16"))
    assert (float(halves), halves.dtype) == (20, "float16")


@pytest.mark.parametrize("rows", [0, 1, 3, 8])
def test_sum_of_shares_is_the_mean(strategy, rows):
    """Over all rows, whatever their number; without any it is zero, not NaN."""
    x = np.arange(1, rows + 1, dtype="float32")
    mean = x.mean() if rows else 0
    assert loss_of(strategy, compute_average_loss, x) == pytest.approx(mean)
    assert loss_of(strategy, compute_average_loss, x, 2 * np.ones_like(x)) == pytest.approx(2 * mean)


def test_cross_replica_is_refused(strategy):
    """With the size it may be called in a scope; the message says what to do."""
    with strategy.scope():
        assert float(compute_average_loss(np.float32([1, 3]), global_batch_size=4)) == 1.0
        match = "compute_average_loss was called in cross-replica context: .*size is unknown"
        with pytest.raises(ContextError, match=match):
            compute_average_loss(np.float32([1.0]))
        match = "scale_regularization_loss was called in cross-replica context: it works only in replica context"
        with pytest.raises(ContextError, match=match):
            scale_regularization_loss(1.0)


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


def test_values_of_other_traces_are_refused():
    """Also in eager code; `broadcast_to` too."""
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(jnp.ones(2))
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    calls = (
        lambda: compute_average_loss(kept[0], global_batch_size=2),
        lambda: strategy.run(lambda: scale_regularization_loss(kept[0])),
        lambda: strategy.extended.broadcast_to(kept[0], "cpu:0"),
    )
    for call in calls:
        with pytest.raises(TraceError, match="a value from another trace.*kept in a list.*\nHINT: return the value"):
            call()


def test_negative_size_in_a_step_is_refused(strategy):
    with pytest.raises(InvalidArgumentError, match="global_batch_size=-1: must be 0 or more"):
        strategy.run(lambda: compute_average_loss(jnp.ones(4), global_batch_size=-1))


@pytest.mark.parametrize("rows", [12, 7, 5, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_several_losses_per_row(count, rows):
    """A step may join real and generated rows: the mean is that of all losses, for any number of rows."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    x = np.arange(rows, dtype="float32")
    (batch,) = strategy.experimental_distribute_dataset([x])

    def step(x):
        return phalanx.nn.compute_average_loss(jnp.concatenate([x, 2 * x, x + 1]))

    loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
    np.testing.assert_allclose(loss, np.concatenate([x, 2 * x, x + 1]).mean(), rtol=1e-6)


def test_losses_that_do_not_belong_to_rows():
    """Of replicas with different numbers of rows, nobody knows how many losses there are in all, unless the step says it."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    (batch,) = strategy.experimental_distribute_dataset([np.arange(7.0)])

    def step(x, size):
        return phalanx.nn.compute_average_loss(jnp.append(x, 1.0), global_batch_size=size)

    with pytest.raises(
        InvalidArgumentError,
        match=r"loss of shape \([45],\): replicas .* rows, this one [34].*\nHINT: global_batch_size=",
    ):
        strategy.run(step, args=(batch, None))
    loss = strategy.reduce("SUM", strategy.run(step, args=(batch, 9)), axis=None)
    np.testing.assert_allclose(loss, (21 + 2) / 9, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:the operations of a step that is executed eagerly")
def test_loss_with_other_rows_than_the_batch(strategy):
    """The mask does not fit, where a step that is not compiled has padding."""
    (batch,) = strategy.experimental_distribute_dataset([np.ones((3, 4), "float32")])
    with pytest.raises(InvalidArgumentError, match=r"shape \(8,\): the batch is padded, and its mask has 2 rows"):
        strategy.run(lambda x: compute_average_loss(x.reshape(-1)), args=(batch,), options=RunOptions(eager=True))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (6.0, 3.0),
        ([1.0, 5.0], 3.0),
        (np.float32([2, 4]), 3.0),
        ([], 0.0),
        ({"a": [3.0], "b": 3.0}, 3.0),
        (jnp.asarray([2, 4], "int4"), 3.0),
    ],
)
def test_scale_regularization_loss(strategy, loss, expected):
    """The sum divided by the number of replicas; nothing is zero."""
    result = strategy.run(lambda: scale_regularization_loss(loss))
    assert float(strategy.experimental_local_results(result)[0]) == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_regularization_on_replicas_without_rows(strategy, count):
    """Such a replica adds nothing, so the others add all: the loss and its gradient are those of one device."""

    def step(x):
        loss_of = lambda w: compute_average_loss(w * x) + scale_regularization_loss(w * w)  # noqa: E731
        loss, gradient = jax.value_and_grad(loss_of)(3.0)
        return loss, phalanx.get_replica_context().all_reduce("SUM", gradient)

    (batch,) = strategy.experimental_distribute_dataset([np.full(count, 5.0, "float32")])
    losses, gradients = strategy.run(step, args=(batch,))
    assert float(strategy.reduce("SUM", losses, axis=None)) == pytest.approx(3 * 5 + 9)
    assert float(strategy.experimental_local_results(gradients)[0]) == pytest.approx(5 + 2 * 3)
