"""`Strategy.run` and training in hard cases."""

import threading

import flax.linen
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from replica_values import per_replica, replica_id

import phalanx
from phalanx import Mirrored, PerReplica, RunOptions
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.strategies.base import living_strategies
from phalanx.tracing.strategy import Updates

# ---- run


@pytest.mark.parametrize("args", [1, "ab", {"x": 1}, np.ones(2), None])
def test_args_must_be_a_list_or_tuple(strategy, args):
    """The message shows what to write."""
    with pytest.raises(InvalidArgumentError, match="positional arguments must be a list or a tuple.\nHINT: args="):
        strategy.run(lambda *a: a, args=args)


def test_run_options_must_be_run_options(strategy):
    """A dict is not."""
    with pytest.raises(InvalidArgumentError, match="options=.*RunOptions"):
        strategy.run(lambda: 1, options={"eager": True})


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda s: s.experimental_distribute_dataset([1], batchsize=3), r"dataset\(\) got an .* argument 'batchsize'"),
        (lambda s: s.gather(1), r"gather\(\) missing 1 required positional argument: 'axis'"),
        (lambda s: s.reduce("SUM", 1), r"reduce\(\) missing 1 required positional argument: 'axis'"),
        (lambda s: s.run(), r"run\(\) missing 1 required positional argument: 'fn'"),
    ],
)
def test_wrong_arguments_of_a_method(strategy, call, found):
    """Python's own error, which names the public class."""
    with pytest.raises(TypeError, match=rf"^Strategy\.\w*{found}"):
        call(strategy)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("distribute_dataset", "experimental_distribute_dataset"),
        ("local_results", "experimental_local_results"),
        ("from_func", "distribute_datasets_from_function"),
        ("num_replicas", "num_replicas_in_sync"),
        ("scopes", "scope"),
    ],
)
def test_misspelled_attribute_is_suggested(strategy, name, near):
    """The error names the nearest public name, or one that contains the misspelled name."""
    with pytest.raises(
        AttributeError, match=rf"^'MirroredStrategy' object has no .* '{name}'. Did you mean: '{near}'\?$"
    ):
        getattr(strategy, name)


@pytest.mark.parametrize("name", ["zzz", "e", "_running", "__array__"])
def test_attribute_that_resembles_no_other(strategy, name):
    """Python's own error."""
    with pytest.raises(AttributeError, match=rf"^'MirroredStrategy' object has no attribute '{name}'$"):
        getattr(strategy, name)


class Broken(phalanx.MirroredStrategy):
    """A strategy with a property that reads an attribute that does not exist."""

    @property
    def learning_rate(self):
        """Fails."""
        return self._learning_rate


def test_property_that_raises_an_attribute_error():
    """Its own error is shown, not one about the property."""
    with pytest.raises(AttributeError, match=r"^'Broken' object has no attribute '_learning_rate'$"):
        Broken(["cpu:0"]).learning_rate  # noqa: B018


@pytest.mark.parametrize("kind", ["default", "one", "mirrored"])
def test_mirrored_arguments_are_unwrapped(strategy, kind):
    """The same loop over replicated state runs with and without a strategy."""
    strategy = {"default": phalanx.get_strategy(), "one": phalanx.OneDeviceStrategy("cpu:0"), "mirrored": strategy}[
        kind
    ]
    state = strategy.replicate({"w": jnp.ones(2)})
    for _ in range(2):
        state = strategy.run(lambda s: Mirrored({"w": s["w"] + 1}), args=(state,))
    assert state.value["w"].tolist() == [3, 3]


def test_run_in_replica_context(strategy):
    """You are in a replica already."""
    with pytest.raises(ContextError, match="Strategy.run was called in replica context"):
        strategy.run(lambda: strategy.run(lambda: 1))


def test_python_results_stay(strategy):
    """What is no array of the program comes back as it is, once."""
    assert strategy.run(lambda: ("a", 5, None, {"b": 1.5})) == ("a", 5, None, {"b": 1.5})


