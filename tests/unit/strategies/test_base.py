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
from phalanx import Mirrored, PerReplica, RunOptions, experimental
from phalanx._src.strategies.base import living_strategies
from phalanx._src.tracing.strategy import Updates
from phalanx.errors import CallError, ContextError, InvalidArgumentError, ReduceOpError


@pytest.mark.parametrize("args", [1, "ab", {"x": 1}, np.ones(2), None])
def test_args_must_be_a_list_or_tuple(strategy, args):
    with pytest.raises(InvalidArgumentError, match="positional arguments must be a list or a tuple.\nHINT: args="):
        strategy.run(lambda *a: a, args=args)
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


SHARDED = phalanx.fully_sharded()
LAYOUTS = r"MirroredStrategy\(layout=...\) or MultiWorkerMirroredStrategy\(layout=...\) or TPUStrategy\(layout=...\)"


@pytest.mark.parametrize(
    ("cls", "argument", "reason", "hint"),
    [
        (
            phalanx.ParameterServerStrategy,
            {"layout": SHARDED},
            "parameter servers hold",
            "variable_partitioner=phalanx",
        ),
        (phalanx.ParameterServerStrategy, {"model_axis": ("model", 2)}, "parameter servers", "variable_partitioner="),
        (experimental.CentralStorageStrategy, {"layout": SHARDED}, "one device holds the variables", f"{LAYOUTS}$"),
        (phalanx.OneDeviceStrategy, {"layout": SHARDED}, "one device holds all variables", f"{LAYOUTS}$"),
        (phalanx.OneDeviceStrategy, {"devices": ["cpu:0"]}, "one device", r"OneDeviceStrategy\(device=...\)$"),
        (phalanx.MirroredStrategy, {"elastic": "scale_batch"}, "this process alone", r"MultiWorker\w+\(elastic=...\)$"),
        (phalanx.MultiWorkerMirroredStrategy, {"devices": 2}, "all devices", "phalanx run --devices-per-worker 2$"),
        (experimental.MultiWorkerMirroredStrategy, {"layout": SHARDED}, "TensorFlow 2.3", r"phalanx.Multi\w+\(layout="),
        (phalanx.TPUStrategy, {"model_axis": ("model", 2)}, "a device assignment", r"phalanx.TPU.*\.build\(topology, "),
        (experimental.TPUStrategy, {"layout": SHARDED}, "TensorFlow before", r"phalanx.TPUStrategy\(layout=...\)$"),
    ],
)
def test_argument_of_another_strategy_is_explained(cls, argument, reason, hint):
    """The error says how the strategy trains, and what to write instead. It is a TypeError too, as Python's own."""
    (name,) = argument
    called = rf"^{cls.__name__}\({name}=.*\): it has no argument '{name}': .*{reason}.*\nHINT: {hint}"
    with pytest.raises(CallError, match=called) as e:
        cls(**argument)
    assert isinstance(e.value, TypeError)


def test_unknown_argument_of_a_strategy_is_python_s_own_error():
    """So it is if a strategy of a user, which explains nothing, lacks an argument of others."""

    class Custom(phalanx.Strategy):
        topology = property(lambda _: None)

        def __init__(self):
            super().__init__()

    with pytest.raises(TypeError, match=r"^MirroredStrategy.__init__\(\) got an unexpected keyword argument 'zzz'$"):
        phalanx.MirroredStrategy(zzz=1)
    with pytest.raises(TypeError, match=r"Custom.__init__\(\) got an unexpected keyword argument 'layout'$"):
        Custom(layout="auto")


