"""Variables on two parameter servers: reads, writes, where they are, and what steps do to them."""

import gc
import io

import keras
import numpy as np
import optax
import pytest
import ray
from processes import DIVIDED, wait_until
from rich.console import Console
from server_training import BATCHES, assert_same, by_keras, do, mlp, parts, training

import phalanx
from phalanx.errors import InvalidArgumentError
from phalanx.experimental import ShardedVariable


@pytest.fixture
def strategy(strategy_of):
    return strategy_of(**DIVIDED)


def bytes_of(strategy, variables):
    """How much of some variables each server holds."""
    held = [0, 0]
    for variable in variables:
        for part in strategy.homes.placement(variable):
            (array,) = ray.get(strategy.homes.servers.actors[part.server].get.remote([part.key]))
            held[part.server] += array.nbytes
    return held


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
    assert any({f"a float32[6, 100] [0:3] ps:{i}", f"[3:6] ps:{1 - i}"} <= set(lines) for i in (0, 1))
    assert f"ps:{1 - server} 1.2 kB" in lines


@pytest.mark.filterwarnings("ignore:.* is created at each call")  # Each case has a step of its own.
@pytest.mark.parametrize("shape", [(), (3,), (5, 2), (7,)], ids=str)
def test_reads_and_writes_at_the_coordinator(coordinator, strategy, shape):
    """They are of the value on the servers, whole or divided."""
    first = np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape)
    with strategy.scope():
        variable = keras.Variable(first, trainable=False)
    do(coordinator, lambda: variable.assign_add(keras.ops.ones(shape)), ())
    np.testing.assert_array_equal(variable.value, first + 1)
    np.testing.assert_array_equal(variable.numpy(), first + 1)
    variable.assign(first * 3)
    variable.assign_add(first)
    variable.assign_sub(keras.ops.ones(shape))
    np.testing.assert_array_equal(coordinator.schedule(lambda: variable.value + 1).fetch(), first * 4)
    np.testing.assert_array_equal(variable + 1, first * 4)


def test_steps_see_what_was_assigned(coordinator, strategy):
    """A plain assign in a step replaces, an increment adds, and both are there afterwards."""
    with strategy.scope():
        a, b = keras.Variable(1.0, trainable=False), keras.Variable(1.0, trainable=False)

    def step(x):
        a.assign(x)
        b.assign_add(a.value)
        b.assign_sub(1.0)
        return b.value

    assert float(coordinator.schedule(step, args=(5.0,)).fetch()) == 5.0
    b.assign(10.0)
    assert float(coordinator.schedule(step, args=(7.0,)).fetch()) == 16.0
    assert (float(a.value), float(b.value)) == (7.0, 16.0)


def test_placement_is_balanced_by_bytes(coordinator, strategy):
    """Small and large variables fill both servers alike, and each server holds its rows of a divided one: of seven, four and three."""
    with strategy.scope():
        # Beside them, what other tests have left is small.
        variables = [keras.Variable(np.zeros((4, 1000 * n), "float32")) for n in (64, 8, 8, 32, 16, 48, 8, 24)]
        divided = keras.Variable(np.arange(70.0, dtype="float32").reshape(7, 10))
    do(coordinator, lambda: sum(v.value.sum() for v in [*variables, divided]), ())
    held = bytes_of(strategy, variables)
    assert sum(held) == sum(v.value.nbytes for v in variables)
    assert abs(held[0] - held[1]) <= 4 * 8 * 4 * 1000
    assert sorted(bytes_of(strategy, [divided])) == [3 * 40, 4 * 40]
    np.testing.assert_array_equal(divided.value, np.arange(70.0).reshape(7, 10))


