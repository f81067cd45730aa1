"""Strangers at every port of a running job: the job goes on, and its result is right."""

import os
import resource
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from launching import RUN, end_of, script, started
from strangers import ports_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the ports of a process from /proc")

CROWD = 10_000
TRAIN = """
import os, sys, time
from pathlib import Path
import keras, numpy as np
import phalanx
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = keras.Variable(0.0, aggregation="sum")
def add(is_over):
    total.assign_add(1.0)
    return is_over
@phalanx.function
def step(is_over):
    return strategy.reduce("SUM", strategy.run(add, args=(is_over,)), axis=None)
steps, over = 0, 0.0
while over < 2:
    found = np.float32(Path(sys.argv[1]).exists())
    over = float(step(strategy.experimental_distribute_values_from_function(lambda _: found)))
    steps += 1
    time.sleep(0.005)
    if steps == 20:
        print("trains", os.getpid(), flush=True)
print("right" if float(total.value) == 2.0 * steps else f"wrong: {float(total.value)}, {steps}", flush=True)
"""
GARBAGE = (
    b"\0" * 8,
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"rank": 1, "about": "us"}\n',
    b'{"verdict": "rank 1 has died", "is_loss": true, "hint": ""}\n',
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
    os.urandom(1 << 16),
)


def disturb(address, crowd):
    """Sends all kinds of garbage to an address, then keeps a crowd of silent connections open for a while."""
    for said in GARBAGE:
        with socket.create_connection(address, timeout=60) as stranger, suppress(OSError):
            stranger.sendall(said)
            stranger.settimeout(0.1)
            stranger.recv(100)
    with ExitStack() as stack:
        for number in range(crowd):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(address)
            if number % 100 == 0:
                time.sleep(0.005)
        time.sleep(0.5)


def family_of(process):
    """The process and those that it has started."""
    return [process, *map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


@pytest.mark.cover(["workers"], {"2:2"})
@pytest.mark.parametrize(("workers", "ports"), [("2", 2), ("2:2", 3)])
def test_strangers_at_every_port(tmp_path, workers, ports):
    """Garbage, and 10,000 silent connections to each: no worker is lost, and the strangers are named.

    Each worker has one port, for arrays, and an elastic group has the rendezvous too. Nobody else reaches JAX's service: it has none.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    stop = tmp_path / "stop"
    with started(*RUN, workers, script(tmp_path, TRAIN), stop, merged=True) as job:
        training = 0
        while training < 2:
            line = job.stdout.readline()
            assert line, "the job ended before it trained"
            training += "trains" in line
        found = [address for process in family_of(job.pid) for address in ports_of(process)]
        assert [host for host, _ in found] == ["127.0.0.1"] * ports
        for address in found:
            disturb(address, min(CROWD, limit - 200))
        stop.touch()
        code, out, _ = end_of(job)
    assert code == 0, out
    assert out.count("] right") == 2, out
    assert "Strangers have connected to the port" in out
