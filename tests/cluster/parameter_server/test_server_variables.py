"""Variables on two parameter servers: reads, writes, where they are, and what steps do to them."""

import collections
import gc
import io
import time

import keras
import numpy as np
import pytest
import ray
from rich.console import Console

import phalanx
from phalanx.coordinator import ClusterCoordinator
from phalanx.errors import InvalidArgumentError

X = np.random.RandomState(0).normal(size=(6, 8, 6)).astype("float32")
Y = X.sum(2, keepdims=True)


def partitioner(shape, dtype):
    """Divides what has many rows."""
    return [2 if shape[0] > 4 else 1, *(1 for _ in shape[1:])]


@pytest.fixture(scope="module")
def strategy():
    """One worker and two servers, between which large variables are divided."""
    strategy = phalanx.ParameterServerStrategy(workers=1, ps=2, variable_partitioner=partitioner)
    yield strategy
    strategy.close()


@pytest.fixture(scope="module")
def coordinator(strategy):
    """The strategy's."""
    return ClusterCoordinator(strategy)


def bytes_of(strategy, variables):
    """How much of some variables each server holds."""
    held = [0, 0]
    for variable in variables:
        for part in strategy.homes.placement(variable):
            (array,) = ray.get(strategy.homes.servers.actors[part.server].get.remote([part.key]))
            held[part.server] += array.nbytes
    return held


def parts(strategy, make):
    """What `make` makes in the scope, with the same first values as outside."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return make()


def test_describe_shows_rows_of_each_server(strategy, coordinator):
    """Which server has which rows, what several have, and how much each has."""
    with strategy.scope():
        divided, whole = keras.Variable(np.ones((6, 100), "float32"), name="a"), keras.Variable(2.0, name="b")
    console = Console(file=io.StringIO(), width=200)
    phalanx.describe(strategy, [divided], console=console)
    assert "whole cpu:0" not in console.file.getvalue(), "on cpu:0 alone it is whole everywhere"
    coordinator.join()
    strategy.homes.take_in([divided, whole])
    phalanx.describe(strategy, [divided, whole], console=console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    server = strategy.homes.placement(whole)[0].server
    assert {"worker:0", "ps:0", "ps:1", "2 variables, 2.4 kB", f"b float32[] whole ps:{server}"} <= set(lines)
    assert {"a float32[6, 100] [0:3] ps:0", "[3:6] ps:1"} <= set(lines) or {
        "a float32[6, 100] [0:3] ps:1",
        "[3:6] ps:0",
    } <= set(lines)
    assert f"ps:{1 - server} 1.2 kB" in lines


def make_mlp():
    """A model with a large first kernel."""
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])


def training(model, optimizer):
    """A step as users of tf.distribute write it."""

    def step(x, y):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def by_keras(make, optimizer, batches):
    """What plain Keras makes of the same batches: the model."""
    keras.utils.set_random_seed(3)
    model = make()
    model.compile(optimizer, "mse")
    for x, y in batches:
        model.train_on_batch(x, y)
    return model


def same(ours, theirs):
    """Asserts that weights are equal to rounding."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* is created at each call")  # Each case has a step of its own.
@pytest.mark.parametrize("shape", [(), (3,), (5, 2), (7,)], ids=str)
def test_reads_and_writes_at_the_coordinator(calm, strategy, shape):
    """They are of the value on the servers, whole or divided."""
    first = np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape)
    with strategy.scope():
        variable = keras.Variable(first, trainable=False)
    calm.schedule(lambda: variable.assign_add(keras.ops.ones(shape)))
    calm.join()
    np.testing.assert_array_equal(variable.value, first + 1)
    np.testing.assert_array_equal(variable.numpy(), first + 1)
    variable.assign(first * 3)
    variable.assign_add(first)
    variable.assign_sub(keras.ops.ones(shape))
    np.testing.assert_array_equal(calm.schedule(lambda: variable.value + 1).fetch(), first * 4)
    np.testing.assert_array_equal(variable + 1, first * 4)


