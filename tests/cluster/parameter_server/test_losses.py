"""Workers and parameter servers that die or stand still."""

import contextlib
import threading

import keras
import numpy as np
import pytest
from processes import is_there, kill, servers_of, stop, wait_until, workers_of
from server_training import do, mlp, new_counter, parts, training

import phalanx
from phalanx.coordinator import ClusterCoordinator
from phalanx.errors import CancelledError, ContextError, MixedStrategyError, ServerLostError

SNAPSHOTS = {"ps": 2, "snapshot_every_s": 0.2}


def slow_numbers():
    """A function that makes a dataset of which a worker gets a batch every 10 ms."""

    def make():
        import time

        for number in range(1_000_000):
            time.sleep(0.01)
            yield np.int32(number)

    return make


def counted(strategy):
    """A coordinator, a counter, and a function that schedules steps that count the slow numbers and return them."""
    coordinator = ClusterCoordinator(strategy)
    counter = parts(strategy, new_counter)
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        counter.assign_add(1)
        return next(iterator)

    return coordinator, counter, lambda steps: [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]


def test_workers_that_are_lost(strategy_of, caplog, monkeypatch):
    """One is killed, and one stands still. Others do their steps and take their places with a fresh iterator; nothing counts twice."""
    strategy = strategy_of(**SNAPSHOTS)
    coordinator, counter, schedule = counted(strategy)
    before = coordinator.status()
    values = schedule(150)
    values[10].fetch()
    victims = workers_of(strategy)
    kill(victims[0])
    values[60].fetch()
    assert stop(strategy.scheduler._workers[1]._peer, monkeypatch) == victims[1]
    coordinator.join()
    status = coordinator.status()
    assert 150 <= int(counter.value) <= 150 + status.again - before.again
    assert int(counter.value) == status.updates - before.updates
    seen = [int(v) for v in coordinator.fetch(values)]
    assert len(seen) == 150
    assert 2 <= seen.count(0) <= 4
    wait_until(lambda: coordinator.status().alive == 2)
    wait_until(lambda: not any(map(is_there, victims)))
    assert set(workers_of(strategy)).isdisjoint(victims)
    told = [record.getMessage() for record in caplog.records if record.name == "phalanx"]
    lost = sorted(line.split(".")[0] for line in told if "was lost" in line)
    assert lost == ["worker:0 was lost", "worker:1 was lost"]


def test_a_worker_that_is_killed_in_synchronous_training(strategy_of):
    """The others wait until it is replaced, and the rounds go on."""
    strategy = strategy_of(max_staleness=0)
    coordinator, counter, schedule = counted(strategy)
    before = coordinator.status()
    schedule(60)[10].fetch()
    kill(workers_of(strategy)[1])
    coordinator.join()
    assert 60 <= int(counter.value) <= 60 + coordinator.status().again - before.again
    assert set(coordinator.status().staleness) == {0}


@pytest.mark.exhaustive("test_workers_that_are_lost")
def test_the_only_worker_dies_idle(strategy_of):
    """A new step with a dataset, whose shapes nobody can tell then, waits for the next worker."""
    strategy = strategy_of(workers=1)
    coordinator = ClusterCoordinator(strategy)
    counter = parts(strategy, new_counter)
    do(coordinator, lambda: counter.assign_add(1), ())
    (victim,) = workers_of(strategy)
    kill(victim)
    wait_until(lambda: not is_there(victim))
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter([np.int32(4)])))
    assert int(coordinator.schedule(lambda iterator: next(iterator) + counter.value, args=(iterator,)).fetch()) == 5


