"""Ports that this process keeps for itself, and its own sockets. All are real."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from errno import EADDRINUSE

import pytest

from phalanx._src.cluster.connections import ports
from phalanx._src.cluster.connections.ports import (
    HeldPort,
    PrivateAddress,
    descriptors_at,
    held_ports,
    listen_at,
    raise_limit_of_descriptors,
    sockets_of_process,
    stop_reading,
)

LISTEN = """
import socket, sys
for host in ("127.0.0.1", ""):
    for options in ([], [socket.SO_REUSEADDR], [socket.SO_REUSEPORT], [socket.SO_REUSEADDR, socket.SO_REUSEPORT]):
        with socket.socket() as server:
            for option in options:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                server.bind((host, int(sys.argv[1])))
                server.listen()
                print("taken", host, options)
            except OSError:
                pass
"""


def test_held_port_is_for_this_user():
    """A process of this user can listen there; a program that does not expect to share it cannot."""
    with HeldPort("127.0.0.1") as held:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", held.port))
        with listen_at("127.0.0.1", held.port) as server, socket.create_connection(server.getsockname()):
            server.accept()[0].close()
    with socket.create_server(("127.0.0.1", held.port)):
        pass


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be another user"
)
def test_another_user_cannot_take_a_held_port():
    """Whatever the options of his socket are, before anyone listens and between two that do."""
    with HeldPort("127.0.0.1") as held:
        for _ in range(2):
            taken = subprocess.run(
                ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/env", "python3", "-c", LISTEN, str(held.port)],
                capture_output=True,
                text=True,
                check=True,
                env={"PATH": "/usr/bin:/bin"},
            )
            assert taken.stdout == ""
            listen_at("127.0.0.1", held.port).close()


def test_two_listeners_of_one_user():
    """The kernel would divide the connections between them, so the second one is refused."""
    with listen_at("127.0.0.1", 0) as server, pytest.raises(OSError, match="in use") as caught:
        listen_at(*server.getsockname())
    assert caught.value.errno == EADDRINUSE


def test_held_ports_are_distinct():
    with ExitStack() as stack:
        held = [stack.enter_context(each) for each in held_ports(20)]
        assert len({each.port for each in held}) == 20
        assert {each.address for each in held} == {f"127.0.0.1:{each.port}" for each in held}


def test_address_of_another_machine_cannot_be_held():
    """192.0.2.0/24 is for documentation (RFC 5737)."""
    with pytest.raises(OSError, match="assign"):
        HeldPort("192.0.2.77")


@pytest.mark.parametrize("root", [None, "/" + "a" * 90])
def test_private_address_is_for_this_user(monkeypatch, root):
    """Its folder can be entered by nobody else, and its path is short enough for a socket."""
    if root:
        monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: root)
    private = PrivateAddress()
    path = private.address.removeprefix("unix:")
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        with server.accept()[0] as accepted:
            assert descriptors_at(path, set()) == [accepted.fileno()]
            assert descriptors_at(path, {accepted.fileno()}) == []
    private.close()
    assert not os.path.exists(os.path.dirname(path))


def test_reading_ends_and_sending_does_not():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stop_reading(ours)
        assert ours.recv(1) == b""
        ours.sendall(b"the last words")
        assert theirs.recv(100) == b"the last words"


def test_sockets_of_this_process_are_found():
    with listen_at("127.0.0.1", 0) as server:
        names = []
        for each in sockets_of_process():
            with each:
                names.append(each.getsockname())
        assert server.getsockname() in names


def test_limit_of_descriptors_is_raised():
    """In a process of its own: the limit stays."""
    code = (
        "import resource; from phalanx._src.cluster.connections.ports import raise_limit_of_descriptors as up\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (64, most)); up()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))"
    )
    assert raise_limit_of_descriptors.__doc__
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