def test_strategy_of_a_user_that_takes_all_arguments():
    class Named(phalanx.MirroredStrategy):
        def __init__(self, devices, **kwargs):
            super().__init__(devices, layout=kwargs.pop("sharding"))

    assert Named(["cpu:0"], sharding=SHARDED).layout is SHARDED


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("distribute_dataset", "experimental_distribute_dataset"),
        ("local_results", "experimental_local_results"),
        ("from_func", "distribute_datasets_from_function"),
        ("num_replicas", "num_replicas_in_sync"),
        ("scopes", "scope"),
        *[(name, None) for name in ("zzz", "e", "_running", "__array__")],
    ],
)
def test_misspelled_attribute_is_suggested(strategy, name, near):
    """The nearest public name, or one that contains the misspelled one. If none does, the error is Python's own."""
    end = rf"\. Did you mean: '{near}'\?" if near else ""
    with pytest.raises(AttributeError, match=rf"^'MirroredStrategy' object has no attribute '{name}'{end}$"):
        getattr(strategy, name)


def test_property_that_raises_an_attribute_error():
    """Its own error is shown, not one about the property."""

    class Broken(phalanx.MirroredStrategy):
        @property
        def learning_rate(self):
            return self._learning_rate

    with pytest.raises(AttributeError, match=r"^'Broken' object has no attribute '_learning_rate'$"):
        Broken(["cpu:0"]).learning_rate  # noqa: B018


def test_mirrored_arguments_are_unwrapped(strategy):
    for each in (phalanx.get_strategy(), phalanx.OneDeviceStrategy("cpu:0"), strategy):
        state = each.replicate({"w": jnp.ones(2)})
        for _ in range(2):
            state = each.run(lambda s: Mirrored({"w": s["w"] + 1}), args=(state,))
        assert state.value["w"].tolist() == [3, 3]


def test_mirrored_argument_of_objects(strategy):
    """As the object itself: it comes back as it is, and a function of other objects is another program."""
    for text in ("a", "b"):
        value = Mirrored({"name": text, "x": [1.0, Mirrored(np.float32([2, 3]))], "none": None})
        result = strategy.run(lambda s: Mirrored((s["name"] + "!", s["x"][0] * 2, s["x"][1].value * 2)), args=(value,))
        assert result.value[0] == f"{text}!"
        assert float(result.value[1]) == 2
        assert result.value[2].tolist() == [4, 6]
        assert phalanx.function(lambda m: m.value["name"])(value) == text
    with pytest.raises(ReduceOpError, match="'text': is not an array of numbers"):
        strategy.reduce("MEAN", Mirrored("text"), axis=None)


@pytest.mark.parametrize(
    "make", [lambda: phalanx.OneDeviceStrategy("cpu:0"), lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"])]
)
def test_returned_variables_are_their_values(make):
    """Those of the moment: later steps change the variables."""
    strategy = make()
    with strategy.scope():
        n = keras.Variable(0.0, aggregation="mean", trainable=False)
        own = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)

    def step(x=None):
        n.assign_add(1.0)
        own.assign_add(1.0)
        return {"n": n, "own": own, "shared": Mirrored((n, "name"))}

    results = [strategy.run(step) for _ in range(3)]
    assert [float(r["n"]) for r in results] == [1, 2, 3]
    assert [float(r["shared"].value[0]) for r in results] == [1, 2, 3]
    assert [[float(x) for x in strategy.experimental_local_results(r["own"])][0] for r in results] == [1, 2, 3]
    assert float(phalanx.function(lambda: (step(), n)[1])()) == 4
    data = iter(strategy.experimental_distribute_dataset(np.ones(8, "float32"), batch_size=4))
    assert np.asarray(strategy.run_steps(step, data, 2)["n"]).tolist() == [5, 6]
    before = strategy.gather(n, axis=0)
    n.assign(0.0)
    assert float(before) == 6
    assert float(strategy.run(lambda v: v, args=(n,))) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded(min_size=2)),
        lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    ],
)
def test_variables_that_are_updated_after_the_step(make):
    """Their values are those of the end of the step, also in a function."""
    strategy = make()
    with strategy.scope():
        v, optimizer = keras.Variable([0.0, 0.0]), keras.optimizers.SGD(1.0)

    def step():
        return optimizer.apply_gradients([(jnp.ones(2) / 2, v)]), v

    results = [strategy.run(step) for _ in range(2)] + [phalanx.function(lambda: (strategy.run(step), v)[0])()]
    assert [int(count) for count, _ in results] == [1, 2, 3]
    assert [np.asarray(value).tolist() for _, value in results] == [[-1, -1], [-2, -2], [-3, -3]]