def test_what_is_not_used_any_more_is_dropped(coordinator, strategy):
    """The servers forget a variable with the last reference to it."""
    with strategy.scope():
        variables = [keras.Variable(np.zeros((6, 100), "float32"))]
    do(coordinator, lambda: variables[0].value.sum(), ())
    (part, _) = strategy.homes.placement(variables[0])
    server = strategy.homes.servers.actors[part.server]
    assert ray.get(server.state.remote())[0][part.key].shape == (3, 100)
    variables.clear()
    gc.collect()
    wait_until(lambda: part.key not in ray.get(server.state.remote())[0])


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
COVER = {"momentum", "global_clipnorm", "ema", "accumulation"}


@pytest.mark.cover(["name"], COVER)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_divided_variables_train_alike(coordinator, strategy, name):
    """Values and slots over two servers give the weights of plain Keras."""
    model, optimizer = parts(strategy, lambda: (mlp(), OPTIMIZERS[name]()))
    step = training(model, optimizer)
    do(coordinator, step, *BATCHES[:6])
    plain = by_keras(mlp, OPTIMIZERS[name](), BATCHES[:6])
    assert_same(model.get_weights(), plain.get_weights())
    assert_same([np.asarray(v) for v in optimizer.variables], [np.asarray(v) for v in plain.optimizer.variables])
    assert int(np.asarray(optimizer.iterations)) == int(np.asarray(plain.optimizer.iterations))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda of: of.LossScaleOptimizer(of.Adam(0.1)), "finite"),
        (lambda of: of.Lamb(0.1), "depends on all rows of the variable"),
        (lambda of: of.Adafactor(0.1), "depends on all rows of the variable"),
        (lambda of: of.Muon(0.1), "depends on all rows of the variable"),
        (lambda of: of.SGD(0.1, global_clipnorm=0.1, gradient_accumulation_steps=2), "clip"),
        (lambda of: phalanx.keras.OptaxOptimizer(optax.adam(0.1)), "the update of one may depend on all others"),
    ],
    ids=["loss_scale", "lamb", "adafactor", "muon", "clipped accumulation", "optax"],
)
def test_optimizers_that_must_see_all(coordinator, strategy, make, why):
    """Where the parts of an update depend on each other, two servers cannot do it: an error says so."""
    model, optimizer = parts(strategy, lambda: (mlp(), make(keras.optimizers)))
    with pytest.raises(InvalidArgumentError, match=rf"(?s){why}.*HINT: "):
        coordinator.schedule(training(model, optimizer), args=BATCHES[0])
    assert coordinator.done()


def test_learning_rate_is_assigned(coordinator, strategy):
    """The next update on both servers has it."""
    model, optimizer = parts(strategy, lambda: (mlp(), keras.optimizers.SGD(0.1)))
    step = training(model, optimizer)
    do(coordinator, step, BATCHES[0])
    before = model.get_weights()
    optimizer.learning_rate = 0.0
    do(coordinator, step, BATCHES[0])
    assert_same(model.get_weights(), before)
    optimizer.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.0, 0.5])
    for _ in range(2):
        do(coordinator, step, BATCHES[0])
    assert not np.allclose(model.get_weights()[0], before[0])


def test_frozen_layers_keep_their_weights(coordinator, strategy):
    """They stay as they are, also those that are frozen after a step was traced."""

    def make():
        model = mlp()
        model.layers[0].trainable = False
        return model

    model, optimizer = parts(strategy, lambda: (make(), keras.optimizers.Adam(0.1)))
    first = model.get_weights()
    step = training(model, optimizer)
    do(coordinator, step, BATCHES[0])
    assert_same(model.get_weights(), by_keras(make, keras.optimizers.Adam(0.1), BATCHES[:1]).get_weights())
    assert_same(model.layers[0].get_weights(), first[:2])
    model.layers[1].kernel.trainable = False
    kernel, bias = model.layers[1].get_weights()
    do(coordinator, step, BATCHES[0])
    np.testing.assert_array_equal(model.layers[1].get_weights()[0], kernel)
    assert not np.array_equal(model.layers[1].get_weights()[1], bias)


