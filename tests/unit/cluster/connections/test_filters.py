"""Connections from other machines than those of the group, which the kernel drops. Machines are addresses of this one."""

import os
import resource
import socket
import sys
from contextlib import ExitStack

import pytest
from tests.filters import takes_filters
from tests.waiting import wait_until

from phalanx._src.cluster.connections.filters import (
    MOST_ADDRESSES,
    addresses_of_machine,
    admit_only,
    admitting,
    host_of_other,
    is_visited,
)
from phalanx._src.cluster.connections.ports import raise_limit_of_descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets are Linux's")

OURS, STRANGE = "127.0.0.2", "127.0.0.3"
needs_filters = pytest.mark.skipif(not takes_filters(), reason="the kernel takes no filters from this user")


def reaches(source, port, host="127.0.0.1"):
    """Whether a connection from an address arrives. The kernel would wait for a second before it tries again."""
    with socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET) as client:
        client.bind((source, 0))
        client.settimeout(0.3)
        return client.connect_ex((host, port)) == 0


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@needs_filters
def test_connections_of_others_are_dropped(server):
    """Those of the machines arrive and carry data."""
    port = server.getsockname()[1]
    assert reaches(STRANGE, port)
    assert admit_only(port, [OURS, "fd78::1"])
    assert not reaches(STRANGE, port)
    with socket.create_connection(server.getsockname(), source_address=(OURS, 0)) as client:
        server.accept()[0].close()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"x" * 100_000)
            assert client.recv(100_000, socket.MSG_WAITALL) == b"x" * 100_000


def test_strangers_who_are_there_already_are_ended(server):
    """Those of the machines stay."""
    port = server.getsockname()[1]
    with ExitStack() as stack:
        clients, accepted = [], []
        for source in (OURS, STRANGE):
            clients.append(
                stack.enter_context(socket.create_connection(server.getsockname(), source_address=(source, 0)))
            )
            accepted.append(stack.enter_context(server.accept()[0]))
        assert [host_of_other(each) for each in accepted] == [OURS, STRANGE]
        admit_only(port, [OURS])
        accepted[0].sendall(b"x")
        assert [client.recv(1) for client in clients] == [b"x", b""]
        with socket.socket() as alone:
            assert host_of_other(alone) == ""


def test_visitors_of_a_port_are_noticed(server):
    """Those that nobody has accepted yet, those that are there, and those that have gone. They may have opened many files."""
    port = server.getsockname()[1]
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        raise_limit_of_descriptors()
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert not is_visited(port)
    with socket.create_connection(server.getsockname()):
        assert is_visited(port)
        accepted, _ = server.accept()
        assert is_visited(port)
    with accepted:
        assert accepted.recv(1) == b""
        assert is_visited(port)
    assert not is_visited(port)


@needs_filters
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_both_versions_at_one_socket():
    """It listens at all addresses, and sees those of version 4 as such."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        for hosts, is_admitted in (([OURS, "::1"], True), ([OURS, "fd78::1", "::2"], False)):
            admit_only(port, hosts)
            assert reaches("::1", port, "::1") == is_admitted
            assert reaches(OURS, port)
            assert not reaches(STRANGE, port)


@needs_filters
def test_as_many_machines_as_the_kernel_takes():
    """The largest program, of addresses of version 6 alone, is one that the kernel loads."""
    hosts = [f"fd78::{number:x}" for number in range(1, MOST_ADDRESSES)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        admit_only(port, [*hosts, OURS])
        assert reaches(OURS, port)
        assert not reaches(STRANGE, port)


def test_kernel_refuses_the_filter(server):
    """The group starts as without it: strangers who are there are ended, and those who come later get in."""
    port, hosts = server.getsockname()[1], [OURS, *(f"10.0.{n // 256}.{n % 256}" for n in range(3000))]
    with socket.create_connection(server.getsockname(), source_address=(STRANGE, 0)) as client, server.accept()[0]:
        assert admit_only(port, hosts)
        assert client.recv(1) == b""
    assert reaches(OURS, port)
    assert reaches(STRANGE, port)


@needs_filters
def test_filter_of_a_port_that_opens_later():
    """The filter is there as soon as the port is. A block that opens none ends too."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not admit_only(port, [OURS])
        with admitting(port, [OURS]):
            server.listen()
            wait_until(lambda: not reaches(STRANGE, port))
        assert not reaches(STRANGE, port)
    with admitting(port, [OURS]):
        pass


def test_addresses_of_this_machine(monkeypatch):
    """Those of both versions. None where the system does not tell."""
    found = addresses_of_machine()
    assert "127.0.0.1" in found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        if route.connect_ex(("192.0.2.1", 9)) == 0:  # Sends nothing.
            assert route.getsockname()[0] in found
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    assert addresses_of_machine() == []