def test_constants_made_inside(strategy):
    """Arrays are wrapped even if they do not depend on anything."""
    ones, shared = strategy.run(lambda: (jnp.ones(2), Mirrored(jnp.zeros(()))))
    assert isinstance(ones, PerReplica)
    assert float(shared.value) == 0


def test_nan_loss_is_nan_and_nothing_else(strategy):
    """A row that overflows makes the loss NaN; the other variables stay finite."""
    with strategy.scope():
        v, steps = keras.Variable(1.0), keras.Variable(0, dtype="int32", aggregation="sum", trainable=False)
        optimizer = keras.optimizers.SGD(0.1)
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, np.nan, 3, 4])])

    def step(x):
        steps.assign_add(1)
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(v * x)
        optimizer.apply(tape.gradient(loss, [v]), [v])
        return loss

    loss = strategy.run(step, args=(batch,))
    assert [bool(np.isnan(x)) for x in loss.values] == [True, False]
    assert np.isnan(strategy.reduce("SUM", loss, axis=None))
    assert np.isnan(v.numpy())
    assert steps.numpy() == 2


def test_zero_rows_step(strategy):
    """A batch without rows trains nothing and breaks nothing."""
    with strategy.scope():
        v, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(v * x)
        optimizer.apply(tape.gradient(loss, [v]), [v])
        return loss

    (batch,) = strategy.experimental_distribute_dataset([np.zeros((0,), "float32")])
    assert float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)) == 0
    assert v.numpy() == 1


# ---- optimizers, metrics, seeds


def gradient_step(strategy, optimizer, gradients, **options):
    """Applies one gradient a replica to a variable that holds 0; returns what it holds then."""
    with strategy.scope():
        v = keras.Variable(np.zeros(2, "float32"))
    grads = per_replica(strategy, *(np.float32(g) for g in gradients))
    strategy.run(lambda g: optimizer.apply_gradients([(g, v)], **options), args=(grads,))
    return v.numpy().tolist()


def test_gradients_are_summed(strategy):
    """Over the replicas, before the optimizer sees them."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
    assert gradient_step(strategy, optimizer, ([1, 2], [3, 4])) == [-4, -6]


def test_global_norm_is_clipped_after_the_sum(strategy):
    """Sum [3, 4] has norm 5; clipped alone the gradients would be shorter."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    np.testing.assert_allclose(gradient_step(strategy, optimizer, ([3, 0], [0, 4])), [-0.6, -0.8], rtol=1e-6)


