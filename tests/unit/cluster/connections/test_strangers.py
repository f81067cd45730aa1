"""Strangers at a port are named, once per minute and machine."""

import os
import socket

import pytest

from phalanx._src.cluster.connections.listener import Listener, listen, send
from phalanx._src.cluster.connections.secret import Secret
from phalanx._src.cluster.connections.strangers import Strangers

OURS = Secret("a secret of the cluster")


def test_one_line_per_minute_and_machine():
    told, now_s = [], [0.0]
    strangers = Strangers("the port of all", told.append, lambda: now_s[0])
    for host, s in (("192.0.2.1", 0), ("192.0.2.1", 30), ("192.0.2.2", 31), ("192.0.2.1", 61)):
        now_s[0] = s
        strangers.note([(host, 1), (host, 2)])
    assert [line.split("from ")[1].split(".  ")[0][:9] for line in told] == ["192.0.2.1", "192.0.2.2", "192.0.2.1"]
    assert "Strangers have connected to the port of all" in told[0]
    assert "2 at this moment" in told[0]
    assert strangers.places == {"192.0.2.1", "192.0.2.2"}


def test_user_of_this_machine_is_named():
    """The kernel knows whose the other end is."""
    told = []
    with listen("127.0.0.1:0") as server, socket.create_connection(server.getsockname()) as stranger:
        with server.accept()[0] as here:
            Strangers("a port", told.append).note([here.getpeername()])
        assert stranger.getsockname()[0] == "127.0.0.1"
    assert f"from 127.0.0.1 (user {os.getuid()} of this machine)." in told[0] or not os.path.exists("/proc/net/tcp")


def test_closed_connection_has_no_user():
    """The kernel writes 0 then, which is no sign of root."""
    told = []
    with listen("127.0.0.1:0") as server:
        stranger = socket.create_connection(server.getsockname())
        with server.accept()[0] as here:
            stranger.close()
            Strangers("a port", told.append).note([here.getpeername()])
    assert "from 127.0.0.1. " in told[0]


@pytest.mark.parametrize("said", ["garbage", "another secret", "nothing"])
def test_listener_names_strangers(said):
    """But not whoever only looks whether it is there."""
    told = []
    with Listener("127.0.0.1:0", OURS, 1, told.append) as listener:
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port)), 60) as stranger:
            assert listener.accepted(60) == []
            if said == "garbage":
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif said == "another secret":
                send(stranger, {"nonce": "n", "hello": "{}", "proof": "p"})
            else:
                stranger.shutdown(socket.SHUT_WR)
            assert listener.accepted(60) == []
    assert bool(told) == (said != "nothing")
