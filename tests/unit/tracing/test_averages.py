"""A replica without a real row contributes nothing, and no NaN: to means, to variables, to losses and metrics."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.tracing.averages import moments
from phalanx.errors import SlipWarning


@pytest.fixture(params=[2, 3])
def strategy(request):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


def batch_of(strategy, *rows, shape=()):
    """A batch of few rows: most replicas have none."""
    (batch,) = strategy.experimental_distribute_dataset([np.array(rows, "float32").reshape(-1, *shape)])
    return batch


AVERAGED = [{"aggregation": "none"}, {"aggregation": "mean"}, {"aggregation": "mean", "synchronization": "on_read"}]


@pytest.mark.cover(["strategy", "kwargs"], [(3, AVERAGED[0]), (2, AVERAGED[1]), (3, AVERAGED[2])])
@pytest.mark.parametrize("kwargs", AVERAGED, ids=str)
def test_variables_average_replicas_with_rows(strategy, kwargs):
    """Like moving statistics: other replicas may compute what they like, and a batch without rows changes nothing."""
    with strategy.scope():
        loss, mean, increased, kept = (keras.Variable(1.0, trainable=False, **kwargs) for _ in range(4))

    def step(x):
        loss.assign(phalanx.nn.compute_average_loss(x))
        mean.assign(x.sum() / x.shape[0])
        increased.assign_add(x.max())

    strategy.run(step, args=(batch_of(strategy, 5.0),))
    strategy.run(lambda x: kept.assign(x.sum() + 7), args=(batch_of(strategy),))
    assert [float(v) for v in (loss, mean, increased, kept)] == [5, 5, 6, 1]


@pytest.mark.cover(["strategy"], {3})
def test_sums_count_zero_without_rows(strategy):
    """A sum over rows is what it is: zero where there are none."""
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, aggregation="sum")
    for batch in (batch_of(strategy, 5.0), batch_of(strategy)):
        strategy.run(lambda x: v.assign_add(x.sum()), args=(batch,))
    assert float(v) == 5


@pytest.mark.cover(["strategy"], {2})
def test_batch_normalization_uses_real_rows(strategy):
    """Its moving statistics are those of the rows that are there; without rows they stay."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 2))
    step = lambda x: layer(x, training=True)  # noqa: E731
    strategy.run(step, args=(batch_of(strategy, shape=(2,)),))
    assert (layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()) == ([0, 0], [1, 1])
    strategy.run(step, args=(batch_of(strategy, 2.0, 4.0, shape=(2,)),))
    np.testing.assert_allclose(layer.moving_mean, [1, 2], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [0.5, 0.5], rtol=1e-6)


@pytest.mark.cover(["strategy"], {3})
def test_all_reduce_averages_replicas_with_rows(strategy):
    """They alone count in a sum and a mean; on all replicas, through shared buffers too; zero if none has a row."""
    packed = phalanx.experimental.CommunicationOptions(bytes_per_pack=8)

    def step(x):
        context = phalanx.get_replica_context()
        mean = context.all_reduce("MEAN", {"a": x.max(), "b": x[0] * 2})
        return mean, context.all_reduce("MEAN", [x.max(), x.max() + 1], packed), context.all_reduce("SUM", 1.0)

    count = strategy.num_replicas_in_sync
    mean, shared, total = strategy.run(step, args=(batch_of(strategy, 5.0),))
    for found, expected in [(mean["a"], 5), (mean["b"], 10), (shared[0], 5), (shared[1], 6), (total, 1)]:
        assert [float(v) for v in found.values] == [expected] * count
    step = lambda x: phalanx.get_replica_context().all_reduce("MEAN", x.sum() + 3)  # noqa: E731
    assert float(strategy.run(step, args=(batch_of(strategy),)).values[0]) == 0


@pytest.mark.cover(["strategy", "whole"], {(2, True), (3, False)})
@pytest.mark.parametrize("whole", [False, True])
def test_reduce_over_the_replicas(strategy, whole):
    """A mean of one number per replica, some of which have nothing to say; also within one program."""
    step = lambda batch: strategy.reduce("MEAN", strategy.run(jnp.mean, args=(batch,)), axis=None)  # noqa: E731
    step = phalanx.function(step) if whole else step
    assert float(step(batch_of(strategy, 5.0))) == 5