def test_steps_see_what_was_assigned(calm, strategy):
    """A plain assign in a step replaces, an increment adds, and both are there afterwards."""
    with strategy.scope():
        a, b = keras.Variable(1.0, trainable=False), keras.Variable(1.0, trainable=False)

    def step(x):
        a.assign(x)
        b.assign_add(a.value)
        b.assign_sub(1.0)
        return b.value

    assert float(calm.schedule(step, args=(5.0,)).fetch()) == 5.0
    b.assign(10.0)
    assert float(calm.schedule(step, args=(7.0,)).fetch()) == 16.0
    assert (float(a.value), float(b.value)) == (7.0, 16.0)


def test_placement_is_balanced_by_bytes(calm, strategy):
    """Small and large variables fill both servers alike."""
    with strategy.scope():
        variables = [keras.Variable(np.zeros((4, n), "float32")) for n in (64, 8, 8, 32, 16, 48, 8, 24)]
    calm.schedule(lambda: sum(v.value.sum() for v in variables))
    calm.join()
    held = bytes_of(strategy, variables)
    assert sum(held) == sum(v.value.nbytes for v in variables)
    assert abs(held[0] - held[1]) <= 4 * 8 * 4


def test_a_divided_variable_is_on_both_servers(calm, strategy):
    """Each holds its rows: of seven, four and three."""
    with strategy.scope():
        variable = keras.Variable(np.arange(70.0, dtype="float32").reshape(7, 10))
    calm.schedule(lambda: variable.value.sum())
    calm.join()
    assert sorted(bytes_of(strategy, [variable])) == [3 * 40, 4 * 40]
    np.testing.assert_array_equal(variable.value, np.arange(70.0).reshape(7, 10))


def test_what_is_not_used_any_more_is_dropped(calm, strategy):
    """The servers forget a variable with the last reference to it."""
    with strategy.scope():
        variables = [keras.Variable(np.zeros((6, 100), "float32"))]
    calm.schedule(lambda: variables[0].value.sum())
    calm.join()
    (part, _) = strategy.homes.placement(variables[0])
    server = strategy.homes.servers.actors[part.server]
    assert ray.get(server.state.remote())[0][part.key].shape == (3, 100)
    variables.clear()
    gc.collect()
    deadline = time.monotonic() + 30
    while part.key in ray.get(server.state.remote())[0]:
        assert time.monotonic() < deadline


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.1),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3),
}


COVER = {"momentum", "adam", "adamw", "schedule", "clipnorm", "global_clipnorm", "ema", "accumulation"}


@pytest.mark.cover(["name"], COVER)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_divided_variables_train_alike(calm, strategy, name):
    """Values and slots over two servers give the weights of plain Keras."""
    model, optimizer = parts(strategy, lambda: (make_mlp(), OPTIMIZERS[name]()))
    step = training(model, optimizer)
    for x, y in zip(X, Y, strict=True):
        calm.schedule(step, args=(x, y))
    calm.join()
    plain = by_keras(make_mlp, OPTIMIZERS[name](), zip(X, Y, strict=True))
    same(model.get_weights(), plain.get_weights())
    same([np.asarray(v) for v in optimizer.variables], [np.asarray(v) for v in plain.optimizer.variables])
    assert int(np.asarray(optimizer.iterations)) == int(np.asarray(plain.optimizer.iterations))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "finite"),
        (lambda: keras.optimizers.Lamb(0.1), "depends on all rows of the variable"),
        (lambda: keras.optimizers.Adafactor(0.1), "depends on all rows of the variable"),
        (lambda: keras.optimizers.Muon(0.1), "depends on all rows of the variable"),
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1, gradient_accumulation_steps=2), "clip"),
    ],
    ids=["loss_scale", "lamb", "adafactor", "muon", "clipped accumulation"],
)
def test_optimizers_that_must_see_all(calm, strategy, make, why):
    """Where the parts of an update depend on each other, two servers cannot do it: an error says so."""
    model, optimizer = parts(strategy, lambda: (make_mlp(), make()))
    with pytest.raises(InvalidArgumentError, match=rf"(?s){why}.*HINT: "):
        calm.schedule(training(model, optimizer), args=(X[0], Y[0]))
    assert calm.done()


