"""Bounded staleness, synchronous training, and how steps of many workers count."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.coordinator import ClusterCoordinator
from phalanx.servers import client

STEPS, WORKERS, ROWS = 20, 2, 4
X = np.random.RandomState(0).normal(size=(STEPS, WORKERS * ROWS, 6)).astype("float32")
Y = X.sum(2, keepdims=True)


@pytest.fixture(scope="module")
def strategy_of():
    """A function that starts a strategy; all are on the Ray of the first one."""
    strategies = {}

    def strategy(**options):
        key = tuple(options.items())
        if key not in strategies:
            strategies[key] = phalanx.ParameterServerStrategy(**options)
        return strategies[key]

    # Ray changes the environment when it starts, which tests must not.
    strategy(workers=WORKERS, ps=1, max_staleness=0)
    yield strategy
    for one in reversed(strategies.values()):
        one.close()


def make(units=5):
    """A model."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(units), keras.layers.Dense(1)]
    return keras.Sequential([keras.layers.Input((6,)), *layers])


def by_keras(optimizer, batches, units=5):
    """What plain Keras makes of some batches: the weights."""
    model = make(units)
    model.compile(optimizer, "mse")
    for x, y in batches:
        model.train_on_batch(x, y)
    return model.get_weights()


def training(model, optimizer, counter):
    """A step that trains on its rows."""

    def step(x, y):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        counter.assign_add(1)
        return loss

    return step


def parts(strategy, optimizer, units=5):
    """A model, its step, and the number of steps."""
    with strategy.scope():
        model, counter = make(units), keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
    return model, training(model, optimizer, counter), counter


@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize(
    "optimizer",
    [lambda: keras.optimizers.SGD(0.01, momentum=0.9), lambda: keras.optimizers.Adam(0.01)],
    ids=["momentum", "adam"],
)
def test_synchronous_training_is_that_of_one_device(strategy_of, ps, optimizer):
    """With a staleness of 0, two workers with half of each batch make the updates of one device with the whole."""
    strategy = strategy_of(workers=WORKERS, ps=ps, max_staleness=0)
    coordinator = ClusterCoordinator(strategy)
    ours = optimizer()
    model, step, counter = parts(strategy, ours)
    for x, y in zip(X, Y, strict=True):
        for part in range(WORKERS):
            rows = slice(part * ROWS, (part + 1) * ROWS)
            coordinator.schedule(step, args=(x[rows], y[rows]))
    coordinator.join()
    assert int(counter.value) == WORKERS * STEPS
    assert int(ours.iterations.value) == STEPS
    for a, b in zip(model.get_weights(), by_keras(optimizer(), zip(X, Y, strict=True)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("far", [(), (1,), (0,), (0, 1)])
def test_servers_on_other_machines(strategy_of, monkeypatch, far):
    """Where a worker and a server have no memory in common, large arrays go by Ray, and the updates are the same."""

    class Server(client.ParameterServer):
        def near(self, pusher, greeting):
            return self._index not in far and super().near(pusher, greeting)

    strategy_of(workers=WORKERS, ps=1, max_staleness=0)
    monkeypatch.setattr(client, "ParameterServer", Server)
    halves = phalanx.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = phalanx.ParameterServerStrategy(None, halves, workers=WORKERS, ps=2, max_staleness=0)
    coordinator = ClusterCoordinator(strategy)
    optimizer = keras.optimizers.Adam(0.01)
    model, step, counter = parts(strategy, optimizer, units=200)
    for x, y in zip(X, Y, strict=True):
        for rows in (slice(0, ROWS), slice(ROWS, None)):
            coordinator.schedule(step, args=(x[rows], y[rows]))
    coordinator.join()
    assert int(counter.value) == WORKERS * STEPS
    expected = by_keras(keras.optimizers.Adam(0.01), zip(X, Y, strict=True), units=200)
    for a, b in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    strategy.close()


def test_no_tables_in_rounds(strategy_of):
    """Updates of a table have the rows of one worker's step."""
    strategy = strategy_of(workers=1, ps=1, max_staleness=0)
    with strategy.scope():
        layers = [keras.Input((2,), dtype="int32"), phalanx.keras.ShardedEmbedding(5, 3), keras.layers.Flatten()]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    with pytest.raises(
        phalanx.errors.TraceError, match=r"(?s)ShardedEmbedding under max_staleness=0.*HINT: max_staleness=None"
    ):
        model.fit(np.zeros((8, 2), "int32"), np.zeros((8, 6), "float32"), batch_size=4, verbose=0)


@pytest.mark.parametrize("wait", ["join", "fetch", "done"])
def test_a_last_round_of_fewer_steps(strategy_of, wait):
    """Who has nothing to do is not waited for, as soon as the coordinator waits; afterwards rounds are whole again."""
    strategy = strategy_of(workers=WORKERS, ps=1, max_staleness=0)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False)

    def step():
        counter.assign_add(1)
        return counter.value

    for number in (3, 4):
        before = coordinator.status().updates
        values = [coordinator.schedule(step) for _ in range(number)]
        if wait == "join":
            coordinator.join()
        elif wait == "fetch":
            coordinator.fetch(values)
        else:
            while not coordinator.done():
                pass
        coordinator.join()
        assert coordinator.status().updates - before == 2
    assert int(counter.value) == 7


def test_a_step_that_fails_is_not_waited_for(strategy_of):
    """The others of its round are done, the error is raised, and the next round is whole."""
    strategy = strategy_of(workers=WORKERS, ps=1, max_staleness=0)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([np.ones(()), np.ones(())])))

    def step(iterator):
        counter.assign_add(keras.ops.cast(next(iterator), "int32"))

    for _ in range(5):
        coordinator.schedule(step, args=(iterator,))
    with pytest.raises(IndexError, match="no further batch"):
        coordinator.join()
    done = int(counter.value)
    assert 2 <= done <= 4
    increment = lambda: counter.assign_add(1)  # noqa: E731
    for _ in range(4):
        coordinator.schedule(increment)
    coordinator.join()
    assert int(counter.value) == done + 4


