"""Servers, steps and dataset functions that stand still: each is named after the time limit, and nothing waits for ever."""

import os
import re
import signal
import sys
import threading
import time

import jax
import keras
import numpy as np
import pytest
from processes import clock_of_a_worker, pid_of, stop, wait_until
from server_training import do, new_counter, parts

import phalanx
from phalanx._src.cluster.resolvers.simple import SimpleClusterResolver
from phalanx._src.cluster.spec import ClusterSpec
from phalanx._src.parameter_server.processes import calls
from phalanx._src.parameter_server.scheduling import replaceable_worker, scheduler
from phalanx._src.parameter_server.variables import client
from phalanx.coordinator import ClusterCoordinator
from phalanx.errors import ContextError, ServerLostError, StartupError, WorkerLostError


@pytest.fixture
def strategy(strategy_of):
    return strategy_of(workers=1)


@pytest.fixture
def counter(strategy):
    return parts(strategy, new_counter)


@pytest.fixture
def count(coordinator, counter):
    """A function that lets workers count so often, and waits until they have."""

    def step():
        counter.assign_add(1)

    return lambda steps: do(coordinator, step, *[()] * steps)


def test_a_server_that_is_stopped(strategy, coordinator, counter, count, tmp_path, monkeypatch):
    """It is named, with its process, by whatever needs it; once it goes on, no weight is lost and steps work again."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        later = keras.Variable(1.0)
    coordinator.fetch(coordinator.schedule(lambda: model(np.ones((1, 3), "float32"))))
    count(4)
    (server,) = strategy.homes.servers.peers
    pid = stop(server, monkeypatch)
    words = rf"(?s)parameter server 0 \(pid {pid} at .*\): it has sent no heartbeat for \d+ s, .*counter.*HINT: .*worker_timeout_s"
    try:
        for call in (
            lambda: count(4),
            coordinator.status,
            lambda: counter.numpy(),
            lambda: model.layers[0].bias.assign([1.0, 1.0]),
            lambda: model.save_weights(tmp_path / "model.weights.h5"),
            lambda: coordinator.schedule(lambda: later + counter),
        ):
            with pytest.raises(ServerLostError, match=words):
                call()
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    # Steps that were under way when the server stopped count if their pushes had been sent.
    before = int(counter.numpy())
    assert 4 <= before <= 8
    count(3)
    assert before + 3 <= int(counter.numpy()) <= 11
    assert pid_of(strategy.homes.servers.actors[0]) == pid


def interrupt_in(function):
    """Starts a thread that interrupts the main thread, as Ctrl-C does, as soon as it is in a function of that name."""

    def functions():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame:
            yield frame.f_code.co_name
            frame = frame.f_back

    def interrupt():
        wait_until(lambda: function in functions())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_ctrl_c_while_a_server_is_stopped(strategy, coordinator, counter, count):
    """A wait in the main thread ends with the interrupt, and not with the time limit."""
    count(1)
    (server,) = strategy.homes.servers.actors
    pid = pid_of(server)
    # A process that was started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(pid, signal.SIGSTOP)
    thread = interrupt_in("answers")
    try:
        with pytest.raises(KeyboardInterrupt):
            counter.numpy()
    finally:
        os.kill(pid, signal.SIGCONT)
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert int(counter.numpy()) == 1


def test_a_step_that_never_ends(strategy, coordinator, counter, count, caplog, monkeypatch):
    """The worker is alive: the error names it and the step, says for how long, and which option allows more; the wait is logged."""
    import ray

    monkeypatch.setattr(calls, "_NOTE_S", 0.1)

    def spin(x):
        return jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) % 7, x)

    def is_logged():
        told = [record.getMessage() for record in caplog.records if record.name == "phalanx"]
        words = r"waiting for worker 0 \(pid \d+ .*\) for \d+ s: it is computing a step of `.*spin`"
        return any(re.match(words, line) for line in told)

    coordinator.schedule(spin, args=(np.int32(1),))
    coordinator.schedule(lambda: counter.assign_add(1))
    wait_until(is_logged)
    advance = clock_of_a_worker()
    (worker,) = set(strategy.cluster.actors) - set(strategy.homes.servers.actors)
    ray.get(worker.__ray_call__.remote(lambda _: advance(3600)))
    words = (
        r"(?s)worker 0 \(pid \d+ at .*\): it is alive but has been computing a step of `.*spin` for \d+ s"
        r".*HINT: worker_timeout_s=240"
    )
    with pytest.raises(WorkerLostError, match=words):
        coordinator.join()
    before = int(counter.numpy())
    count(10)
    assert int(counter.numpy()) == before + 10


def test_steps_that_are_merely_long(coordinator, counter):
    """Together they take longer than the time limit by the clock of the worker, each alone does not."""
    advance = clock_of_a_worker()

    def step(iterator):
        counter.assign_add(1)
        return next(iterator)

    def slow():
        while True:
            advance(20)
            time.sleep(0.2)  # The coordinator asks for a heartbeat every 0.5 s.
            yield np.int32(1)

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    do(coordinator, step, *[(iterator,)] * 12)
    assert int(counter.numpy()) == 12


@pytest.mark.exhaustive("test_estimator.py: test_scheduled_steps_learn_the_line")
def test_datasets_that_end_their_workers(coordinator, counter, monkeypatch):
    """After three workers in a row it is an error that names the dataset function, or the step that takes a batch of it."""

    def exits():
        os._exit(3)

    def exits_at_a_batch():
        yield np.int32(0)
        os._exit(3)

    assert scheduler.MOST_LOSSES == 3
    monkeypatch.setattr(scheduler, "MOST_LOSSES", 2)  # Starting workers takes long.
    words = r"(?s)`.*exits`: 2 workers in a row were lost with it.*died.*HINT: "
    iterator = iter(coordinator.create_per_worker_dataset(exits))
    with pytest.raises(WorkerLostError, match=words):
        coordinator.schedule(lambda iterator: next(iterator) + counter, args=(iterator,))
    iterator = iter(coordinator.create_per_worker_dataset(exits_at_a_batch))
    coordinator.schedule(lambda iterator: next(iterator) + next(iterator), args=(iterator,))
    words = (
        r"(?s)a scheduled step of `.*<lambda>` with `.*exits_at_a_batch`: 3 workers in a row were lost with it.*HINT: "
    )
    with pytest.raises(WorkerLostError, match=words):
        coordinator.join()
    assert coordinator.schedule(lambda: counter + 5).fetch() == 5


def test_datasets_that_sleep(coordinator):
    """The error names the function, and says whether it was called or a batch was taken of what it returned."""
    advance = clock_of_a_worker()

    def sleeps():
        advance(3600)
        threading.Event().wait()

    def sleeps_at_a_batch():
        yield np.int32(0)
        advance(3600)
        threading.Event().wait()

    def step(iterator):
        return next(iterator) + 1

    iterator = iter(coordinator.create_per_worker_dataset(sleeps))
    words = r"(?s)worker 0 .*has been calling `.*sleeps` for \d+ s.*HINT: worker_timeout_s"
    with pytest.raises(WorkerLostError, match=words):
        coordinator.schedule(step, args=(iterator,))
    iterator = iter(coordinator.create_per_worker_dataset(sleeps_at_a_batch))
    words = r"(?s)worker 0 .*has been taking a batch of `.*sleeps_at_a_batch` for \d+ s.*HINT: worker_timeout_s"
    with pytest.raises(WorkerLostError, match=words):
        do(coordinator, step, (iterator,), (iterator,))


@pytest.mark.usefixtures("shared_strategies")
def test_a_second_strategy_with_a_cluster():
    """Its tasks work for one strategy at a time."""
    spec = ClusterSpec({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]})
    words = r"(?s)a second ParameterServerStrategy in this process: .*tasks of a cluster.*HINT: call strategy.close\(\)"
    with pytest.raises(ContextError, match=words):
        phalanx.ParameterServerStrategy(SimpleClusterResolver(spec, task_type="chief", task_id=0))


@pytest.mark.usefixtures("shared_strategies")
@pytest.mark.parametrize(("module", "name"), [(client, "ParameterServer"), (replaceable_worker, "Worker")])
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