def test_learning_rate_is_assigned(calm, strategy):
    """The next update on both servers has it."""
    model, optimizer = parts(strategy, lambda: (make_mlp(), keras.optimizers.SGD(0.1)))
    step = training(model, optimizer)
    calm.schedule(step, args=(X[0], Y[0]))
    calm.join()
    before = model.get_weights()
    optimizer.learning_rate = 0.0
    calm.schedule(step, args=(X[0], Y[0]))
    calm.join()
    same(model.get_weights(), before)
    optimizer.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.0, 0.5])
    for _ in range(2):
        calm.schedule(step, args=(X[0], Y[0]))
    calm.join()
    assert not np.allclose(model.get_weights()[0], before[0])


def test_frozen_layers_keep_their_weights(calm, strategy):
    """They stay as they are, also those that are frozen after a step was traced."""

    def make():
        model = make_mlp()
        model.layers[0].trainable = False
        return model

    model, optimizer = parts(strategy, lambda: (make(), keras.optimizers.Adam(0.1)))
    first = model.get_weights()
    step = training(model, optimizer)
    calm.schedule(step, args=(X[0], Y[0]))
    calm.join()
    same(model.get_weights(), by_keras(make, keras.optimizers.Adam(0.1), [(X[0], Y[0])]).get_weights())
    same(model.layers[0].get_weights(), first[:2])
    model.layers[1].kernel.trainable = False
    kernel, bias = model.layers[1].get_weights()
    calm.schedule(step, args=(X[0], Y[0]))
    calm.join()
    np.testing.assert_array_equal(model.layers[1].get_weights()[0], kernel)
    assert not np.array_equal(model.layers[1].get_weights()[1], bias)


def test_batch_normalization_and_metrics(calm, strategy):
    """Moving statistics and metrics are those of plain Keras, one step after the other."""

    def make():
        return keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

    model, optimizer, metric = parts(strategy, lambda: (make(), keras.optimizers.SGD(0.1), keras.metrics.Mean()))
    train = training(model, optimizer)

    def step(x, y):
        loss = train(x, y)
        metric.update_state(loss)
        return loss

    losses = calm.fetch([calm.schedule(step, args=batch) for batch in zip(X, Y, strict=True)])
    plain = by_keras(make, keras.optimizers.SGD(0.1), zip(X, Y, strict=True))
    same(model.get_weights(), plain.get_weights())
    np.testing.assert_allclose(metric.result(), np.mean(losses), rtol=1e-6)
    metric.reset_state()
    calm.schedule(step, args=(X[0], Y[0]))
    calm.join()
    assert float(metric.count.value) == 1.0


def test_no_two_steps_share_a_seed(calm, strategy):
    """What is drawn in one step is drawn in no other."""
    with strategy.scope():
        generator = keras.random.SeedGenerator(7)

    def step():
        return keras.random.uniform((), seed=generator), keras.random.uniform((), seed=generator)

    drawn = collections.Counter()
    for pair in calm.fetch([calm.schedule(step) for _ in range(200)]):
        drawn.update(map(float, pair))
    assert max(drawn.values()) == 1


def test_models_that_are_made_in_the_step_of_another(calm, strategy):
    """A second model on the same servers keeps its own weights, and one optimizer may train in two steps."""
    model, optimizer = parts(strategy, lambda: (make_mlp(), keras.optimizers.Adam(0.1)))
    train = training(model, optimizer)

    def other(x, y):
        return 2 * train(x, y)

    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        calm.schedule(other if i % 2 else train, args=(x, y))
    calm.join()
    plain = by_keras(make_mlp, keras.optimizers.Adam(0.1), zip(X, Y, strict=True))
    same(model.get_weights(), plain.get_weights())


def test_weights_are_saved_and_loaded_through_servers(calm, strategy, tmp_path):
    """`save_weights` and `load_weights` at the coordinator go through the servers."""
    model = parts(strategy, make_mlp)
    forward = lambda x: model(x)  # noqa: E731
    before = calm.schedule(forward, args=(X[0],)).fetch()
    model.save_weights(tmp_path / "model.weights.h5")
    for variable in model.variables:
        variable.assign(variable * 0)
    assert not calm.schedule(forward, args=(X[0],)).fetch().any()
    model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(calm.schedule(forward, args=(X[0],)).fetch(), before)