def test_batch_normalization_and_metrics(coordinator, strategy):
    """Moving statistics and metrics are those of plain Keras, one step after the other."""

    def make():
        return keras.Sequential([keras.layers.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

    model, optimizer, metric = parts(strategy, lambda: (make(), keras.optimizers.SGD(0.1), keras.metrics.Mean()))
    train = training(model, optimizer)

    def step(x, y):
        loss = train(x, y)
        metric.update_state(loss)
        return loss

    losses = coordinator.fetch([coordinator.schedule(step, args=batch) for batch in BATCHES[:6]])
    plain = by_keras(make, keras.optimizers.SGD(0.1), BATCHES[:6])
    assert_same(model.get_weights(), plain.get_weights())
    np.testing.assert_allclose(metric.result(), np.mean(losses), rtol=1e-6)
    metric.reset_state()
    do(coordinator, step, BATCHES[0])
    assert float(metric.count.value) == 1.0


def test_no_two_steps_share_a_seed(coordinator, strategy):
    """What is drawn in one step is drawn in no other, with a generator and without a seed."""
    generator = parts(strategy, lambda: keras.random.SeedGenerator(7))

    def step():
        return *(keras.random.uniform((), seed=generator) for _ in range(2)), keras.random.uniform(())

    drawn = [float(x) for each in coordinator.fetch([coordinator.schedule(step) for _ in range(200)]) for x in each]
    assert len(set(drawn)) == 600


def test_models_that_are_made_in_the_step_of_another(coordinator, strategy):
    """A second model on the same servers keeps its own weights, and one optimizer may train in two steps."""
    model, optimizer = parts(strategy, lambda: (mlp(), keras.optimizers.Adam(0.1)))
    train = training(model, optimizer)

    def other(x, y):
        return 2 * train(x, y)

    for i, batch in enumerate(BATCHES[:6]):
        coordinator.schedule(other if i % 2 else train, args=batch)
    coordinator.join()
    plain = by_keras(mlp, keras.optimizers.Adam(0.1), BATCHES[:6])
    assert_same(model.get_weights(), plain.get_weights())


def test_shards_follow_each_other(strategy):
    """Thirteen rows on two servers are seven and six; the whole is what the variable is. A small variable is one shard."""
    rows = np.arange(26, dtype=np.float32).reshape(13, 2)
    with strategy.scope():
        v, small = keras.Variable(rows, name="table"), keras.Variable([1.0, 2.0])
    shards = ShardedVariable(v, strategy)
    assert (shards.shape, shards.dtype, shards.name, len(shards)) == ((13, 2), "float32", "table", 2)
    assert sorted((s.start, s.stop, s.shape) for s in shards) == [(0, 7, (7, 2)), (7, 13, (6, 2))]
    assert {s.server for s in shards} == {0, 1}
    for shard in shards:
        np.testing.assert_array_equal(shard.numpy(), rows[shard.start : shard.stop])
    np.testing.assert_array_equal(shards.numpy(), rows)
    assert "rows 0 to 6 on server" in repr(shards)
    assert [(shard.start, shard.stop) for shard in ShardedVariable(small, strategy)] == [(0, 2)]


def test_a_shard_is_assigned(strategy, coordinator):
    """It is seen in the variable, and in a step."""
    with strategy.scope():
        v = keras.Variable(np.zeros((10, 4), np.float32))
    first, second = ShardedVariable(v, strategy)
    second.assign(np.ones((5, 4)))
    np.testing.assert_array_equal(np.asarray(v.value), [[0] * 4] * 5 + [[1] * 4] * 5)
    assert coordinator.schedule(lambda: keras.ops.sum(v.value)).fetch() == 20
    with pytest.raises(InvalidArgumentError, match=r"rows 0 to 4 of .*: the shard has the shape \(5, 4\).\nHINT"):
        first.assign(np.ones((4, 4)))


@pytest.mark.parametrize("value", [3.0, [1.0]])
def test_other_variables_are_refused(value):
    """Those of no parameter server."""
    with pytest.raises(InvalidArgumentError, match="must be a variable on parameter servers"):
        ShardedVariable(keras.Variable(value))
