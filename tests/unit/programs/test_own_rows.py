"""Replicas with unequal shares of a batch: which rows they get, which of them they compute, and that the results do not change."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InvalidArgumentError, SlipWarning, TraceError

ROWS, WIDTH = 30, 5
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")
Y = RANDOM.integers(0, 3, ROWS)
WITH_MODEL_AXIS = {
    "weights": [3, 1],
    "count": 4,
    "model_axis": ("model", 2),
    "layout": phalanx.fully_sharded("model", min_size=1),
}


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


@pytest.mark.cover(["steps", "options"], [(3, {"normalized": True}), (1, {"normalized": True, **WITH_MODEL_AXIS})])
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(1, {}, id="whole"),
        pytest.param(3, {}, id="whole, several steps"),
        pytest.param(3, {"layout": phalanx.fully_sharded(min_size=1)}, id="layout"),
        pytest.param(3, {"normalized": True}, id="normalization, several steps"),
        pytest.param(1, {"normalized": True, **WITH_MODEL_AXIS}, id="normalization, model axis"),
    ],
)
def test_fit_is_that_of_one_device(steps, options):
    """Also where variables are divided, and where a step communicates in its middle, between parts that differ by the number of rows.

    With a model axis, XLA exchanges in these parts too.
    """
    options = dict(options)
    normalized, weights = options.pop("normalized", False), options.pop("weights", [3, 1, 2])
    found = results_of(strategy_with(weights, **options), normalized, steps_per_execution=steps)
    assert_all_close(found, results_of_one_device(normalized))


@pytest.mark.exhaustive("test_fit_is_that_of_one_device")
def test_normalization_over_all_replicas():
    """It communicates in the middle of a step, between parts that differ by the number of rows."""
    assert_all_close(results_of(strategy_with([3, 1, 2]), normalized=True), results_of_one_device(True))


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
    ("value", "expected"),
    [
        pytest.param(
            lambda x: x.sum() if x.shape[0] > 4 else 2 * x.sum(), 2 * X[:12].sum() - X[:6].sum(), id="operations"
        ),
        pytest.param(lambda x: keras.ops.cast(x.shape[0], "float32"), 12, id="numbers"),
    ],
)
def test_steps_that_depend_on_the_number_of_rows(value, expected):
    """What a replica does may depend on its rows."""
    strategy = strategy_with([3, 1, 2])
    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    total = strategy.run(lambda x: phalanx.get_replica_context().all_reduce("SUM", value(x)), args=(batch,))
    np.testing.assert_allclose(np.asarray(total.values[1]), expected, rtol=1e-5)


def test_replicas_that_send_something_else():
    """For fewer rows: no program can do that, so replicas compute padding too, and the user hears of which operation it is."""
    strategy = strategy_with([3, 1, 2])
    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    value = lambda x: x.sum() if x.shape[0] > 4 else x.sum(0)  # noqa: E731
    with pytest.warns(
        SlipWarning, match=r"exchange different arrays in a step: psum.* at .*test_own_rows.py:\d+\. So"
    ) as caught:
        strategy.run(lambda x: phalanx.get_replica_context().all_reduce("SUM", value(x)), args=(batch,))
    assert len(caught) == 1
    assert "HINT: the same collective operations" in str(caught[0].message)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_all_gather_of_jax_is_told_of_that_of_replicas(is_tiled):
    strategy = strategy_with([3, 1, 2])
    (batch,) = strategy.experimental_distribute_dataset([X[:12]])
    with pytest.warns(SlipWarning, match=r"HINT: phalanx.get_replica_context\(\).all_gather\(x, axis=0\)"):
        strategy.run(lambda x: jax.lax.all_gather(x, phalanx.REPLICA_AXIS, tiled=is_tiled).sum(), args=(batch,))


@pytest.mark.filterwarnings("ignore::phalanx.errors.SlipWarning")
def test_other_structures_for_fewer_rows_are_refused():
    """There is one structure of results for all replicas."""
    (batch,) = strategy_with(None).experimental_distribute_dataset([X[:7]])
    message = r"returns 2 arrays for some numbers of rows and 1 for others: .*\nHINT: return the same structure"
    with pytest.raises(TraceError, match=message):
        strategy_with(None).run(lambda x: (x, x.sum()) if len(x) > 2 else x, args=(batch,))


class Centered(keras.layers.Layer):
    """A layer that asks for all rows of the batch, in the middle of a model."""

    def call(self, x):
        replica = phalanx.get_replica_context()
        return x if replica is None else x - replica.all_gather(x, axis=0).mean(0)


@pytest.mark.cover(["rows"], {1, 8})
@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_rows_of_all_replicas(rows):
    """`all_gather` gives every replica the rows of all; gradients flow back to the replica that has the row."""
    found = []
    for strategy in (phalanx.OneDeviceStrategy("cpu:0"), strategy_with(None)):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(4, activation="tanh"), Centered(), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((WIDTH,)), *layers])
            model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(X[:rows], Y[:rows], batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append([history.history["loss"], *model.get_weights()])
    assert_all_close(*found)


def test_each_replica_gives_what_its_rows_give():
    """A function of any kind: results of other shapes, random numbers, numbers of Python, a loop, a branch, a call."""

    def each(x):
        total, _ = jax.lax.scan(lambda carry, row: (carry * 0.5 + row, None), jnp.zeros(x.shape[1]), x)
        order = jax.jit(lambda y: jnp.argsort(y[:, 0]))(x)
        return {
            "rows": x * 2,
            "pairs": x @ x.T,
            "twice": jnp.concatenate([x, x]),
            "last": total,
            "median": jnp.median(x),
            "order": order,
            "count": x.shape[0],
            "number": jnp.float32(x.shape[0]),
            "ones": jnp.ones_like(x).sum(),
            "constant": jnp.asarray(np.arange(float(x.shape[0]))).sum() + 1,
            "is_long": jax.lax.cond(x.sum() > 0, lambda: x.shape[0] * 1.0, lambda: -1.0),
            "name": "same",
        }

    alone = jax.jit(lambda x: {name: value for name, value in each(x).items() if name != "name"})
    strategy = strategy_with(None)
    for rows in (7, 2, 1):
        (batch,) = strategy.experimental_distribute_dataset([X[:rows]])
        result = strategy.run(each, args=(batch,))
        assert result["name"] == "same"
        for replica, own in enumerate(np.array_split(X[:rows], 3)):
            expected = jax.tree.map(np.asarray, alone(own)) if len(own) else None
            for name in set(result) - {"name"}:
                value = np.asarray(strategy.experimental_local_results(result[name])[replica])
                if len(own):
                    np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
                else:
                    assert not value.size or not value.any(), name


def test_statistics_count_rows():
    """BatchNormalization's moving statistics are means over the replicas, which count by their rows."""
    strategy = strategy_with([3, 1, 2])
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X[:12], Y[:12], batch_size=12, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), X[:12].mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.cover(["exchange", "rows"], {("normalization", 2), ("all_reduce", 1), ("all_gather", 2)})
@pytest.mark.parametrize("exchange", ["normalization", "all_reduce", "all_gather"])
@pytest.mark.parametrize("rows", [1, 2])
def test_padding_has_no_part_in_gradients(exchange, rows):
    """A replica without rows computes a loss of padding. Nothing of it comes back through an exchange to those that have rows."""

    def total(x):
        if exchange == "all_reduce":
            return phalanx.get_replica_context().all_reduce("SUM", x.sum(axis=0))
        return phalanx.get_replica_context().all_gather(x, axis=0).sum(axis=0)

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            first, last = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
            normalization = keras.layers.BatchNormalization(synchronized=True)
            optimizer = keras.optimizers.SGD(0.1)

        def step(x):
            with phalanx.GradientTape() as tape:
                y = first(x)
                y = normalization(y, training=True) if exchange == "normalization" else y * total(y)
                loss = phalanx.nn.compute_average_loss(jnp.square(last(y))[:, 0])
            variables = first.trainable_variables + last.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for batch in strategy.experimental_distribute_dataset(X[:rows], batch_size=rows):
            strategy.run(step, args=(batch,))
        return [w for layer in (first, last) for w in layer.get_weights()]

    three = trained(phalanx.MirroredStrategy([f"cpu:{i}" for i in range(3)]))
    one = trained(phalanx.OneDeviceStrategy("cpu:0"))
    for ours, theirs in zip(three, one, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_batches_in_a_run():
    """Each replica has its rows of both."""
    strategy = strategy_with([3, 1, 2])
    batches = [next(iter(strategy.experimental_distribute_dataset([x]))) for x in (X[:12], X[12:19])]
    result = strategy.run(lambda x, y: jnp.concatenate([x, y]).sum(0), args=tuple(batches))
    np.testing.assert_allclose(strategy.reduce("SUM", result, axis=None), X[:19].sum(0), rtol=1e-5)


def test_measured_shares_follow_the_speeds():
    """The shares of the next epoch follow what the first one has shown, and results stay the same."""
    found = []
    for weights in (None, "auto"):
        strategy = strategy_with(weights)
        model = compiled(strategy)
        if weights == "auto":
            shares, noted = strategy.topology.shares, set()
            note = shares.after_own_part

            def measured(replica, rows, note=note, noted=noted, shares=shares):
                noted.add(replica)
                note(replica, rows)
                if shares._seconds_per_row.get(replica):
                    shares._seconds_per_row[replica][-1] = 0.03 if replica == 1 else 0.01

            shares.after_own_part = measured
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
