"""Bounded staleness, synchronous training, and how steps of many workers count."""

import contextlib
from collections import Counter
from functools import partial

import keras
import numpy as np
import optax
import pytest
from processes import wait_until
from server_training import BATCHES, assert_same, by_keras, do, mlp, new_counter, parts, training

import phalanx
from phalanx._src.parameter_server.variables import client
from phalanx.coordinator import ClusterCoordinator

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


@pytest.fixture
def synchronous(strategy_of):
    """Two workers, whose steps are one update."""
    return strategy_of(max_staleness=0)


def train_in_rounds(strategy, name, *units, workers=2):
    """Workers with an equal part of each batch make the updates of one device with the whole. Returns weights of both."""
    coordinator = ClusterCoordinator(strategy)
    make = partial(mlp, *units)
    model, optimizer, counter = parts(strategy, lambda: (make(), OPTIMIZERS[name](), new_counter()))
    step = training(model, optimizer, counter)
    shares = [[np.split(rows, workers) for rows in batch] for batch in BATCHES]
    do(coordinator, step, *((xs[i], ys[i]) for xs, ys in shares for i in range(workers)))
    assert int(counter.value) == workers * len(BATCHES)
    assert int(optimizer.iterations.value) == len(BATCHES)
    return model.get_weights(), by_keras(make, OPTIMIZERS[name](), BATCHES).get_weights()


# test_servers_on_other_machines has momentum.
@pytest.mark.cover(["name"], {"adam"})
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_synchronous_training_is_that_of_one_device(synchronous, name):
    """With a staleness of 0."""
    assert_same(*train_in_rounds(synchronous, name, 5, 5))


@pytest.mark.cover(["workers"], {1})
@pytest.mark.parametrize(
    ("far", "name", "workers"),
    [((), "adam", 2), ((1,), "momentum", 1), ((1,), "momentum", 2), ((0,), "adam", 2), ((0, 1), "adam", 2)],
    ids=str,
)
def test_servers_on_other_machines(shared_strategies, monkeypatch, far, name, workers):
    """Where a worker and a server have no memory in common, large arrays go by Ray, and the updates are the same."""

    class Server(client.ParameterServer):
        def near(self, pusher, greeting):
            return self._index not in far and super().near(pusher, greeting)

    monkeypatch.setattr(client, "ParameterServer", Server)
    halves = phalanx.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = phalanx.ParameterServerStrategy(None, halves, workers=workers, ps=2, max_staleness=0)
    with contextlib.closing(strategy):
        assert_same(*train_in_rounds(strategy, name, 200, 200, workers=workers), rtol=1e-4, atol=1e-5)


def test_no_tables_in_rounds(synchronous):
    """Updates of a table have the rows of one worker's step."""
    with synchronous.scope():
        layers = [keras.Input((2,), dtype="int32"), phalanx.keras.ShardedEmbedding(5, 3), keras.layers.Flatten()]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    with pytest.raises(
        phalanx.errors.TraceError, match=r"(?s)ShardedEmbedding under max_staleness=0.*HINT: max_staleness=None"
    ):
        model.fit(np.zeros((8, 2), "int32"), np.zeros((8, 6), "float32"), batch_size=4, verbose=0)


@pytest.mark.parametrize("wait", ["join", "fetch", "done"])
def test_a_last_round_of_fewer_steps(synchronous, wait):
    """Who has nothing to do is not waited for, as soon as the coordinator waits; afterwards rounds are whole again."""
    coordinator = ClusterCoordinator(synchronous)
    counter = parts(synchronous, new_counter)

    def step():
        counter.assign_add(1)
        return counter.value

    for number in (3, 4):
        before = coordinator.status().updates
        values = [coordinator.schedule(step) for _ in range(number)]
        if wait == "fetch":
            coordinator.fetch(values)
        elif wait == "done":
            wait_until(coordinator.done)
        coordinator.join()
        assert coordinator.status().updates - before == 2
    assert int(counter.value) == 7