def test_skip_gradients_aggregation(strategy):
    """The caller has aggregated already."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
    assert gradient_step(strategy, optimizer, ([1, 2], [1, 2]), skip_gradients_aggregation=True) == [-1, -2]


def test_aggregated_by_hand(strategy):
    """What such code does before."""
    with strategy.scope():
        v, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0)

    def step():
        grad = phalanx.get_replica_context().all_reduce("MEAN", replica_id() * 10)
        optimizer.apply_gradients([(grad, v)], skip_gradients_aggregation=True)

    strategy.run(step)
    assert v.numpy() == -5


@pytest.mark.parametrize(("bad", "expected"), [(None, [-3.0, -3.0]), (0, [0, 0]), (1, [0, 0])])
def test_loss_scale_optimizer(strategy, bad, expected):
    """An overflow on one replica skips the step on all and halves the scale."""
    with strategy.scope():
        inner = keras.optimizers.SGD(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    grads = np.float32([[4, 4], [8, 8]])
    if bad is not None:
        grads[bad, 0] = np.inf
    assert gradient_step(strategy, optimizer, grads) == expected
    assert float(optimizer.dynamic_scale.numpy()) == (4.0 if bad is None else 2.0)
    assert int(inner.iterations.numpy()) == (bad is None)


def test_missing_gradients_stay_missing(strategy):
    """Keras warns about the variable, and updates the others."""
    with strategy.scope():
        v, w, optimizer = keras.Variable(0.0, name="v"), keras.Variable(0.0, name="w"), keras.optimizers.SGD(1.0)

    def step():
        with phalanx.GradientTape() as tape:
            loss = v * (replica_id() + 1)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v, w]), [v, w], strict=True))

    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        strategy.run(step)
    assert (v.numpy(), w.numpy()) == (-3, 0)


def test_learning_rate_changes_take_effect(strategy):
    """A new number, and a schedule in place of it, at the next step."""
    with strategy.scope():
        v, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0)
    step = lambda: optimizer.apply([jnp.float32(0.5)], [v])  # noqa: E731
    seen = []
    for rate in (None, 0.5, keras.optimizers.schedules.PiecewiseConstantDecay([2], [10.0, 100.0]), None):
        if rate is not None:
            optimizer.learning_rate = rate
        before = float(v.numpy())
        strategy.run(step)
        seen.append(before - float(v.numpy()))
    assert seen == [1.0, 0.5, 10.0, 100.0]


def test_freezing_a_layer_takes_effect(strategy):
    """`trainable` is looked at in every step."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    first, second = model.layers

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(model(x)[:, 0])
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    (batch,) = strategy.experimental_distribute_dataset([np.ones((4, 1), "float32")])
    changed = []
    strategy.run(step, args=(batch,))
    for trainable in (False, True):
        first.trainable = trainable
        before = [w.numpy() for w in (first.kernel, second.kernel)]
        strategy.run(step, args=(batch,))
        changed.append(
            [not np.array_equal(b, w.numpy()) for b, w in zip(before, (first.kernel, second.kernel), strict=True)]
        )
    assert changed == [[False, True], [True, True]]


def test_metrics_count_rows_of_all_replicas(strategy):
    """Each replica counts its own rows; the result is over all; reset between steps starts at zero."""
    with strategy.scope():
        metric = keras.metrics.Mean()
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 3, 6])])
    update = lambda x: metric.update_state(x)  # noqa: E731
    strategy.run(update, args=(batch,))
    strategy.run(update, args=(batch,))
    assert float(metric.result()) == 3
    assert sum(float(c) for c in strategy.experimental_local_results(metric.total)) == 24
    metric.reset_state()
    strategy.run(update, args=(batch,))
    assert (float(metric.result()), float(metric.count.numpy())) == (3, 4)


@pytest.mark.parametrize("shape", [(3, 1), (3,)])
def test_metric_of_a_short_batch(strategy, shape):
    """Padded rows count for nothing, step after step."""
    with strategy.scope():
        metric = keras.metrics.MeanSquaredError()
    x = np.float32([1, 2, 6]).reshape(shape)
    (batch,) = strategy.experimental_distribute_dataset([(x, np.zeros_like(x))])
    update = lambda y, p: metric.update_state(y, p)  # noqa: E731
    for _ in range(2):
        strategy.run(update, args=batch)
        np.testing.assert_allclose(float(metric.result()), 41 / 3, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras's own cast of indices
def test_integer_metric_of_a_short_batch(strategy):
    """The mask is a weight in the dtype of the metric."""
    with strategy.scope():
        metric = keras.metrics.MeanIoU(2, dtype="int32")
    (batch,) = strategy.experimental_distribute_dataset([(np.int32([0, 1, 1]), np.int32([0, 1, 0]))])
    strategy.run(lambda y, p: metric.update_state(y, p), args=batch)
    assert metric.total_cm.numpy().tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("kind", ["weights", "accumulation"])
def test_options_of_optimizers_and_metrics(strategy, kind):
    """Sample weights beside the mask; gradients accumulated over two steps."""
    with strategy.scope():
        metric, v = keras.metrics.Mean(), keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    if kind == "weights":
        (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 3])])
        strategy.run(lambda x: metric.update_state(x, sample_weight=x), args=(batch,))
        np.testing.assert_allclose(float(metric.result()), 14 / 6, rtol=1e-6)
    else:
        step = lambda: optimizer.apply([jnp.float32(1.0)], [v])  # noqa: E731
        assert [float(v.numpy()) for _ in range(4) if not strategy.run(step)] == [0, -2, -2, -4]