def test_run_in_replica_context(strategy):
    with pytest.raises(ContextError, match="Strategy.run was called in replica context"):
        strategy.run(lambda: strategy.run(lambda: 1))


def test_python_results_stay(strategy):
    """What is no array of the program comes back as it is, once. Arrays are wrapped even if they do not depend on anything."""
    assert strategy.run(lambda: ("a", 5, None, {"b": 1.5})) == ("a", 5, None, {"b": 1.5})
    ones, shared = strategy.run(lambda: (jnp.ones(2), Mirrored(jnp.zeros(()))))
    assert isinstance(ones, PerReplica)
    assert float(shared.value) == 0


def test_nan_loss_is_nan_and_nothing_else(strategy):
    """A batch without rows trains nothing. A row that overflows makes the loss NaN; the other variables stay finite."""
    with strategy.scope():
        v, steps = keras.Variable(1.0), keras.Variable(0, dtype="int32", aggregation="sum", trainable=False)
        batches = keras.Variable(3.0, aggregation="mean", trainable=False)
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        steps.assign_add(1)
        batches.assign_add(1)
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(v * x)
        optimizer.apply(tape.gradient(loss, [v]), [v])
        return loss

    rows = [np.zeros((0,), "float32"), np.float32([1, np.nan, 3, 4])]
    none, batch = strategy.experimental_distribute_dataset(rows)
    assert float(strategy.reduce("SUM", strategy.run(step, args=(none,)), axis=None)) == 0
    assert (v.numpy(), batches.numpy()) == (1, 3)
    loss = strategy.run(step, args=(batch,))
    assert [bool(np.isnan(x)) for x in loss.values] == [True, False]
    assert np.isnan(strategy.reduce("SUM", loss, axis=None))
    assert np.isnan(v.numpy())
    assert steps.numpy() == 2  # Replicas without rows add nothing.


def gradient_step(strategy, optimizer, gradients, **options):
    """Applies one gradient per replica to a variable that holds 0; returns what it holds then."""
    with strategy.scope():
        v = keras.Variable(np.zeros(2, "float32"))
    grads = per_replica(strategy, *(np.float32(g) for g in gradients))
    strategy.run(lambda g: optimizer.apply_gradients([(g, v)], **options), args=(grads,))
    return v.numpy()


