"""Replicas with unequal shares of a batch: which rows they get, which of them they compute, and that the results do not change."""

import functools

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InputError, InvalidArgumentError, SlipWarning

ROWS, WIDTH = 30, 5
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")
Y = RANDOM.integers(0, 3, ROWS)


def strategy_with(weights, count=3, **options):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)], replica_weights=weights, **options)


def compiled(strategy, *, normalized=False, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh")]
        layers += [keras.layers.BatchNormalization(synchronized=True)] if normalized else []
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **options)
    return model


def shares_of(weights):
    """The real rows of each replica in a batch of twelve."""
    strategy = strategy_with(weights)
    batch = next(iter(strategy.experimental_distribute_dataset(X, batch_size=12)))
    return [len(x) for x in strategy.experimental_local_results(batch)]


def test_shares_are_proportional():
    """To the weights, whatever their sum."""
    assert shares_of([3, 1, 2]) == shares_of([0.3, 0.1, 0.2]) == [6, 2, 4]
    assert shares_of(None) == shares_of("auto") == [4, 4, 4]


@functools.cache
def results_of_one_device(normalized):
    return results_of(phalanx.OneDeviceStrategy("cpu:0"), normalized)


def results_of(strategy, normalized=False, **options):
    """Metrics, weights and predictions of a training on batches that are short for all."""
    model = compiled(strategy, normalized=normalized, **options)
    history = model.fit(X, Y, batch_size=14, epochs=3, shuffle=False, verbose=0, validation_data=(X[:7], Y[:7]))
    return [*history.history.values(), *model.get_weights(), model.predict(X, verbose=0)]


def assert_all_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(1, {}, id="whole"),
        pytest.param(3, {}, id="whole, several steps"),
        pytest.param(3, {"layout": phalanx.fully_sharded(min_size=1)}, id="layout"),
    ],
)
def test_fit_is_that_of_one_device(steps, options):
    """Also where variables are divided."""
    found = results_of(strategy_with([3, 1, 2], **options), steps_per_execution=steps)
    assert_all_close(found, results_of_one_device(False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_normalization_over_all_replicas():
    """It communicates in the middle of a step, so all places are computed. The user hears of it, and results do not change."""
    with pytest.warns(SlipWarning, match="communicates before it has computed"):
        found = results_of(strategy_with([3, 1, 2]), normalized=True)
    assert_all_close(found, results_of_one_device(True))


@pytest.mark.parametrize(("weights", "rows"), [([3, 1, 2], [6, 2, 4]), (None, [4, 4, 4])])
def test_replicas_compute_their_own_rows(weights, rows):
    """A full batch has no padding, so that sums over a replica's rows are of real rows. Results have the rows of all, in order."""
    strategy, seen = strategy_with(weights), []

    def replica(x):
        context = phalanx.get_replica_context()
        jax.debug.callback(lambda i, x: seen.append((int(i), len(x))), context.replica_id_in_sync_group, x)
        return context.all_reduce("SUM", x.sum(0)), 2 * x, x.sum()

    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    total, doubled, part = strategy.run(replica, args=(batch,))
    jax.effects_barrier()
    assert sorted(seen) == list(enumerate(rows))
    np.testing.assert_allclose(strategy.experimental_local_results(total)[0], X[:12].sum(0), rtol=1e-5)
    np.testing.assert_array_equal(strategy.gather(doubled, 0), 2 * X[:12])
    np.testing.assert_allclose(strategy.reduce("SUM", part, axis=None), X[:12].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda x: x.sum() if x.shape[0] > 4 else (x * 1.0).sum(0), id="other operations"),
        pytest.param(lambda x: keras.ops.cast(x.shape[0], "float32"), id="other numbers"),
    ],
)
def test_steps_that_depend_on_the_number_of_rows(value):
    """They send something else for fewer rows, so all places are computed, as without weights, and the user hears why."""
    strategy = strategy_with([3, 1, 2])
    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    with pytest.warns(SlipWarning, match="does something else with fewer rows"):
        strategy.run(lambda x: phalanx.get_replica_context().all_reduce("SUM", value(x)), args=(batch,))


def test_statistics_count_rows():
    """BatchNormalization's moving statistics are means over the replicas, which count by their rows."""
    strategy = strategy_with([3, 1, 2])
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X[:12], Y[:12], batch_size=12, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), X[:12].mean(0), rtol=1e-4, atol=1e-6)


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
            shares, noted = strategy.topology.shares, set()
            note = shares.note_own_part

            def measured(replica, rows, note=note, noted=noted, shares=shares):
                noted.add(replica)
                note(replica, rows)
                if shares._seconds_per_row.get(replica):
                    shares._seconds_per_row[replica][-1] = 0.03 if replica == 1 else 0.01

            shares.note_own_part = measured
        history = model.fit(X, Y, batch_size=3, epochs=3, shuffle=False, verbose=0)
        found.append([*history.history["loss"], *model.get_weights()])
        jax.effects_barrier()
    assert noted == {0, 1, 2}
    assert shares.weights[1] <= 0.8 * min(shares.weights[0], shares.weights[2])
    assert_all_close(*found)


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
