"""A replica without a real row contributes nothing, and no NaN: to means, to variables, to losses and metrics."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx


def make_strategy(replicas):
    """A strategy over the first CPU devices."""
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


@pytest.fixture(params=[2, 3, 4])
def strategy(request):
    """Of several replicas."""
    return make_strategy(request.param)


def one_row(strategy, value=5.0):
    """A batch of one row: all replicas but one have none."""
    (batch,) = strategy.experimental_distribute_dataset([np.array([value], "float32")])
    return batch


def no_row(strategy):
    """A batch without rows."""
    (batch,) = strategy.experimental_distribute_dataset([np.zeros(0, "float32")])
    return batch


def variable_of(strategy, value=1.0, **kwargs):
    """A variable of the strategy."""
    with strategy.scope():
        return keras.Variable(value, trainable=False, **kwargs)


AVERAGED = [
    {"aggregation": "none"},
    {"aggregation": "mean"},
    {"aggregation": "mean", "synchronization": "on_read"},
]


@pytest.mark.parametrize("kwargs", AVERAGED, ids=str)
def test_assigned_variables_average_replicas_with_rows(strategy, kwargs):
    """Like moving statistics: the mean is over the replicas that have a row."""
    v = variable_of(strategy, **kwargs)
    strategy.run(lambda x: v.assign(phalanx.nn.compute_average_loss(x)), args=(one_row(strategy),))
    assert float(v) == 5


@pytest.mark.parametrize("kwargs", AVERAGED, ids=str)
def test_nan_of_a_replica_without_rows(strategy, kwargs):
    """It may compute what it likes."""
    v = variable_of(strategy, **kwargs)

    def step(x):
        mask = phalanx.get_replica_context().example_mask
        v.assign(jnp.where(mask, x, 0).sum() / mask.sum())

    strategy.run(step, args=(one_row(strategy),))
    assert float(v) == 5


@pytest.mark.parametrize("kwargs", AVERAGED, ids=str)
def test_a_batch_without_rows(strategy, kwargs):
    """Leaves such variables as they were."""
    v = variable_of(strategy, **kwargs)
    strategy.run(lambda x: v.assign(x.sum() + 7), args=(no_row(strategy),))
    assert float(v) == 1


@pytest.mark.parametrize("kwargs", AVERAGED, ids=str)
def test_increments_average_replicas_with_rows(strategy, kwargs):
    """`assign_add` likewise."""
    v = variable_of(strategy, **kwargs)
    strategy.run(lambda x: v.assign_add(x.max()), args=(one_row(strategy),))
    assert float(v) == 6


def test_sums_count_zero_without_rows(strategy):
    """A sum over rows is what it is: zero where there are none."""
    v = variable_of(strategy, 0.0, aggregation="sum")

    def step(x):
        v.assign_add(jnp.where(phalanx.get_replica_context().example_mask, x, 0).sum())

    for batch in (one_row(strategy), no_row(strategy)):
        strategy.run(step, args=(batch,))
    assert float(v) == 5


def test_batch_normalization_uses_real_rows(strategy):
    """Its moving statistics are those of the rows that are there."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 2))
    (batch,) = strategy.experimental_distribute_dataset([np.array([[2.0, 4.0]], "float32")])
    strategy.run(lambda x: layer(x, training=True), args=(batch,))
    np.testing.assert_allclose(layer.moving_mean, [1, 2], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [0.5, 0.5], rtol=1e-6)