@pytest.mark.parametrize(
    ("given", "gradients", "options", "expected"),
    [
        pytest.param({}, ([1, 2], [3, 4]), {}, [-4, -6], id="sum"),
        # The sum [3, 4] has the norm 5; clipped alone the gradients would be shorter.
        pytest.param({"global_clipnorm": 1.0}, ([3, 0], [0, 4]), {}, [-0.6, -0.8], id="clipped after the sum"),
        pytest.param({}, ([1, 2], [1, 2]), {"skip_gradients_aggregation": True}, [-1, -2], id="aggregated before"),
        pytest.param({}, ([1, 2], [1, 2]), {"experimental_aggregate_gradients": False}, [-1, -2], id="older name"),
    ],
)
def test_gradients_are_summed(strategy, given, gradients, options, expected):
    """Over the replicas, before the optimizer sees them."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0, **given)
    np.testing.assert_allclose(gradient_step(strategy, optimizer, gradients, **options), expected, rtol=1e-6)


@pytest.mark.parametrize(("bad", "expected"), [(None, [-3.0, -3.0]), (1, [0, 0])])
def test_loss_scale_optimizer(strategy, bad, expected):
    """An overflow on one replica skips the step on all and halves the scale."""
    with strategy.scope():
        inner = keras.optimizers.SGD(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    grads = np.float32([[4, 4], [8, 8]])
    if bad is not None:
        grads[bad, 0] = np.inf
    assert gradient_step(strategy, optimizer, grads).tolist() == expected
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

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(model(x)[:, 0])
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    (batch,) = strategy.experimental_distribute_dataset([np.ones((4, 1), "float32")])
    kernels = [layer.kernel for layer in model.layers]
    for trainable in (True, False, True):
        model.layers[0].trainable = trainable
        before = [kernel.numpy() for kernel in kernels]
        strategy.run(step, args=(batch,))
        assert [not np.array_equal(b, k.numpy()) for b, k in zip(before, kernels, strict=True)] == [trainable, True]


def test_metrics_count_rows_of_all_replicas(strategy):
    """Each replica counts its own rows; the result is over all; reset between steps starts at zero."""
    with strategy.scope():
        metric = keras.metrics.Mean()
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 3, 6])])
    update = lambda x: metric.update_state(x)  # noqa: E731
    for _ in range(2):
        strategy.run(update, args=(batch,))
    assert float(metric.result()) == 3
    assert sum(float(c) for c in strategy.experimental_local_results(metric.total)) == 24
    metric.reset_state()
    strategy.run(update, args=(batch,))
    assert (float(metric.result()), float(metric.count.numpy())) == (3, 4)


@pytest.mark.parametrize("shape", [(3, 1), (3,)])
def test_metric_of_a_short_batch(strategy, shape):
    """Padded rows count for nothing, step after step, beside weights of one's own too."""
    with strategy.scope():
        metric, mean = keras.metrics.MeanSquaredError(), keras.metrics.Mean()
    x = np.float32([1, 2, 6]).reshape(shape)
    (batch,) = strategy.experimental_distribute_dataset([(x, np.zeros_like(x))])
    update = lambda y, p: (metric.update_state(y, p), mean.update_state(y, sample_weight=y))  # noqa: E731
    for _ in range(2):
        strategy.run(update, args=batch)
        np.testing.assert_allclose([float(metric.result()), float(mean.result())], [41 / 3, 41 / 9], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras's own cast of indices
def test_integer_metric_of_a_short_batch(strategy):
    """The mask is a weight in the dtype of the metric."""
    with strategy.scope():
        metric = keras.metrics.MeanIoU(2, dtype="int32")
    (batch,) = strategy.experimental_distribute_dataset([(np.int32([0, 1, 1]), np.int32([0, 1, 0]))])
    strategy.run(lambda y, p: metric.update_state(y, p), args=batch)
    assert metric.total_cm.numpy().tolist() == [[1, 0], [1, 1]]


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


def test_eager_prints_every_replica(strategy, capsys):
    """The Python code runs at each call, and `print` shows values, not tracers."""

    def replica_fn(x):
        jax.debug.print("seen {}", x + replica_id())
        print(x * 1.0)

    for step in range(2):
        strategy.run(replica_fn, args=(step + 10.5,), options=RunOptions(eager=True))
    jax.effects_barrier()
    printed = capsys.readouterr().out.split()
    assert [printed.count(word) for word in ("seen", "10.5", "11.5", "12.5")] == [4, 1 + 2, 2 + 2, 1]


def test_eager_equals_compiled(strategy):
    """With variables of every kind, and with a tape."""
    results = []
    for options in (None, RunOptions(eager=True)):
        with strategy.scope():
            v, total = keras.Variable(2.0), keras.Variable(1.0, synchronization="on_read", aggregation="sum")
            optimizer = keras.optimizers.SGD(0.1)

        def step(x):
            total.assign_add(replica_id())
            with phalanx.GradientTape() as t:
                loss = (v * x + replica_id()) ** 2
            optimizer.apply(t.gradient(loss, [v]), [v])
            return loss

        out = [strategy.run(step, args=(3.0,), options=options) for _ in range(2)]
        results.append([float(x) for o in out for x in o.values] + [float(v.numpy()), float(total.numpy())])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_optax_and_flax(strategy):
    """State that is taken and returned, replicated once, with gradients summed by hand."""
    model, tx = flax.linen.Dense(1), optax.adam(0.1)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    params = model.init(jax.random.key(0), x)
    expected = params, tx.init(params)
    state = strategy.replicate(expected)

    def step(state, x, aggregate=lambda grads: grads):
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x)[:, 0] - x.sum(1)) ** 2))(params)
        updates, opt = tx.update(aggregate(grads), opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    def replica_fn(state, x):
        state, loss = step(state, x, lambda grads: phalanx.get_replica_context().all_reduce("MEAN", grads))
        return Mirrored(state), loss

    (batch,) = strategy.experimental_distribute_dataset([x])
    for _ in range(5):
        state, loss = strategy.run(replica_fn, args=(state, batch))
        expected, wanted = jax.jit(step)(expected, x)
        np.testing.assert_allclose(float(strategy.reduce("MEAN", loss, axis=None)), wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.value[0], expected[0])


def test_collective_from_a_second_thread():
    """While the main thread trains on the same devices: no deadlock, and both are right."""
    variables = []

    def work():
        strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
        with strategy.scope():
            v = keras.Variable(0.0, aggregation="mean", trainable=False)
        variables.append(v)
        add = lambda: v.assign_add(phalanx.get_replica_context().all_reduce("SUM", 1.0))  # noqa: E731
        number = lambda: jnp.ones(2) * replica_id()  # noqa: E731
        for _ in range(50):
            strategy.run(add)
            strategy.gather(strategy.run(number), axis=0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    work()
    thread.join(timeout=300)
    assert not thread.is_alive(), "the second thread hangs"
    assert [float(v.numpy()) for v in variables] == [200, 200]


def test_two_strategies_side_by_side(strategy):
    """With different numbers of devices, in turns."""
    trained = []
    for each in (strategy, phalanx.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"])):
        with each.scope():
            v = keras.Variable(0.0, aggregation="sum", trainable=False)
        trained.append((each, v, lambda v=v: v.assign_add(1.0)))
    for _ in range(3):
        for each, _, step in trained:
            each.run(step)
    assert [float(v.numpy()) for _, v, _ in trained] == [6, 9]
    assert [len(v.value.devices()) for _, v, _ in trained] == [2, 3]


def test_repr_shows_kind_and_devices(strategy):
    assert repr(strategy) == "MirroredStrategy(['cpu:0', 'cpu:1'])"
    assert repr(phalanx.get_strategy()) == "DefaultStrategy([])"


def test_a_topology_that_is_made_anew():
    """A strategy of one's own may return another object each time; updates are in the step all the same."""

    class Own(phalanx.Strategy):
        @property
        def topology(self):
            return phalanx._src.mesh.topology.Topology.of(["cpu:1"])

    strategy = Own()
    with strategy.scope():
        weight, optimizer = keras.Variable(3.0), keras.optimizers.SGD(0.5)

    def step():
        optimizer.apply([1.0], [weight])
        return weight.value

    assert strategy.updates is Updates.IN_REPLICAS
    assert [float(strategy.run(step)) for _ in range(2)] == [2.5, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: phalanx.MirroredStrategy(["cpu:99"]),
        lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"], communication_options="int8"),
        lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"], replica_weights=[1]),
        lambda: phalanx.ParameterServerStrategy(workers=0),
    ],
    ids=["devices", "options", "weights", "workers"],
)
def test_strategy_that_cannot_be_made_is_not_among_the_living(make):
    """`fit` outside a scope looks at all strategies, also while the error of one's constructor is still known."""
    before = set(living_strategies())
    with pytest.raises(phalanx.errors.PhalanxError) as error:
        make()
    assert set(living_strategies()) <= before, error
