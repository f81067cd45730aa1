"""Servers, steps and dataset functions that stand still: each is named within the time limit, and nothing waits for ever."""

import os
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from processes import end, is_there, pid_of, wait_until

import phalanx
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.coordinator import ClusterCoordinator, supervisor
from phalanx.errors import (
    CancelledError,
    ContextError,
    MixedStrategyError,
    ServerLostError,
    StartupError,
    WorkerLostError,
)
from phalanx.servers import calls, client

TIMEOUT_S = 6.0
# A machine that runs other tests besides may need as long again for each of its parts.
DEADLINE_S = 10 * TIMEOUT_S


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """The Ray on which all strategies of these tests are."""
    strategy = phalanx.ParameterServerStrategy(workers=1, ps=1)
    yield
    strategy.close()


@pytest.fixture
def started(request):
    """A strategy, its coordinator, a variable, and a step that counts with it."""
    strategy = phalanx.ParameterServerStrategy(worker_timeout_s=TIMEOUT_S, **request.param)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum", name="counter")

    def count():
        counter.assign_add(1)

    yield strategy, coordinator, counter, count
    strategy.close()


def raised_in_time(error, match, call):
    """Calls what must raise within the deadline; returns the error."""
    began = time.monotonic()
    with pytest.raises(error, match=match) as raised:
        call()
    assert time.monotonic() - began < DEADLINE_S
    return raised.value


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 1}], indirect=True)
def test_a_server_that_is_stopped(started, tmp_path):
    """It is named, with its process, by whatever needs it; once it goes on, no weight is lost and steps work again."""
    strategy, coordinator, counter, count = started
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    coordinator.fetch(coordinator.schedule(lambda: model(np.ones((1, 3), "float32"))))
    for _ in range(4):
        coordinator.schedule(count)
    coordinator.join()
    server = pid_of(strategy.homes.servers.actors[0])
    words = rf"(?s)parameter server 0 \(pid {server} at .*\): it has sent no heartbeat for \d+ s, .*counter.*HINT: .*worker_timeout_s"
    end(server, signal.SIGSTOP)
    try:
        for _ in range(4):
            coordinator.schedule(count)
        for call in (
            coordinator.join,
            coordinator.status,
            lambda: counter.numpy(),
            lambda: model.layers[0].bias.assign([1.0, 1.0]),
            lambda: model.save_weights(tmp_path / "model.weights.h5"),
        ):
            raised_in_time(ServerLostError, words, call)
        with strategy.scope():
            later = keras.Variable(1.0)
        raised_in_time(ServerLostError, words, lambda: coordinator.schedule(lambda: later + counter))
    finally:
        end(server, signal.SIGCONT)
    # Steps that were under way when the server stopped count if their pushes had been sent.
    before = int(counter.numpy())
    assert 4 <= before <= 8
    for _ in range(3):
        coordinator.schedule(count)
    coordinator.join()
    assert before + 3 <= int(counter.numpy()) <= 11
    assert pid_of(strategy.homes.servers.actors[0]) == server


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 2, "snapshot_every_s": 0.2}], indirect=True)
def test_a_stopped_server_with_snapshots(started):
    """It is ended, and another one takes its place, so that the steps go on."""
    strategy, coordinator, counter, count = started

    for _ in range(10):
        coordinator.schedule(count)
    coordinator.join()
    time.sleep(1.0)
    (part,) = strategy.homes.placement(counter)
    server = pid_of(strategy.homes.servers.actors[part.server])
    end(server, signal.SIGSTOP)
    for _ in range(10):
        coordinator.schedule(count)
    began = time.monotonic()
    coordinator.join()
    assert time.monotonic() - began < DEADLINE_S
    assert 20 <= int(counter.numpy()) <= 20 + coordinator.status().again
    wait_until(lambda: not is_there(server))


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_ctrl_c_while_a_server_is_stopped(started):
    """A wait in the main thread ends at once with the interrupt."""
    strategy, coordinator, counter, count = started
    coordinator.schedule(count)
    coordinator.join()
    server = pid_of(strategy.homes.servers.actors[0])
    end(server, signal.SIGSTOP)
    began = time.monotonic()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            counter.numpy()
        assert time.monotonic() - began < TIMEOUT_S
    finally:
        timer.join()
        end(server, signal.SIGCONT)
    assert int(counter.numpy()) == 1


@pytest.mark.parametrize("started", [{"workers": 2, "ps": 1}], indirect=True)
def test_a_step_that_never_ends(started, caplog, monkeypatch):
    """The worker is alive: the error names it and the step, says for how long, and which option allows more; the wait is logged."""
    monkeypatch.setattr(calls, "_NOTE_S", 1.0)
    _, coordinator, counter, count = started

    def spin(x):
        return jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) % 7, x)

    coordinator.schedule(spin, args=(np.int32(1),))
    coordinator.schedule(count)
    words = (
        r"(?s)worker [01] \(pid \d+ at .*\): it is alive but has been computing a step of `.*spin` for \d+ s"
        r".*HINT: worker_timeout_s=12"
    )
    raised_in_time(WorkerLostError, words, coordinator.join)
    told = [record.getMessage() for record in caplog.records if record.name == "phalanx"]
    assert any(
        re.match(r"waiting for worker [01] \(pid \d+ .*\) for \d+ s: it is computing a step of `.*spin`", x)
        for x in told
    )
    before = int(counter.numpy())
    for _ in range(10):
        coordinator.schedule(count)
    coordinator.join()
    assert int(counter.numpy()) == before + 10


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_steps_that_are_merely_long(started):
    """Together they take longer than the time limit, each alone does not."""
    _, coordinator, counter, count = started

    def step(iterator):
        counter.assign_add(1)
        return next(iterator)

    def slow():
        while True:
            time.sleep(0.4)
            yield np.int32(1)

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    began = time.monotonic()
    for _ in range(20):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    assert time.monotonic() - began > TIMEOUT_S
    assert int(counter.numpy()) == 20


