"""Which address others reach, and what goes past proxies. The sockets are real, and no message is sent."""

import errno
import socket

import pytest

from phalanx._src.cluster.connections.hosts import (
    bypass_proxies,
    found_at,
    host_for_others,
    is_loopback,
    numeric,
    place_to_listen,
    reason_of,
)
from phalanx._src.cluster.connections.listener import listen

NAME_OF_LOOPBACK = "127.1"
"""A name that leads back to this machine, to the resolver: no address in full."""


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:2", "[::1]:3", "127.1.2.3:4"])
def test_addresses_of_this_machine_only(address):
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["host0:1", "host1:1", "10.0.0.1:1", "0.0.0.0:1", "[2001:db8::1]:1"])
def test_addresses_that_others_reach(address):
    assert not is_loopback(address)


def test_host_is_the_end_of_a_connection():
    """Whatever the name of this machine is, and wherever that leads."""
    with listen("127.0.0.3:0") as server, socket.create_connection(server.getsockname(), 60, ("127.0.0.4", 0)) as own:
        assert host_for_others([own], ["127.0.0.3:1", "127.0.0.4:1"]) == "127.0.0.4"
        with server.accept()[0] as other:
            assert host_for_others([other], ["127.0.0.3:1", "127.0.0.4:1"]) == "127.0.0.3"


def test_host_if_the_name_leads_back():
    """Other machines cannot reach the end of a local connection, so it is the one from which messages to them come."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this machine has no network")
        expected = route.getsockname()[0]
    with listen("127.0.0.1:0") as server, socket.create_connection(server.getsockname()) as own:
        assert host_for_others([own], ["127.0.0.1:1", "no.such.host.invalid:1", "192.0.2.1:1"]) == expected
        assert host_for_others([own], ["no.such.host.invalid:1"]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "family", "found"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("::1", socket.AF_INET6, "::1"),
        # Others come by another address.
        (NAME_OF_LOOPBACK, socket.AF_INET, ""),
        ("0.0.0.0", socket.AF_INET, "0.0.0.0"),
    ],
)
def test_place_to_listen_follows_the_name(host, family, found):
    assert place_to_listen(host, 5000) == (family, (found, 5000))


def test_name_that_leads_nowhere():
    """The reason is in the words of the resolver. Those of other errors have no address."""
    for lead in (place_to_listen, found_at):
        with pytest.raises(socket.gaierror) as caught:
            lead("no.such.host.invalid", 5000)
        assert reason_of(caught.value) == caught.value.strerror
    assert reason_of(OSError(errno.EADDRINUSE, "Address already in use (127.0.0.1:5000)")) == "Address already in use"
    assert found_at("127.0.0.1", 5000) == numeric(NAME_OF_LOOPBACK) == "127.0.0.1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, None),
        ({"no_proxy": "a.org"}, None),
        ({"http_proxy": "http://p:1"}, "host0,::1"),
        ({"https_proxy": "http://p:1", "no_proxy": "a.org,host0", "NO_PROXY": "b.org"}, "a.org,host0,::1"),
        ({"grpc_proxy": "http://p:1", "no_grpc_proxy": "c.org", "no_proxy": "a.org"}, "c.org,host0,::1"),
    ],
)
def test_hosts_of_the_cluster_need_no_proxy(before, after):
    """What the user has excepted stays so, and nothing is set where no proxy is."""
    environment = dict(before)
    bypass_proxies(["host0:1", "[::1]:2", "host0:3"], environment)
    assert environment == before | ({} if after is None else {"no_grpc_proxy": after})