def test_model_losses_belong_to_their_replica(strategy):
    """Losses of layers and regularizers are this replica's own, and none is left behind."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activity_regularizer="l2")])
    model.set_weights([np.ones((2, 1)), np.zeros(1)])
    (batch,) = strategy.experimental_distribute_dataset([np.float32([[1, 1], [3, 3]])])
    (loss,) = strategy.run(lambda x: (model(x), model.losses)[1], args=(batch,))
    np.testing.assert_allclose([float(x) for x in loss.values], [0.01 * 4, 0.01 * 36], rtol=1e-6)
    assert model.losses == []


def test_dropout_differs_per_replica_and_repeats(strategy):
    """The same seed gives the same masks, step by step; the stored seed state is one."""

    def masks():
        with strategy.scope():
            dropout = keras.layers.Dropout(0.5, seed=7)
        call = lambda: dropout(jnp.ones(64), training=True)  # noqa: E731
        return [v for _ in range(2) for v in strategy.run(call).values], dropout

    (first, dropout), (second, _) = masks(), masks()
    for i, a in enumerate(first):
        assert all(not np.array_equal(a, b) for b in first[i + 1 :])
    np.testing.assert_array_equal(first, second)
    a, b = (np.asarray(s.data) for s in dropout.seed_generator.state.value.addressable_shards)
    np.testing.assert_array_equal(a, b)


# ---- eager


def test_eager_prints_every_replica(strategy, capsys):
    """The Python code runs at each call, with values."""
    options = RunOptions(eager=True)

    def replica_fn(x):
        jax.debug.print("seen {}", x + replica_id())
        return x

    for _ in range(2):
        strategy.run(replica_fn, args=(10.0,), options=options)
    jax.effects_barrier()
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == ["10.0"] * 2 + ["11.0"] * 2 + ["seen"] * 4


def test_eager_runs_python_at_each_call(strategy, capsys):
    """`print` shows values, not tracers."""
    for step in range(2):
        strategy.run(printing, args=(step + 0.5,), options=RunOptions(eager=True))
    out = capsys.readouterr().out
    assert "0.5" in out
    assert "1.5" in out


def printing(x):
    """Prints its argument as Python does."""
    print(x * 1.0)


@pytest.mark.parametrize("tape", [False, True], ids=["plain", "tape"])
def test_eager_equals_compiled(strategy, tape):
    """With variables of every kind, and with a tape."""
    results = []
    for options in (None, RunOptions(eager=True)):
        with strategy.scope():
            v, total = keras.Variable(2.0), keras.Variable(1.0, synchronization="on_read", aggregation="sum")
            optimizer = keras.optimizers.SGD(0.1)

        def step(x):
            total.assign_add(replica_id())
            if not tape:
                return v * x
            with phalanx.GradientTape() as t:
                loss = (v * x + replica_id()) ** 2
            optimizer.apply(t.gradient(loss, [v]), [v])
            return loss

        out = [strategy.run(step, args=(3.0,), options=options) for _ in range(2)]
        results.append([float(x) for o in out for x in o.values] + [float(v.numpy()), float(total.numpy())])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


# ---- plain pytrees: optax and flax


def test_optax_and_flax(strategy):
    """State that is taken and returned, replicated once, with gradients summed by hand."""
    model, tx = flax.linen.Dense(1), optax.adam(0.1)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    params = model.init(jax.random.key(0), x)
    state = strategy.replicate((params, tx.init(params)))

    def step(state, x):
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x)[:, 0] - x.sum(1)) ** 2))(params)
        grads = phalanx.get_replica_context().all_reduce("MEAN", grads)
        updates, opt = tx.update(grads, opt, params)
        return Mirrored((optax.apply_updates(params, updates), opt)), loss

    (batch,) = strategy.experimental_distribute_dataset([x])
    losses = []
    for _ in range(5):
        state, loss = strategy.run(step, args=(state, batch))
        losses.append(float(strategy.reduce("MEAN", loss, axis=None)))
    expected, opt = params, tx.init(params)
    for loss in losses:
        value, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x)[:, 0] - x.sum(1)) ** 2))(expected)
        updates, opt = tx.update(grads, opt, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(loss, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.value[0], expected)


# ---- threads, several strategies


def add_one(v):
    """A replica function that communicates."""
    return lambda: v.assign_add(phalanx.get_replica_context().all_reduce("SUM", 1.0))


def test_collective_from_a_second_thread():
    """While the main thread trains on the same devices: no deadlock, and both are right."""
    strategies = [phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)]) for _ in range(2)]
    variables = []
    for strategy in strategies:
        with strategy.scope():
            variables.append(keras.Variable(0.0, aggregation="mean", trainable=False))

    def work(strategy, v):
        fn = add_one(v)
        for _ in range(50):
            strategy.run(fn)
            strategy.gather(strategy.run(replica_id_of), axis=0)

    threads = [threading.Thread(target=work, args=a, daemon=True) for a in zip(strategies, variables, strict=True)]
    threads[1].start()
    work(strategies[0], variables[0])
    threads[1].join(timeout=60)
    assert not threads[1].is_alive(), "the second thread hangs"
    assert [float(v.numpy()) for v in variables] == [200, 200]


def replica_id_of():
    """A vector of this replica's number."""
    return jnp.ones(2) * replica_id()


