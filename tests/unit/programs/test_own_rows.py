"""Replicas with unequal shares of a batch: which rows they get, which of them they compute, and that the results do not change."""

import warnings

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InputError, InvalidArgumentError

ROWS, WIDTH = 30, 5
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")
Y = RANDOM.integers(0, 3, ROWS)


def strategy_with(weights, count=3, **options):
    """A strategy over virtual devices."""
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)], replica_weights=weights, **options)


def compiled(strategy, *, normalized=False, **options):
    """A small classifier."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh")]
        layers += [keras.layers.BatchNormalization(synchronized=True)] if normalized else []
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **options)
    return model


def rows_per_replica(strategy, batch_size=12):
    """The real rows of each replica in the first batch."""
    batch = next(iter(strategy.experimental_distribute_dataset(X, batch_size=batch_size)))
    return [len(x) for x in strategy.experimental_local_results(batch)]


def test_shares_are_proportional():
    """To the weights, whatever their sum."""
    assert rows_per_replica(strategy_with([3, 1, 2])) == [6, 2, 4]
    assert rows_per_replica(strategy_with([0.3, 0.1, 0.2])) == [6, 2, 4]
    assert rows_per_replica(strategy_with(None)) == [4, 4, 4]
    assert rows_per_replica(strategy_with("auto")) == [4, 4, 4]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("options", [{}, {"layout": phalanx.fully_sharded(min_size=1)}], ids=["whole", "layout"])
def test_fit_is_that_of_one_device(steps, options):
    """Metrics, weights and predictions, on batches that are short for all, also where variables are divided."""
    found = []
    for strategy in (phalanx.OneDeviceStrategy("cpu:0"), strategy_with([3, 1, 2], **options)):
        model = compiled(strategy, steps_per_execution=steps)
        history = model.fit(X, Y, batch_size=14, epochs=3, shuffle=False, verbose=0, validation_data=(X[:7], Y[:7]))
        found.append([*history.history.values(), *model.get_weights(), model.predict(X, verbose=0)])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def counted(weights):
    """The rows that each replica computes in a step whose global batch has 12 rows."""
    strategy, seen = strategy_with(weights), []

    def replica(x):
        replica_id = phalanx.get_replica_context().replica_id_in_sync_group
        jax.debug.callback(lambda i, rows: seen.append((int(i), len(rows))), replica_id, x)
        return phalanx.get_replica_context().all_reduce("SUM", x.sum(0))

    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    result = strategy.run(replica, args=(batch,))
    jax.effects_barrier()
    np.testing.assert_allclose(strategy.experimental_local_results(result)[0], X[:12].sum(0), rtol=1e-5)
    return sorted(seen)


def test_replicas_compute_their_own_rows():
    """A full batch has no padding, so that sums over the rows of a replica are sums over real rows."""
    assert counted([3, 1, 2]) == [(0, 6), (1, 2), (2, 4)]
    assert counted(None) == [(0, 4), (1, 4), (2, 4)]


def test_rows_of_results():
    """A result with a row per row of the batch has those of all replicas, in order."""
    strategy = strategy_with([3, 1, 2])
    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    result = strategy.run(lambda x: (2 * x, x.sum()), args=(batch,))
    np.testing.assert_array_equal(strategy.gather(result[0], 0), 2 * X[:12])
    np.testing.assert_allclose(strategy.reduce("SUM", result[1], axis=None), X[:12].sum(), rtol=1e-5)


def test_normalization_over_all_replicas():
    """It communicates in the middle of a step, so all places are computed. The user hears of it, and results do not change."""
    found = []
    for strategy in (phalanx.OneDeviceStrategy("cpu:0"), strategy_with([3, 1, 2])):
        model = compiled(strategy, normalized=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(X, Y, batch_size=14, epochs=3, shuffle=False, verbose=0)
        found.append([*history.history.values(), *model.get_weights()])
    assert any("communicates before it has computed" in str(w.message) for w in caught)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_steps_that_depend_on_the_number_of_rows():
    """They compute all places, as without weights, and the user hears why."""
    strategy = strategy_with([3, 1, 2])

    def replica(x):
        y = x.sum() if x.shape[0] > 4 else (x * 1.0).sum(0)
        return phalanx.get_replica_context().all_reduce("SUM", y)

    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(replica, args=(batch,))
    assert any("does something else with fewer rows" in str(w.message) for w in caught)


def test_statistics_count_rows():
    """BatchNormalization's moving statistics are means over the replicas, which count by their rows."""
    strategy = strategy_with([3, 1, 2])
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X[:12], Y[:12], batch_size=12, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), X[:12].mean(0), rtol=1e-4, atol=1e-6)


def test_numbers_of_rows_in_collectives():
    """A step that sends its own number of rows computes all places, because the traces for fewer rows send other numbers."""
    strategy = strategy_with([3, 1, 2])

    def replica(x):
        context = phalanx.get_replica_context()
        return context.all_reduce("SUM", keras.ops.cast(x.shape[0], "float32"))

    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    with pytest.warns(phalanx.errors.SlipWarning, match="does something else with fewer rows"):
        strategy.run(replica, args=(batch,))


def test_two_batches_in_a_run_are_refused():
    """Each has padding of its own."""
    strategy = strategy_with([3, 1, 2])
    pairs = [strategy.experimental_distribute_dataset([x]) for x in (X[:12], X[12:24])]
    with pytest.raises(InputError, match=r"2 batches in one run under replica_weights(.|\n)*first, second"):
        strategy.run(lambda x, y: (x + y).sum(), args=tuple(next(iter(d)) for d in pairs))


def test_measured_shares_follow_the_speeds():
    """The shares of the next epoch follow what the first one has shown, and results stay the same."""
    found = []
    for weights in (None, "auto"):
        strategy = strategy_with(weights)
        model = compiled(strategy)
        if weights == "auto":
            slow = strategy.topology.shares
            note, own = slow.note_own_part, {}

            def delayed(replica, rows, note=note, own=own, slow=slow):
                own[replica] = own.get(replica, 0) + 1
                note(replica, rows)
                if replica == 1 and slow._seconds_per_row.get(1):
                    slow._seconds_per_row[1][-1] += 0.05

            slow.note_own_part = delayed
        history = model.fit(X, Y, batch_size=3, epochs=3, shuffle=False, verbose=0)
        found.append([*history.history["loss"], *model.get_weights()])
        jax.effects_barrier()
    assert set(own) == {0, 1, 2}
    assert slow.weights[1] <= 0.8 * min(slow.weights[0], slow.weights[2])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


BAD = {
    "name": ("fast", r"replica_weights='fast': must be \"auto\", or a list of positive numbers"),
    "zero": ([1, 0, 1], r"replica_weights=\[1, 0, 1\]: must be"),
    "no number": ([1, "2", 1], r"must be \"auto\", or a list of positive numbers, one per replica"),
    "infinite": ([1, float("inf"), 1], r"must be \"auto\""),
    "too few": ([1, 2], r"replica_weights=\[1, 2\] with 3 replicas: must have one number per replica.*\n.*\[2, 1, 1\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_refused(case):
    """With the right length in the hint."""
    weights, message = BAD[case]
    with pytest.raises(InvalidArgumentError, match=message):
        strategy_with(weights)
