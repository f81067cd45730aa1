"""The child process that gives signs of life: that they come, and that it ends with its owner. test_watch.py shows what they are for."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

from phalanx._src.cluster.watch.pulse import SIGN, Pulse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the states of processes are in /proc"),
]

OWNER = """
import signal, sys
from phalanx._src.cluster.watch.pulse import Pulse
pulse = Pulse([int(sys.argv[1])], 0.05)
print(pulse._process.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_signs_come_until_it_is_released(ends):
    """Over each connection, also when another one is closed."""
    ours, theirs = ends
    with socket.socket(fileno=os.dup(ours.fileno())) as again:
        pulse = Pulse([again.fileno(), ours.fileno()], 0.05)
    ours.close()
    assert {theirs.recv(len(SIGN)) for _ in range(6)} == {SIGN}
    pulse.release()
    while theirs.recv(1 << 16):
        pass


def test_it_ends_with_a_killed_owner(ends):
    """So that the others see the connection closed."""
    ours, theirs = ends
    command = [sys.executable, "-c", OWNER, f"{ours.fileno()}"]
    with subprocess.Popen(command, pass_fds=[ours.fileno()], stdout=subprocess.PIPE, text=True) as owner:
        ours.close()
        child = int(owner.stdout.readline())
        assert theirs.recv(len(SIGN)) == SIGN
        owner.kill()
    while theirs.recv(1 << 16):
        pass
    wait_until(lambda: not os.path.exists(f"/proc/{child}") or ") Z " in Path(f"/proc/{child}/stat").read_text())
