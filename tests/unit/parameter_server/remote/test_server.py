"""A parameter server, in this process: which pushes it has applied."""

from types import SimpleNamespace

import jax
import jax.export
import numpy as np
import pytest

from phalanx._src.parameter_server.remote.plans import (
    LostServerError,
    Push,
    Pusher,
    ServerPart,
    StepCall,
    WorkerProgram,
)
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx._src.parameter_server.remote.worker import Worker

ray = pytest.importorskip("ray")

WORKER = Pusher(0, 0)


@pytest.fixture
def server():
    server = ParameterServer(0)
    server.meet([server])
    server.put({1: np.zeros(2, "float32")})
    server.enter([WORKER])
    return server


def push(number):
    return Push(WORKER, number, 0, added={1: np.ones(2, "float32")})


def test_last_push_of_a_worker_is_known(server):
    """Also after the worker was declared lost, so that nobody sends it again."""
    assert server.last_push(WORKER) == -1
    for number in (0, 1):
        server.pull([1], WORKER)
        server.exchange(push(number))
    server.forget(WORKER)
    assert (server.last_push(WORKER), server.get([1])[0].tolist()) == (1, [2.0, 2.0])


def test_snapshot_contains_the_pushes_that_it_has(server):
    """A server that begins with it knows them, too."""
    server.pull([1], WORKER)
    server.exchange(push(0))
    copy = ParameterServer(0)
    copy.put(*server.state())
    assert (copy.last_push(WORKER), copy.get([1])[0].tolist()) == (0, [1.0, 1.0])


class DeadActor:
    """An actor that has ended: every call of it is sent, and none is answered."""

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *args: None)


def ray_that_raises(error):
    def get(references):
        raise error

    return SimpleNamespace(get=get, exceptions=ray.exceptions)


DEATHS = pytest.mark.parametrize(
    "death",
    [ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError("the node was running low on memory")],
    ids=["died", "killed when memory ran out"],
)


@DEATHS
def test_push_fails_as_lost_if_another_server_ended(server, monkeypatch, death):
    server.meet([server, DeadActor()])
    monkeypatch.setattr(server, "_ray", ray_that_raises(death))
    server.pull([1], WORKER)
    with pytest.raises(LostServerError):
        server.exchange(Push(WORKER, 0, 0, peer_pushes={1: None}))


@DEATHS
def test_worker_reports_a_server_that_ended(monkeypatch, death):
    worker = Worker(WORKER, [DeadActor()])
    monkeypatch.setattr(worker, "_ray", ray_that_raises(death))
    module = jax.export.export(jax.jit(lambda: 1.0))().serialize()
    worker.learn(0, (), WorkerProgram("step", module, (), ((ServerPart(0, 1, 0, None),),), (), (), (), {}))
    report = worker.run([StepCall(0, (), (), ())])
    assert (report.has_lost_server, report.error) == (True, None)
