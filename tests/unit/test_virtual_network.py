"""The virtual network: its machines reach each other, the cable has its rate and can be pulled; what cannot be made is refused."""

import os
import subprocess
import sys

import pytest

from phalanx.errors import InvalidArgumentError, StartupError
from phalanx.testing import VirtualNetwork

LISTENS = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listens at", socket.gethostbyname(socket.gethostname()), flush=True)
    for _ in range(2):
        server.accept()[0].close()
"""
CONNECTS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=3).close()
    print("connected")
except OSError:
    print("silence")
"""


@pytest.fixture
def network():
    """A network with a cable of 100 Mbit/s."""
    try:
        made = VirtualNetwork(megabits_per_second=100).__enter__()
    except StartupError as e:
        pytest.skip(f"{e}")
    yield made
    made.__exit__()


def namespaces():
    """The network namespaces of this machine that have names."""
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_machines_are_joined_by_a_cable(network):
    """Each has its address as its name. A connection is refused while the cable is pulled."""
    python, address = sys.executable, network.addresses[0]
    with subprocess.Popen(
        network.command(0, [python, "-c", LISTENS, address]), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == f"listens at {address}\n"

        def connect():
            command = network.command(1, [python, "-c", CONNECTS, address])
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()

        assert connect() == "connected"
        network.pull_cable()
        assert connect() == "silence"
        network.plug_cable()
        assert connect() == "connected"
        assert server.wait(60) == 0


def test_both_ends_of_the_cable_have_a_token_bucket(network):
    """With the rate that was asked for."""
    for name, end in zip(network._names, network._ends, strict=True):
        command = ["tc", "-n", name, "qdisc", "show", "dev", end]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "tbf" in found
        assert "rate 100Mbit" in found


def test_nothing_is_left(network):
    """Of the namespaces, after the block. Two networks can exist at the same time."""
    with VirtualNetwork() as second:
        assert all(name in namespaces() for name in (*network._names, *second._names))
    assert not any(name in namespaces() for name in second._names)


def test_machine_without_the_tools(monkeypatch):
    """The error says what is missing, and nothing is left."""
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(StartupError, match=r"a VirtualNetwork: this machine cannot make it: .*'ip'"):
        VirtualNetwork().__enter__()


@pytest.mark.parametrize("rate", [0, -1, "fast", True, float("inf"), float("nan")])
def test_rates_that_are_none(rate):
    """Are refused."""
    with pytest.raises(InvalidArgumentError, match="megabits_per_second=.*: must be a number above 0, or None"):
        VirtualNetwork(rate)