def test_a_step_that_fails_is_not_waited_for(synchronous):
    """The others of its round are done, the error is raised, and the next round is whole."""
    coordinator = ClusterCoordinator(synchronous)
    counter = parts(synchronous, new_counter)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([np.ones(()), np.ones(())])))

    def step(iterator):
        counter.assign_add(keras.ops.cast(next(iterator), "int32"))

    with pytest.raises(IndexError, match="no further batch"):
        do(coordinator, step, *[(iterator,)] * 5)
    done = int(counter.value)
    assert 2 <= done <= 4
    increment = lambda: counter.assign_add(1)  # noqa: E731
    do(coordinator, increment, *[()] * 4)
    assert int(counter.value) == done + 4


def train_on_all(strategy, optimizer, steps):
    """Schedules steps, of which none is lost and each counts one iteration. Returns their losses, and how stale they were."""
    coordinator = ClusterCoordinator(strategy)
    before = coordinator.status()
    model, counter = parts(strategy, lambda: (mlp(5, 5), new_counter()))
    step = training(model, optimizer, counter)
    losses = coordinator.fetch([coordinator.schedule(step, args=BATCHES[i % len(BATCHES)]) for i in range(steps)])
    coordinator.join()
    after = coordinator.status()
    staleness = Counter(after.staleness) - Counter(before.staleness)
    assert int(counter.value) == sum(staleness.values()) == steps
    return losses, staleness, after.updates - before.updates


@pytest.mark.exhaustive(
    "tests/unit/parameter_server/remote/test_staleness.py, test_synchronous_training_is_that_of_one_device"
)
@pytest.mark.parametrize(("workers", "bound"), [(2, 1), (3, 1), (3, 3)])
def test_staleness_stays_within_the_bound(strategy_of, workers, bound):
    """No update is staler, all steps are done, and the counter is exact."""
    strategy = strategy_of(workers=workers, max_staleness=bound)
    _, staleness, _ = train_on_all(strategy, keras.optimizers.SGD(0.01), 200)
    assert max(staleness) <= bound


@pytest.mark.cover(["workers"], {2})
@pytest.mark.parametrize("workers", [2, 4])
def test_asynchronous_training_learns(strategy_of, workers):
    """Increments travel as increments. The bound leaves room for a busy machine, where the loss fell to 0.27 of what it was."""
    optimizer = keras.optimizers.Adam(0.02)
    losses, _, updates = train_on_all(strategy_of(workers=workers), optimizer, 600)
    assert int(optimizer.iterations.value) == updates == 600
    assert np.mean(losses[-50:]) < 0.4 * np.mean(losses[:50])


OF_ONE_SERVER = {
    "optax": lambda: phalanx.keras.OptaxOptimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "clipped accumulation": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=4.0),
}


@pytest.mark.cover(["name"], {"clipped accumulation", "loss scale", "optax"})
@pytest.mark.parametrize("name", OF_ONE_SERVER)
def test_optimizers_that_must_see_all(strategy, coordinator, name):
    """With one server they make the updates of plain Keras, whichever worker does the next step."""
    model, optimizer = parts(strategy, lambda: (mlp(5, 5), OF_ONE_SERVER[name]()))
    step = training(model, optimizer)
    for batch in BATCHES[:6]:
        coordinator.schedule(step, args=batch).fetch()
    plain = by_keras(partial(mlp, 5, 5), OF_ONE_SERVER[name](), BATCHES[:6])
    assert_same(model.get_weights(), plain.get_weights())


@pytest.mark.parametrize("wrong", [{"max_staleness": -1}, {"max_staleness": 0.5}, {"workers": 0}, {"ps": "2"}], ids=str)
def test_options_that_are_wrong(wrong):
    """They are refused before anything is started."""
    (name,) = wrong
    with pytest.raises(phalanx.errors.InvalidArgumentError, match=rf"(?s){name}=.*must be.*HINT: {name}="):
        phalanx.ParameterServerStrategy(**wrong)
