"""The door of a cluster, with real sockets: guests come in, and strangers neither come in nor hold it up."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx._src.cluster.connections import door as door_module
from phalanx._src.cluster.connections.door import Door, knock, read_line
from phalanx._src.cluster.connections.secret import Secret
from phalanx._src.launch.plan import free_ports
from phalanx.errors import StartupError

SECRET = Secret("a secret of the cluster")
HELLO = {"rank": 1}
# For events that come, so that nobody waits for so long.
DEADLINE_S = 120.0


@pytest.fixture
def address():
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def door(address):
    with Door(address, SECRET, size=2) as door:
        yield door


def connection_to(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def enters(door, address, secret=SECRET):
    """The guest that comes now, while the door is open."""
    with connection_to(address) as asking, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(knock, asking, secret, HELLO, DEADLINE_S)
        guests = []
        while not guests and not asked.done():
            guests = door.guests(0.05)
        assert asked.result() is None
        return guests[0]


def test_guest_with_the_secret(door, address):
    """Its hello arrives, and both ends may then say what they like."""
    guest = enters(door, address)
    assert guest.hello == HELLO
    guest.connection.close()


def test_guest_with_another_secret(door, address):
    with pytest.raises(StartupError, match="has another secret"):
        enters(door, address, Secret("another secret of a cluster"))
    assert door.refused == 1


def answering(said):
    """A connection whose other end has said this, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
    theirs.sendall(said)
    return ours, theirs


def test_host_without_the_secret():
    """One that lets in everybody does not know the secret: the guest goes away."""
    ours, theirs = answering(b'{"nonce": "00"}\n{"proof": "00"}\n')
    with ours, theirs, pytest.raises(StartupError, match="has another secret"):
        knock(ours, SECRET, HELLO, DEADLINE_S)


def greeting(guest, own="own"):
    """The nonce of the host, and a valid answer to it."""
    nonce, hello = json.loads(read_line(guest, time.monotonic() + DEADLINE_S))["nonce"], json.dumps(HELLO)
    proof = SECRET.proof("guest", nonce, own, hello)
    return nonce, json.dumps({"nonce": own, "hello": hello, "proof": proof}).encode() + b"\n"


def test_host_that_was_recorded(door, address):
    """What a host has said to another guest proves nothing to this one."""
    with connection_to(address) as other:
        door.guests(DEADLINE_S)
        nonce, answer = greeting(other)
        other.sendall(answer)
        (guest,) = door.guests(DEADLINE_S)
        proof = read_line(other, time.monotonic() + DEADLINE_S)
        guest.connection.close()
    ours, theirs = answering(json.dumps({"nonce": nonce}).encode() + b"\n" + proof)
    with ours, theirs, pytest.raises(StartupError, match="has another secret"):
        knock(ours, SECRET, HELLO, DEADLINE_S)


def test_host_that_reflects_the_proof_of_the_guest():
    """A guest's proof is none of a host, although both know the same secret."""
    ours, theirs = answering(b'{"nonce": "same"}\n')
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(knock, ours, SECRET, HELLO, DEADLINE_S)
        proof = json.loads(read_line(theirs, time.monotonic() + DEADLINE_S))["proof"]
        theirs.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        with pytest.raises(StartupError, match="has another secret"):
            asked.result()


@pytest.mark.parametrize("said", [b'{"nonce": "\\ud800"}', b"SSH-2.0-OpenSSH", b"[" * 60_000])
def test_host_that_says_garbage(said):
    ours, theirs = answering(said + b"\n")
    with ours, theirs:
        assert knock(ours, SECRET, HELLO, DEADLINE_S).startswith(said[:10])


def test_host_that_speaks_slowly():
    """The time limit is that of the whole answer, not of each byte."""
    ours, theirs = answering(b"{")
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        deadline = time.monotonic() + DEADLINE_S
        asked = pool.submit(knock, ours, SECRET, HELLO, 0.3)
        while not asked.done():
            theirs.sendall(b"x")
            time.sleep(0.05)
            assert time.monotonic() < deadline
        assert asked.result().startswith(b"{x")


def test_proof_of_another_connection(door, address):
    """A proof is good for one connection: who has overheard it cannot use it again."""
    with connection_to(address) as first, connection_to(address) as second:
        door.guests(DEADLINE_S)
        _, overheard = greeting(first)
        second.sendall(overheard)
        assert door.guests(DEADLINE_S) == []
        assert door.refused == 1
        first.sendall(overheard)
        (guest,) = door.guests(DEADLINE_S)
        guest.connection.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[]\n",
        b'{"rank": 1}\n',
        b'{"nonce": 1, "hello": 2, "proof": 3}\n',
        b'{"nonce": "a", "hello": "{}", "proof": "\xc3\xa9"}\n',
        b'{"nonce": "a", "hello": "{}", "proof": "\\ud800"}\n',
        b'{"nonce": "\\ud800", "hello": "{}", "proof": "a"}\n',
        b'{"nonce": "a", "hello": "\\ud800", "proof": "a"}\n',
        b"[" * 60_000 + b"\n",
        b"x" * (1 << 17),
    ],
)
def test_garbage_is_closed(door, address, said):
    """Whatever a stranger sends, it does not come in, and the next guest does."""
    with connection_to(address) as stranger:
        stranger.sendall(said)
        deadline, is_closed = time.monotonic() + DEADLINE_S, False
        while not is_closed:
            assert door.guests(0.05) == []
            assert time.monotonic() < deadline
            is_closed = not door._strangers
    enters(door, address).connection.close()


def test_hello_in_pieces(door, address):
    """It counts once its line is complete."""
    with connection_to(address) as guest:
        door.guests(DEADLINE_S)
        _, whole = greeting(guest)
        guest.sendall(whole[:20])
        assert door.guests(DEADLINE_S) == []
        guest.sendall(whole[20:])
        (found,) = door.guests(DEADLINE_S)
        found.connection.close()


def test_silent_strangers_are_closed_in_time(door, address, monkeypatch):
    """Their time is over although nobody else comes."""
    monkeypatch.setattr(door_module, "_HELLO_S", 0.1)
    with connection_to(address) as stranger:
        door.guests(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        assert door.guests(2 * DEADLINE_S) == []
        while door._strangers:
            assert door.guests(0) == []
            assert time.monotonic() < deadline
        read_line(stranger, deadline)
        assert stranger.recv(1) == b""


def test_crowd_of_silent_strangers(door, address):
    """The oldest of them make room, so that a guest comes in."""
    crowd = []
    try:
        for _ in range(400):
            crowd.append(connection_to(address))
            door.guests(0)
        assert len(door._strangers) > 200
        assert len(door._strangers) <= 256
        enters(door, address).connection.close()
    finally:
        for stranger in crowd:
            stranger.close()
