"""A parameter server, in this process: which pushes it has applied."""

import numpy as np
import pytest

from phalanx._src.parameter_server.remote.plans import Push, Pusher
from phalanx._src.parameter_server.remote.server import ParameterServer

pytest.importorskip("ray")

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