def datasets():
    """Dataset functions; not of this module, which workers cannot import."""

    def exits():
        os._exit(3)

    def exits_at_a_batch():
        yield np.int32(0)
        os._exit(3)

    def sleeps():
        time.sleep(3600)

    def sleeps_at_a_batch():
        yield np.int32(0)
        time.sleep(3600)

    return exits, exits_at_a_batch, sleeps, sleeps_at_a_batch


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_datasets_that_end_their_workers(started):
    """After three workers in a row it is an error that names the dataset function, or the step that takes a batch of it."""
    _, coordinator, counter, count = started
    exits, exits_at_a_batch, *_ = datasets()

    def step(iterator):
        return next(iterator) + counter

    words = r"(?s)`.*exits`: 3 workers in a row were lost with it.*died.*HINT: "
    iterator = iter(coordinator.create_per_worker_dataset(exits))
    raised_in_time(WorkerLostError, words, lambda: coordinator.schedule(step, args=(iterator,)))
    iterator = iter(coordinator.create_per_worker_dataset(exits_at_a_batch))
    coordinator.schedule(lambda iterator: next(iterator) + next(iterator), args=(iterator,))
    words = (
        r"(?s)a scheduled step of `.*<lambda>` with `.*exits_at_a_batch`: 3 workers in a row were lost with it.*HINT: "
    )
    raised_in_time(WorkerLostError, words, coordinator.join)
    assert coordinator.schedule(lambda: counter + 5).fetch() == 5


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_datasets_that_sleep(started):
    """The error names the function, and says whether it was called or a batch was taken of what it returned."""
    _, coordinator, *_ = started
    *_, sleeps, sleeps_at_a_batch = datasets()

    def step(iterator):
        return next(iterator) + 1

    iterator = iter(coordinator.create_per_worker_dataset(sleeps))
    words = r"(?s)worker 0 .*has been calling `.*sleeps` for \d+ s.*HINT: worker_timeout_s"
    raised_in_time(WorkerLostError, words, lambda: coordinator.schedule(step, args=(iterator,)))
    iterator = iter(coordinator.create_per_worker_dataset(sleeps_at_a_batch))
    for _ in range(2):
        coordinator.schedule(step, args=(iterator,))
    words = r"(?s)worker 0 .*has been taking a batch of `.*sleeps_at_a_batch` for \d+ s.*HINT: worker_timeout_s"
    raised_in_time(WorkerLostError, words, coordinator.join)


@pytest.mark.parametrize("started", [{"workers": 1, "ps": 1}], indirect=True)
def test_two_strategies_at_once(started):
    """Both work, neither takes a variable of the other, and closing one leaves the other whole."""
    strategy, coordinator, counter, count = started
    first = phalanx.ParameterServerStrategy(workers=1, ps=1)
    with first.scope():
        own = keras.Variable(jnp.ones(3))
    coordinator_of_first = ClusterCoordinator(first)
    coordinator_of_first.fetch(coordinator_of_first.schedule(lambda: own.assign_add(jnp.ones(3))))
    coordinator.schedule(count)
    coordinator.join()
    words = r"(?s)in a step of a ParameterServerStrategy: the variable is on the parameter servers of another strategy.*HINT: "
    with pytest.raises(MixedStrategyError, match=words):
        coordinator.schedule(lambda: own + counter)
    np.testing.assert_array_equal(own.numpy(), [2, 2, 2])
    spec = ClusterSpec({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]})
    words = r"(?s)a second ParameterServerStrategy in this process: .*tasks of a cluster.*HINT: call strategy.close\(\)"
    with pytest.raises(ContextError, match=words):
        phalanx.ParameterServerStrategy(SimpleClusterResolver(spec, task_type="chief", task_id=0))
    words = r"(?s)in a step of a ParameterServerStrategy: the variable is on the parameter servers of another strategy.*HINT: "
    first.close()
    coordinator.schedule(count)
    coordinator.join()
    assert int(counter.numpy()) == 2
    with pytest.raises(MixedStrategyError, match=words):
        coordinator.schedule(lambda: own + counter)


@pytest.mark.parametrize(("module", "name"), [(client, "ParameterServer"), (supervisor, "Worker")])
def test_a_process_that_ends_while_it_starts(monkeypatch, module, name):
    """The error names it, and the strategy leaves nothing behind."""

    class Ending(getattr(module, name)):
        def __init__(self, *args):
            os._exit(4)

    monkeypatch.setattr(module, name, Ending)
    words = r"(?s)the start of (parameter server|worker) 0: it has died .*HINT: use more memory"
    strategies = []

    def start():
        strategies.append(phalanx.ParameterServerStrategy(workers=1, ps=1))
        ClusterCoordinator(strategies[0])

    with pytest.raises(StartupError, match=words):
        start()
    for strategy in strategies:
        strategy.close()


def test_a_step_that_is_scheduled_after_close():
    """It is cancelled, and the error says why; no error of Ray gets out."""
    strategy = phalanx.ParameterServerStrategy(workers=1, ps=1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")
    strategy.close()
    with pytest.raises(CancelledError, match=r"(?s)coordinator.schedule.*was stopped.*HINT: call coordinator.join"):
        coordinator.schedule(lambda: counter.assign_add(1))