@pytest.mark.cover(["bound"], {3})
@pytest.mark.parametrize("bound", [1, 3])
def test_staleness_stays_within_the_bound(strategy_of, bound):
    """No update is staler, all steps are done, and the counter is exact."""
    strategy = strategy_of(workers=3, ps=1, max_staleness=bound)
    coordinator = ClusterCoordinator(strategy)
    model, step, counter = parts(strategy, keras.optimizers.SGD(0.01))
    for i in range(200):
        coordinator.schedule(step, args=(X[i % STEPS], Y[i % STEPS]))
    coordinator.join()
    staleness = coordinator.status().staleness
    assert max(staleness) <= bound
    assert sum(staleness.values()) == 200
    assert int(counter.value) == 200


def test_the_counter_of_four_workers_is_exact(strategy_of):
    """Increments travel as increments: none is lost, and each applied update counts one iteration."""
    strategy = strategy_of(workers=4, ps=1)
    coordinator = ClusterCoordinator(strategy)
    optimizer = keras.optimizers.SGD(0.01)
    model, step, counter = parts(strategy, optimizer)
    for i in range(400):
        coordinator.schedule(step, args=(X[i % STEPS], Y[i % STEPS]))
    coordinator.join()
    status = coordinator.status()
    assert int(counter.value) == int(optimizer.iterations.value) == 400
    assert sum(status.staleness.values()) == status.updates == 400


def test_asynchronous_training_learns(strategy_of):
    """The loss of four workers falls. The bound leaves room for a busy machine, where it fell to 0.27 of what it was."""
    strategy = strategy_of(workers=4, ps=1)
    coordinator = ClusterCoordinator(strategy)
    model, step, _ = parts(strategy, keras.optimizers.Adam(0.02))
    losses = [coordinator.schedule(step, args=(X[i % STEPS], Y[i % STEPS])) for i in range(600)]
    losses = coordinator.fetch(losses)
    assert np.mean(losses[-50:]) < 0.4 * np.mean(losses[:50])


OF_ONE_SERVER = {
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "clipped accumulation": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=4.0),
}


@pytest.mark.parametrize("name", OF_ONE_SERVER)
def test_optimizers_that_must_see_all(strategy_of, name):
    """With one server they make the updates of plain Keras, whichever worker does the next step."""
    coordinator = ClusterCoordinator(strategy := strategy_of(workers=4, ps=1))
    with strategy.scope():
        model, optimizer = make(), OF_ONE_SERVER[name]()

    def step(x, y):
        with phalanx.GradientTape() as tape:
            loss = optimizer.scale_loss(keras.ops.mean(keras.ops.square(model(x, training=True) - y)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    batches = list(zip(X[:6], Y[:6], strict=True))
    for batch in batches:
        coordinator.schedule(step, args=batch).fetch()
    for a, b in zip(model.get_weights(), by_keras(OF_ONE_SERVER[name](), batches), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"max_staleness": -1}, {"max_staleness": 0.5}, {"workers": 0}, {"ps": "2"}], ids=str)
def test_options_that_are_wrong(wrong):
    """They are refused before anything is started."""
    (name,) = wrong
    with pytest.raises(phalanx.errors.InvalidArgumentError, match=rf"(?s){name}=.*must be.*HINT: {name}="):
        phalanx.ParameterServerStrategy(**wrong)
