"""Tunnels through real sockets: what passes, and what stays open."""

import os
import socket
import threading
from pathlib import Path

import pytest
from tests.waiting import DEADLINE_S, wait_until

from phalanx._src.cluster.connections import ports
from phalanx._src.cluster.connections.hosts import PRIVATE
from phalanx._src.cluster.connections.tunnel import Tunnel


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        yield listening


def entered(tunnel):
    """Returns a connection with the near end of a tunnel."""
    near = socket.socket(socket.AF_UNIX)
    near.settimeout(DEADLINE_S)
    near.connect(tunnel.address.removeprefix(PRIVATE))
    return near


def read(connection, count):
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def test_bytes_pass_in_both_directions(server):
    """More of them than the buffers hold, at an address that no other user reaches."""
    tunnel = Tunnel(f"127.0.0.1:{server.getsockname()[1]}")
    folder = Path(tunnel.address.removeprefix(PRIVATE)).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    sent = os.urandom(1 << 22)
    with entered(tunnel) as near, server.accept()[0] as far:
        far.settimeout(DEADLINE_S)
        near.sendall(b"question")
        assert read(far, 8) == b"question"
        sender = threading.Thread(target=far.sendall, args=(sent,))
        sender.start()
        assert read(near, len(sent)) == sent
        sender.join()
    tunnel.close()
    tunnel.join(DEADLINE_S)
    assert not tunnel.is_alive()
    assert not folder.exists()


def test_address_that_cannot_be_made(monkeypatch, tmp_path):
    """Nothing is left of it. The path of a socket has at most 107 bytes."""
    folder = tmp_path / ("a" * 107)
    folder.mkdir()
    monkeypatch.setattr(ports, "short_folder", lambda: str(folder))
    with pytest.raises(OSError, match="too long"):
        Tunnel("127.0.0.1:1")
    assert not os.listdir(folder)


def test_near_end_outlives_the_far_end(server):
    """Also one that connects when nobody is there any more. What it sends is lost."""
    tunnel = Tunnel(f"127.0.0.1:{server.getsockname()[1]}")
    with entered(tunnel) as near, server.accept()[0] as far:
        far.settimeout(DEADLINE_S)
        server.close()
        far.close()
        with entered(tunnel) as later:
            for connection in (near, later):
                connection.sendall(b"is anybody there?")
                connection.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
            # Neither has been ended when the tunnel closes: that is for this process to do.
            tunnel.close()
            tunnel.join(0.7)
            assert tunnel.is_alive()
    tunnel.join(DEADLINE_S)
    assert not tunnel.is_alive()


def test_near_ends_are_ended(server):
    """Those that exist, whether the far end is there or not, and one that the tunnel has not let in yet. Nobody else comes in."""
    tunnel = Tunnel(f"127.0.0.1:{server.getsockname()[1]}")
    with entered(tunnel) as near, server.accept()[0] as far, entered(tunnel) as lonely, server.accept()[0] as lost:
        far.settimeout(DEADLINE_S)
        lost.close()
        wait_until(lambda: None in tunnel._far_ends.values())
        has_ended, let_in = threading.Event(), tunnel._open
        tunnel._open = lambda: has_ended.wait(DEADLINE_S) and let_in()
        with entered(tunnel) as later:
            tunnel.end()
            has_ended.set()
            assert [each.recv(1) for each in (near, lonely, later, far)] == [b""] * 4
        assert not Path(tunnel.address.removeprefix(PRIVATE)).exists()
    tunnel.join(DEADLINE_S)
    assert not tunnel.is_alive()


def test_far_end_learns_of_the_near_end(server):
    """A process that ends its connection has left."""
    tunnel = Tunnel(f"127.0.0.1:{server.getsockname()[1]}")
    near = entered(tunnel)
    with server.accept()[0] as far:
        far.settimeout(DEADLINE_S)
        near.close()
        assert far.recv(1) == b""
    tunnel.close()
    wait_until(lambda: not tunnel.is_alive())


FEW_DESCRIPTORS = """
import os, resource, socket, time
from phalanx._src.cluster.connections import tunnel as module

module._TURN_S = 0.05
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as near:
    server.settimeout(60)
    tunnel = module.Tunnel(f"127.0.0.1:{server.getsockname()[1]}")
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))
    near.connect(tunnel.address.removeprefix("unix:"))
    time.sleep(0.2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    near.sendall(b"x")
    print(server.accept()[0].recv(1))
"""


def test_no_descriptor_is_left(run_python):
    """A connection waits until there is one."""
    assert run_python(FEW_DESCRIPTORS) == "b'x'\n"