def test_batch_normalization_of_no_rows(strategy):
    """Its statistics stay."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 2))
    (batch,) = strategy.experimental_distribute_dataset([np.zeros((0, 2), "float32")])
    strategy.run(lambda x: layer(x, training=True), args=(batch,))
    assert layer.moving_mean.numpy().tolist() == [0, 0]
    assert layer.moving_variance.numpy().tolist() == [1, 1]


def test_all_reduce_averages_replicas_with_rows(strategy):
    """A mean over the replicas that have a row; on all replicas."""

    def step(x):
        context = phalanx.get_replica_context()
        return context.all_reduce("MEAN", {"a": x.max(), "b": x[0] * 2}), context.all_reduce("SUM", 1.0)

    means, count = strategy.run(step, args=(one_row(strategy),))
    assert [float(v) for v in means["a"].values] == [5] * strategy.num_replicas_in_sync
    assert [float(v) for v in means["b"].values] == [10] * strategy.num_replicas_in_sync
    assert float(count.values[0]) == strategy.num_replicas_in_sync


def test_all_reduce_of_packed_leaves(strategy):
    """Through shared buffers too."""
    options = phalanx.experimental.CommunicationOptions(bytes_per_pack=8)
    step = lambda x: phalanx.get_replica_context().all_reduce("MEAN", [x.max(), x.max() + 1], options)  # noqa: E731
    means = strategy.run(step, args=(one_row(strategy),))
    assert [float(m.values[-1]) for m in means] == [5, 6]


def test_all_reduce_of_no_rows(strategy):
    """Zero, not NaN."""
    step = lambda x: phalanx.get_replica_context().all_reduce("MEAN", x.sum() + 3)  # noqa: E731
    assert float(strategy.run(step, args=(no_row(strategy),)).values[0]) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_reduce_over_the_replicas(strategy, whole):
    """A mean of one number a replica, of which some have nothing to say; also within one program."""
    step = lambda batch: strategy.reduce("MEAN", strategy.run(jnp.mean, args=(batch,)), axis=None)  # noqa: E731
    step = phalanx.function(step) if whole else step
    assert float(step(one_row(strategy))) == 5


def test_reduce_over_rows(strategy):
    """Real rows only."""
    for axis in (0, (0,)):
        assert float(strategy.reduce("MEAN", one_row(strategy), axis=axis)) == 5
    assert strategy.gather(one_row(strategy), axis=0).tolist() == [5]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_average_losses_add_up_to_the_mean(strategy, n):
    """The replicas' losses add up to the mean over all rows."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(1, n + 1, dtype="float32")])
    loss = strategy.run(phalanx.nn.compute_average_loss, args=(batch,))
    assert float(strategy.reduce("SUM", loss, axis=None)) == pytest.approx((n + 1) / 2)


def test_average_loss_of_no_rows(strategy):
    """Zero."""
    loss = strategy.run(phalanx.nn.compute_average_loss, args=(no_row(strategy),))
    assert float(strategy.reduce("SUM", loss, axis=None)) == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_see_real_rows_only(strategy, weighted):
    """With the mask as weights they see real rows only; with weights of one's own, too."""
    with strategy.scope():
        metric = keras.metrics.Mean()

    def step(batch):
        x, weight = batch
        mask = phalanx.get_replica_context().example_mask
        metric.update_state(x, sample_weight=mask * weight if weighted else mask)

    rows = np.arange(7, dtype="float32")
    for batch in strategy.experimental_distribute_dataset((rows, rows), batch_size=6):
        strategy.run(step, args=(batch,))
    assert float(metric.result()) == pytest.approx(np.average(rows, weights=rows if weighted else None))


def test_gradients_of_one_row_equal_one_device(strategy):
    """Of a batch of one row, they are those of one device on that row."""
    with strategy.scope():
        v, optimizer = keras.Variable(2.0), keras.optimizers.SGD(1.0)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(v * x)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))

    for batch in (one_row(strategy), no_row(strategy)):
        strategy.run(step, args=(batch,))
    assert float(v) == 2 - 5


def test_mask_and_number_of_rows():
    """A replica function can ask for them."""
    strategy = make_strategy(2)

    def step(x):
        context = phalanx.get_replica_context()
        return context.example_mask.sum(), context.num_examples

    for n, expected in [(3, [2, 1]), (1, [1, 0]), (0, [0, 0])]:
        (batch,) = strategy.experimental_distribute_dataset(lambda: iter([np.arange(n, dtype="float32")]))
        mask, count = strategy.run(step, args=(batch,))
        assert [int(v) for v in mask.values] == expected
        assert [int(v) for v in count.values] == [n, n]