def test_two_strategies_side_by_side(strategy):
    """With different numbers of devices, in turns."""
    three = phalanx.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"])
    variables = []
    for s in (strategy, three):
        with s.scope():
            variables.append(keras.Variable(0.0, aggregation="sum", trainable=False))
    fns = [lambda: variables[0].assign_add(1.0), lambda: variables[1].assign_add(1.0)]
    for _ in range(3):
        strategy.run(fns[0])
        three.run(fns[1])
    assert [float(v.numpy()) for v in variables] == [6, 9]
    assert [len(v.value.devices()) for v in variables] == [2, 3]


# ---- extended


def test_repr_shows_kind_and_devices(strategy):
    """Kind and devices."""
    assert repr(strategy) == "MirroredStrategy(['cpu:0', 'cpu:1'])"
    assert repr(phalanx.get_strategy()) == "DefaultStrategy([])"


# ---- the default strategy and tapes


def test_a_topology_that_is_made_anew():
    """A strategy of one's own may return another object each time; updates are in the step all the same."""

    class Own(phalanx.Strategy):
        """Over one device."""

        @property
        def topology(self):
            """The device."""
            return phalanx.mesh.topology.Topology.of(["cpu:1"])

    strategy = Own()
    with strategy.scope():
        weight = keras.Variable(3.0)
        optimizer = keras.optimizers.SGD(0.5)

    def step():
        optimizer.apply([1.0], [weight])
        return weight.value

    assert strategy.updates is Updates.IN_REPLICAS
    assert [float(strategy.run(step)) for _ in range(2)] == [2.5, 2.0]


def test_strategy_that_cannot_be_made_is_not_among_the_living():
    """`fit` outside a scope looks at all strategies, also while the error of one's constructor is still known."""
    with pytest.raises(phalanx.errors.PhalanxError) as kept:
        phalanx.ParameterServerStrategy(workers=0)
    assert kept.tb is not None
    assert not [s for s in living_strategies() if isinstance(s, phalanx.ParameterServerStrategy)]