@pytest.mark.usefixtures("shared_strategies")
def test_a_server_is_lost_for_good(tmp_path):
    """Without snapshots all that need it say which variables are gone. Files that are saved once more, also after the end, stay.

    Both servers have rows of a table: it is divided without a partitioner too.
    """
    strategy = phalanx.ParameterServerStrategy(workers=1, ps=2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter, model = new_counter(), mlp()
        others = [keras.Variable(np.zeros(8, "float32"), name=f"other_{i}") for i in range(3)]
        table = phalanx.keras.ShardedEmbedding(11, 4)
        table.build()

    def step():
        counter.assign_add(1)
        rows = table(np.array([1, 10], "int32"))
        return sum(v.value.sum() for v in [*others, *model.variables]) + keras.ops.sum(rows)

    do(coordinator, step, ())
    assert {part.server for part in strategy.homes.placement(table.embeddings)} == {0, 1}
    paths = [tmp_path / "model.weights.h5", tmp_path / "model.keras"]
    saves = [lambda: model.save_weights(paths[0], overwrite=True), lambda: model.save(paths[1], overwrite=True)]
    for save in saves:
        save()
    before = [path.read_bytes() for path in paths]
    (part,) = strategy.homes.placement(counter)
    lost = [v.name for v in [counter, *others] if strategy.homes.placement(v)[0].server == part.server]
    kill(servers_of(strategy)[part.server])
    with pytest.raises(ServerLostError, match=r"(?s)parameter server \d.*HINT: .*snapshot_every_s") as raised:
        do(coordinator, step, *[()] * 20)
    assert all(name in str(raised.value) for name in lost)
    with pytest.raises(ServerLostError, match="counter"):
        print(counter.value)
    coordinator.join()
    for error in (ServerLostError, ContextError):
        for save in saves:
            with pytest.raises(error):
                save()
        strategy.close()
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.cover(["bound"], [{}])
@pytest.mark.parametrize("bound", [{}, {"max_staleness": 0}], ids=["asynchronous", "synchronous"])
def test_servers_that_are_restarted(strategy_of, bound, monkeypatch):
    """With snapshots training goes on from the last one. One server is killed; the first one stands still, and is ended."""
    strategy = strategy_of(**SNAPSHOTS, **bound)
    coordinator = ClusterCoordinator(strategy)
    model, optimizer, counter = parts(strategy, lambda: (mlp(), keras.optimizers.Adam(0.01), new_counter()))
    train = training(model, optimizer, counter)
    iterator = iter(coordinator.create_per_worker_dataset(slow_numbers()))

    def step(iterator):
        x = next(iterator) * 0.0 + np.ones((2, 6), "float32")
        return train(x, 3.0)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(300)]
    values[50].fetch()
    kill(servers_of(strategy)[1])
    values[150].fetch()
    stopped = stop(strategy.homes.servers.peers[0], monkeypatch)
    coordinator.join()
    wait_until(lambda: not is_there(stopped))
    losses = coordinator.fetch(values)
    assert losses[-1] < 0.5 * losses[0]
    # What came after the last snapshots is gone. A server may be lost after it has applied an update, and before it has said so:
    # no step counts twice.
    assert 100 < int(counter.value) <= len(values)
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.usefixtures("shared_strategies")
def test_close_releases_everybody_who_waits(strategy):
    """Further calls say what has happened, all processes are gone, and another strategy, which has its own variables, goes on."""
    closed = phalanx.ParameterServerStrategy(workers=1, ps=1)
    coordinator, counter, schedule = counted(closed)
    with closed.scope():
        unused = new_counter()
    values = schedule(1000)
    values[0].fetch()
    counter.assign(3)
    other = ClusterCoordinator(strategy)
    own = parts(strategy, new_counter)
    words = r"(?s)in a step of a ParameterServerStrategy: the variable is on the parameter servers of another strategy.*HINT: "
    with pytest.raises(MixedStrategyError, match=words):
        other.schedule(lambda: own + counter)
    processes = [*workers_of(closed), *servers_of(closed)]
    errors = []

    def wait():
        try:
            values[-1].fetch()
        except CancelledError as e:
            errors.append(e)

    waiting = threading.Thread(target=wait)
    waiting.start()
    closed.close()
    waiting.join(60)
    assert len(errors) == 1
    wait_until(lambda: not any(map(is_there, processes)))
    cancelled = r"(?s)coordinator.schedule.*was stopped.*HINT: call coordinator.join"
    for variable in (counter, unused):
        with pytest.raises(CancelledError, match=cancelled):
            coordinator.schedule(lambda: variable.assign_add(1))  # noqa: B023
    with pytest.raises((CancelledError, ContextError), match=r"(?s)HINT"):
        coordinator.join()
    enter = contextlib.ExitStack().enter_context
    for call in (coordinator.status, lambda: ClusterCoordinator(closed), lambda: enter(closed.scope())):
        with pytest.raises(ContextError, match=r"(?s)closed.*HINT"):
            call()
    do(other, lambda: own.assign_add(1), ())
    assert int(own.numpy()) == 1
    with pytest.raises(MixedStrategyError, match=words):
        other.schedule(lambda: own + counter)