@pytest.mark.cover(["strategy"], {3})
def test_reduce_over_rows(strategy):
    """Real rows only."""
    for axis in (0, (0,)):
        assert float(strategy.reduce("MEAN", batch_of(strategy, 5.0), axis=axis)) == 5
    assert strategy.gather(batch_of(strategy, 5.0), axis=0).tolist() == [5]


@pytest.mark.cover(["strategy", "weighted"], {(2, True), (3, False)})
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_see_real_rows_only(strategy, weighted):
    """With and without weights of one's own."""
    with strategy.scope():
        metric = keras.metrics.Mean()

    def step(batch):
        x, weight = batch
        metric.update_state(x, sample_weight=weight if weighted else None)

    rows = np.arange(7, dtype="float32")
    for batch in strategy.experimental_distribute_dataset((rows, rows), batch_size=6):
        strategy.run(step, args=(batch,))
    assert float(metric.result()) == pytest.approx(np.average(rows, weights=rows if weighted else None))


@pytest.mark.cover(["strategy"], {3})
def test_gradients_of_one_row_equal_one_device(strategy):
    """Of a batch of one row, they are those of one device on that row."""
    with strategy.scope():
        v, optimizer = keras.Variable(2.0), keras.optimizers.SGD(1.0)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(v * x)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v]), [v], strict=True))

    for batch in (batch_of(strategy, 5.0), batch_of(strategy)):
        strategy.run(step, args=(batch,))
    assert float(v) == 2 - 5


def test_float16_moments_do_not_overflow():
    """4,096 values of 20, whose sum is no float16, as `jnp.mean` of them."""
    values, replica = jnp.full((4096, 1), 20, "float16"), phalanx.get_replica_context()
    mean, variance = moments(replica, values, jnp.ones_like(values, bool), (0,), everywhere=False)
    assert [(x.dtype, x.tolist()) for x in (mean, variance)] == [("float16", [20.0]), ("float16", [0.0])]


def test_replica_knows_its_rows():
    """And the number of all, if replicas have different numbers; there is no padding to leave out."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(x):
        context = phalanx.get_replica_context()
        return x, context.num_examples, context.example_mask, jnp.asarray(context.weight)

    for n, shares in [(4, [[0, 1], [2, 3]]), (3, [[0, 1], [2]]), (1, [[0], []]), (0, [[], []])]:
        rows, count, mask, weight = strategy.run(step, args=(batch_of(strategy, *range(n)),))
        assert [x.tolist() for x in rows.values] == shares
        assert (count, mask) == (None if n == 4 else n, None)
        assert [float(x) for x in weight.values] == pytest.approx([len(x) / max(n, 1) for x in shares])


def test_padding_counts_for_nothing_where_it_remains():
    """A step that is not compiled has the padding of the widest replica, and a mask: losses, metrics and results leave it out."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        mean, error = keras.metrics.Mean(), keras.metrics.MeanSquaredError()

    def step(x):
        mean.update_state(x)
        error.update_state(x[:, None], 0 * x[:, None])
        return phalanx.nn.compute_average_loss(x), x, phalanx.get_replica_context().example_mask

    batch, eager = batch_of(strategy, 1.0, 2.0, 6.0), phalanx.RunOptions(eager=True)
    with pytest.warns(SlipWarning, match=r"executed eagerly .* padded rows too.*\nHINT: run_eagerly=False") as caught:
        loss, rows, mask = strategy.run(step, args=(batch,), options=eager)
    assert len(caught) == 1
    assert float(strategy.reduce("SUM", loss, axis=None)) == 3
    assert [x.tolist() for x in rows.values] == [[1, 2], [6]]
    assert mask.data.tolist() == [[True, True], [True, False]]
    assert float(mean.result()) == 3
    assert float(error.result()) == pytest.approx(41 / 3)
