"""What the doctor says of names, proxies, ports and addresses, before and after the processes meet."""

import socket

import pytest

from phalanx._src.cluster.connections.listener import listen
from phalanx._src.tools.doctor.network import (
    check_name,
    check_network,
    check_port,
    check_proxies,
    judge_addresses,
    own_address,
)

LOOPS = "127.1"
"""A name that leads back to this machine, to the resolver: no address in full."""
NOWHERE = "no.such.host.invalid"


def test_control_characters_are_written_out():
    """The environment may have any text for a host."""
    place = "\x1b[2J:1"
    shown = f"{check_name((place, 'host1:1'), 1)}{check_port(place)}"
    assert r"\x1b[2J" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("addresses", "rank", "said"),
    [
        (
            (f"{LOOPS}:1", "host1:1"),
            0,
            f"PASS names: {LOOPS} resolves to its own machine (127.0.0.1), so rank 0 listens at all",
        ),
        ((f"{LOOPS}:1", f"{LOOPS}:2"), 1, f"PASS names: {LOOPS} resolves to its own machine (127.0.0.1)"),
        (
            (f"{LOOPS}:1", "host1:1"),
            1,
            f"FAIL names: on the machine of rank 1, {LOOPS} is 127.0.0.1, which is that",
        ),
        ((f"{NOWHERE}:1", "host1:1"), 1, f"FAIL names: rank 1 does not find {NOWHERE}, the host of rank 0: "),
        (("192.0.256:1", "host1:1"), 1, "PASS names: rank 1 finds 192.0.256 at 192.0.1.0."),
    ],
    ids=["own name", "same machine", "name of another machine", "unknown name", "name"],
)
def test_name_of_the_first_rank(addresses, rank, said):
    """The other ranks must find it; the names of these lead anywhere."""
    found = str(check_name(addresses, rank))
    assert found.startswith(said)
    assert found.startswith("PASS") or "HINT: write " in found


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "192.0.2.1:1"])
def test_addresses_need_no_name(address):
    assert check_network([address, "192.0.2.2:1"], 1, {}) == []


def test_proxy_is_named_without_its_password():
    assert check_proxies({"https_proxy": ""}) is None
    found = check_proxies({"http_proxy": "http://user:secret@proxy:1", "https_proxy": "http://proxy:1"})
    assert str(found) == "PASS proxies: https_proxy, http_proxy: the workers do not use it between each other."


def test_port_that_is_taken():
    """Or that belongs to a name that leads nowhere: the reason is that of the system."""
    with listen("127.0.0.1:0") as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = str(check_port(address))
    assert found.startswith(
        f"FAIL port: rank 0 cannot listen at {address}: Address already in use.\nHINT: end the process"
    )
    assert str(check_port(address)) == f"PASS port: rank 0 can listen at {address}."
    # An address of the documentation, which no machine has: this one has another index.
    other = str(check_port("192.0.2.1:1234"))
    assert "Cannot assign requested address.\nHINT: another index in the task of this machine" in other
    with pytest.raises(socket.gaierror) as error:
        listen(f"{NOWHERE}:1")
    assert error.value.strerror in str(check_port(f"{NOWHERE}:1"))


def test_addresses_of_several_machines():
    """Two hosts that send from one address are on one machine, or behind one router."""
    assert own_address(["127.0.0.1:1", "localhost:2"]) == ""
    assert judge_addresses(["127.0.0.1:1", "127.0.0.1:2"], ["", ""]) is None
    hosts = ["host0:1", "host0:2", "host1:1"]
    passed = judge_addresses(hosts, ["10.0.0.1", "10.0.0.1", "10.0.0.2"])
    assert (
        str(passed)
        == "PASS addresses: rank 0 sends from 10.0.0.1, rank 1 sends from 10.0.0.1, rank 2 sends from 10.0.0.2."
    )
    failed = str(judge_addresses(hosts, ["10.0.0.1", "10.0.0.1", "10.0.0.1"]))
    same = "rank 0 (host0) and rank 2 (host1) send from the same address, 10.0.0.1."
    assert failed == f"FAIL addresses: {same}\nHINT: name each machine by an address of the network that joins them"
