"""Workers and parameter servers that die or stand still, one strategy each."""

import contextlib
import signal
import threading

import keras
import numpy as np
import pytest
from processes import end, is_there, servers_of, wait_until, workers_of

import phalanx
from phalanx.coordinator import ClusterCoordinator
from phalanx.errors import CancelledError, ContextError, ServerLostError


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """The Ray on which all strategies of these tests are."""
    strategy = phalanx.ParameterServerStrategy(workers=1, ps=1)
    yield
    strategy.close()


@pytest.fixture
def started(request):
    """A strategy, its coordinator, and a variable that counts."""
    bound = request.node.callspec.params.get("bound", {})
    strategy = phalanx.ParameterServerStrategy(**request.param, **bound)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum", name="counter")
    yield strategy, coordinator, counter
    strategy.close()


def slow_numbers():
    """A function that makes a dataset of which a worker gets a batch every 10 ms."""

    def make():
        import time

        for number in range(1_000_000):
            time.sleep(0.01)
            yield np.int32(number)

    return make


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 2}], indirect=True)
def test_workers_that_are_killed(started, caplog):
    """Their steps go to another worker, they come back with a fresh iterator, and nothing counts twice."""
    strategy, coordinator, counter = started
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        counter.assign_add(1)
        return next(iterator)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(150)]
    values[10].fetch()
    victims = workers_of(strategy)
    end(victims[0])
    values[60].fetch()
    end(victims[1])
    coordinator.join()
    status = coordinator.status()
    assert 150 <= int(counter.value) <= 150 + status.again
    assert int(counter.value) == status.updates
    seen = [int(v) for v in coordinator.fetch(values)]
    assert len(seen) == 150
    assert 2 <= seen.count(0) <= 4
    wait_until(lambda: coordinator.status().alive == 2)
    assert not any(map(is_there, victims))
    assert set(workers_of(strategy)).isdisjoint(victims)
    told = [record.getMessage() for record in caplog.records if record.name == "phalanx"]
    assert sorted(line.split(".")[0] for line in told) == ["worker:0 was lost", "worker:1 was lost"]


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 1, "worker_timeout_s": 2.0}], indirect=True)
def test_a_worker_that_stands_still(started):
    """It is taken for lost, its step is done by another one, and what it pushes when it goes on does not count."""
    strategy, coordinator, counter = started
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        next(iterator)
        counter.assign_add(1)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(100)]
    values[10].fetch()
    victim = workers_of(strategy)[0]
    end(victim, signal.SIGSTOP)
    coordinator.join()
    assert int(counter.value) == coordinator.status().updates
    assert 100 <= int(counter.value) <= 100 + coordinator.status().again
    wait_until(lambda: not is_there(victim))


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 1, "max_staleness": 0}], indirect=True)
def test_a_worker_that_is_killed_in_synchronous_training(started):
    """The others wait until it is replaced, and the rounds go on."""
    strategy, coordinator, counter = started
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        next(iterator)
        counter.assign_add(1)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
    values[10].fetch()
    end(workers_of(strategy)[1])
    coordinator.join()
    assert 60 <= int(counter.value) <= 60 + coordinator.status().again
    assert set(coordinator.status().staleness) == {0}


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_the_only_worker_dies_idle(started):
    """A new step with a dataset, whose shapes nobody can tell then, waits for the next worker."""
    strategy, coordinator, counter = started
    coordinator.schedule(lambda: counter.assign_add(1))
    coordinator.join()
    (victim,) = workers_of(strategy)
    end(victim)
    wait_until(lambda: not is_there(victim))
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([np.int32(4)])))
    assert int(coordinator.schedule(lambda iterator: next(iterator) + counter.value, args=(iterator,)).fetch()) == 5


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_files_outlive_servers(started, tmp_path):
    """Who saves once more after the loss, or after the end, keeps what was saved before."""
    strategy, coordinator, _ = started
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    paths = [tmp_path / "model.weights.h5", tmp_path / "model.keras"]
    coordinator.fetch(coordinator.schedule(lambda: model(np.ones((2, 4), "float32"))))

    def save():
        model.save_weights(paths[0], overwrite=True)

    save()
    model.save(paths[1])
    before = [path.read_bytes() for path in paths]
    end(servers_of(strategy)[0])
    for error in (ServerLostError, ContextError):
        with pytest.raises(error):
            save()
        with pytest.raises(error):
            model.save(paths[1], overwrite=True)
        strategy.close()
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 2}], indirect=True)
def test_a_server_is_lost_for_good(started):
    """Without snapshots `join` says which variables are gone; reads of them say it too."""
    strategy, coordinator, counter = started
    with strategy.scope():
        others = [keras.Variable(np.zeros(8, "float32"), name=f"other_{i}") for i in range(3)]

    def step():
        counter.assign_add(1)
        return sum(v.value.sum() for v in others)

    coordinator.schedule(step)
    coordinator.join()
    (part,) = strategy.homes.placement(counter)
    lost = [v.name for v in [counter, *others] if strategy.homes.placement(v)[0].server == part.server]
    end(servers_of(strategy)[part.server])
    for _ in range(20):
        coordinator.schedule(step)
    with pytest.raises(ServerLostError, match=r"(?s)parameter server \d.*HINT: .*snapshot_every_s") as raised:
        coordinator.join()
    assert all(name in str(raised.value) for name in lost)
    with pytest.raises(ServerLostError, match="counter"):
        print(counter.value)
    coordinator.join()


@pytest.mark.parametrize("bound", [{}, {"max_staleness": 0}], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("started", [{"workers": 2, "ps": 2, "snapshot_every_s": 0.2}], indirect=True)
def test_servers_that_are_restarted(started, bound):
    """With snapshots training goes on from the last one, also when the first server is the one that dies."""
    strategy, coordinator, counter = started
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        x = next(iterator) * 0.0 + np.ones((2, 4), "float32")
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - 3.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        counter.assign_add(1)
        return loss

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(300)]
    for number, victim in ((50, 1), (150, 0)):
        values[number].fetch()
        end(servers_of(strategy)[victim])
    coordinator.join()
    losses = coordinator.fetch(values)
    assert losses[-1] < 0.5 * losses[0]
    # What came after the last snapshots is gone.
    assert 100 < int(counter.value) <= 300 + coordinator.status().again
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_close_releases_everybody_who_waits(started):
    """Everybody who waits is let go, further calls say what has happened, and all processes are gone."""
    strategy, coordinator, counter = started
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        return next(iterator)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(1000)]
    values[0].fetch()
    counter.assign(3)
    processes = [*workers_of(strategy), *servers_of(strategy)]
    errors = []

    def wait():
        try:
            values[-1].fetch()
        except CancelledError as e:
            errors.append(e)

    waiting = threading.Thread(target=wait)
    waiting.start()
    strategy.close()
    waiting.join(30)
    assert len(errors) == 1
    wait_until(lambda: not any(map(is_there, processes)))
    for call in (coordinator.join, lambda: coordinator.schedule(lambda: counter.assign_add(1))):
        with pytest.raises((CancelledError, ContextError), match=r"(?s)HINT"):
            call()
    enter = contextlib.ExitStack().enter_context
    for call in (
        coordinator.status,
        lambda: phalanx.coordinator.ClusterCoordinator(strategy),
        lambda: enter(strategy.scope()),
    ):
        with pytest.raises(ContextError, match=r"(?s)closed.*HINT"):
            call()
