"""The child process that gives signs of life: that they come, and that it ends with its owner. test_watch.py shows what they are for."""

import ctypes
import os
import socket
import struct
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
print(pulse._process._process.pid, flush=True)
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


def test_signs_come_during_a_call_of_c(ends):
    """A call that holds the lock of the interpreter, so that no thread runs, until three signs have arrived."""
    ours, theirs = ends
    pulse = Pulse([ours.fileno()], 0.05)
    signs = ctypes.create_string_buffer(3 * len(SIGN))
    limit_s = struct.pack("ll", 300, 0)  # Of a hang: without signs, nothing could end this process.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit_s)
    # PyDLL does not release the lock.
    received = ctypes.PyDLL(None).recv(theirs.fileno(), signs, len(signs) - 1, socket.MSG_WAITALL)
    pulse.release()
    assert signs.raw[:received] == (SIGN * 3)[:-1]


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
