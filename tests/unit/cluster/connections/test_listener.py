"""The door of a cluster, with real sockets: peers come in, and strangers neither come in nor hold it up."""

import contextlib
import json
import select
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx._src.cluster.connections import listener as listener_module
from phalanx._src.cluster.connections.listener import Connection, Listener, answers, enter, handshake, read_line
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
def listener(address):
    with Listener(address, SECRET, size=2) as listener:
        yield listener


def connection_to(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def enters(listener, address, secret=SECRET):
    """The peer that comes now, while the door is open."""
    with connection_to(address) as asking, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(handshake, asking, secret, HELLO, DEADLINE_S)
        peers = []
        while not peers and not asked.done():
            peers = listener.accepted(0.05)
        assert asked.result() is None
        return peers[0]


def test_client_with_the_secret(listener, address):
    """Its hello arrives, and both ends may then say what they like."""
    peer = enters(listener, address)
    assert peer.hello == HELLO
    peer.close()


def test_client_with_another_secret(listener, address):
    with pytest.raises(StartupError, match="has another secret"):
        enters(listener, address, Secret("another secret of a cluster"))
    assert listener.refused == 1


def answering(said):
    """A connection whose other end has said this, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
    theirs.sendall(said)
    return ours, theirs


def test_server_without_the_secret():
    """One that accepts everybody does not know the secret: the client goes away."""
    ours, theirs = answering(b'{"nonce": "00"}\n{"proof": "00"}\n')
    with ours, theirs, pytest.raises(StartupError, match="has another secret"):
        handshake(ours, SECRET, HELLO, DEADLINE_S)


def test_server_that_says_something_else_after_the_proof():
    ours, theirs = answering(b'{"nonce": "00"}\nbye\n')
    with ours, theirs:
        assert handshake(ours, SECRET, HELLO, DEADLINE_S) == b"bye\n"


def reset(connection):
    """Ends a connection as a machine does that knows nothing of it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_server_that_has_gone():
    """Its address is no longer known, but what it has said is."""
    ours, theirs = answering(b'{"nonce": "00"}\n{"proof": "00"}\n')
    reset(theirs)
    with ours, pytest.raises(StartupError, match="connected to, which has gone, has another secret"):
        handshake(ours, SECRET, HELLO, DEADLINE_S)


def test_no_time_for_an_attempt(address):
    with pytest.raises(OSError, match="it closes the connection, or is silent"):
        enter(address, SECRET, HELLO, 0.0)


def test_whether_somebody_listens(address):
    with Listener(address, SECRET, size=2):
        assert answers(address)
    assert not answers(address)


def greeting(peer, own="own"):
    """The nonce of the server, and a valid answer to it."""
    nonce, hello = json.loads(read_line(peer, time.monotonic() + DEADLINE_S))["nonce"], json.dumps(HELLO)
    proof = SECRET.proof("client", nonce, own, hello)
    return nonce, json.dumps({"nonce": own, "hello": hello, "proof": proof}).encode() + b"\n"


def test_server_that_was_recorded(listener, address):
    """What a server has sent to another client proves nothing to this one."""
    with connection_to(address) as other:
        listener.accepted(DEADLINE_S)
        nonce, answer = greeting(other)
        other.sendall(answer)
        (peer,) = listener.accepted(DEADLINE_S)
        proof = read_line(other, time.monotonic() + DEADLINE_S)
        peer.close()
    ours, theirs = answering(json.dumps({"nonce": nonce}).encode() + b"\n" + proof)
    with ours, theirs, pytest.raises(StartupError, match="has another secret"):
        handshake(ours, SECRET, HELLO, DEADLINE_S)


def test_server_that_reflects_the_proof_of_the_client():
    """The proof of a client is none of a server, although both know the secret."""
    ours, theirs = answering(b'{"nonce": "same"}\n')
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(handshake, ours, SECRET, HELLO, DEADLINE_S)
        proof = json.loads(read_line(theirs, time.monotonic() + DEADLINE_S))["proof"]
        theirs.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        with pytest.raises(StartupError, match="has another secret"):
            asked.result()


@pytest.mark.parametrize("said", [b'{"nonce": "\\ud800"}', b"SSH-2.0-OpenSSH", b"[" * 60_000])
def test_server_that_says_garbage(said):
    ours, theirs = answering(said + b"\n")
    with ours, theirs:
        assert handshake(ours, SECRET, HELLO, DEADLINE_S).startswith(said[:10])


def test_server_that_speaks_slowly():
    """The time limit is that of the whole answer, not of each byte."""
    ours, theirs = answering(b"{")
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        deadline = time.monotonic() + DEADLINE_S
        asked = pool.submit(handshake, ours, SECRET, HELLO, 0.3)
        while not asked.done():
            theirs.sendall(b"x")
            time.sleep(0.05)
            assert time.monotonic() < deadline
        assert asked.result().startswith(b"{x")


def test_proof_of_another_connection(listener, address):
    """A proof is good for one connection: who has overheard it cannot use it again."""
    with connection_to(address) as first, connection_to(address) as second:
        listener.accepted(DEADLINE_S)
        _, overheard = greeting(first)
        second.sendall(overheard)
        assert listener.accepted(DEADLINE_S) == []
        assert listener.refused == 1
        first.sendall(overheard)
        (peer,) = listener.accepted(DEADLINE_S)
        peer.close()


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
def test_garbage_is_closed(listener, address, said):
    """Whatever a pending sends, it does not come in, and the next peer does."""
    with connection_to(address) as pending:
        pending.sendall(said)
        deadline, is_closed = time.monotonic() + DEADLINE_S, False
        while not is_closed:
            assert listener.accepted(0.05) == []
            assert time.monotonic() < deadline
            is_closed = not listener._pending
    enters(listener, address).close()


def test_hello_in_pieces(listener, address):
    """It counts once its line is complete."""
    with connection_to(address) as peer:
        listener.accepted(DEADLINE_S)
        _, whole = greeting(peer)
        peer.sendall(whole[:20])
        assert listener.accepted(DEADLINE_S) == []
        peer.sendall(whole[20:])
        (found,) = listener.accepted(DEADLINE_S)
        found.close()


def test_silent_connections_are_closed_in_time(listener, address, monkeypatch):
    """Their time is over although nobody else comes."""
    monkeypatch.setattr(listener_module, "_HELLO_S", 0.1)
    with connection_to(address) as pending:
        listener.accepted(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        assert listener.accepted(2 * DEADLINE_S) == []
        while listener._pending:
            assert listener.accepted(0) == []
            assert time.monotonic() < deadline
        read_line(pending, deadline)
        assert pending.recv(1) == b""


def test_crowd_of_silent_connections(listener, address):
    """The oldest of them make room, so that a peer comes in."""
    crowd = []
    try:
        for _ in range(400):
            crowd.append(connection_to(address))
            listener.accepted(0)
        assert len(listener._pending) > 200
        assert len(listener._pending) <= 256
        enters(listener, address).close()
    finally:
        for pending in crowd:
            pending.close()


FEW_DESCRIPTORS = """
import os, resource, socket
from phalanx._src.cluster.connections.listener import Listener
from phalanx._src.cluster.connections.secret import Secret

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
with Listener("127.0.0.1:0", Secret("of the test"), size=2) as listener:
    place = "127.0.0.1", int(listener.address.rpartition(":")[2])
    clients = [socket.socket() for _ in range(5)]
    lowest = os.dup(0)
    os.close(lowest)
    for left, visitors in (0, clients[:3]), (1, []), (1, clients[3:4]), (2, clients[4:]):
        for visitor in visitors:
            visitor.connect(place)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, most))
        assert listener.accepted(0) == []
        ports = [pending.connection.getpeername()[1] for pending in listener._pending.values()]
        print([at for at, client in enumerate(clients) if client.getsockname()[1] in ports])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a connection waits for a descriptor on Linux")
def test_few_descriptors_are_left(run_python):
    """A connection waits if nothing can be closed. Otherwise the oldest of those that have proved nothing makes room, if another one waits."""
    # A process with threads of its own could open and close descriptors meanwhile.
    assert run_python(FEW_DESCRIPTORS).splitlines() == ["[]", "[2]", "[3]", "[3, 4]"]


def test_pending_connection_that_is_reset(listener, address):
    """It is kept while nothing arrives, even if the kernel says that something has."""
    pending = connection_to(address)
    listener.accepted(DEADLINE_S)
    (waiting,) = listener._pending.values()
    assert listener._hear(waiting) == []
    assert listener._pending
    reset(pending)
    assert listener.accepted(DEADLINE_S) == []
    assert not listener._pending


FORKS = """
import os, socket
from phalanx._src.cluster.connections.listener import Connection

with socket.create_server(("127.0.0.1", 0)) as server:
    ours = Connection(socket.create_connection(server.getsockname()))
    theirs, _ = server.accept()
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
ours.close()
theirs.settimeout(60)
print(theirs.recv(1))
os.close(writer)
os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_forked_child_keeps_no_connection_open(run_python):
    """Others notice at once that a process has ended, although its data loader has not."""
    assert run_python(FORKS) == "b''\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when the other machine has answered last")
@pytest.mark.parametrize("is_late", [False, True])
def test_reset_after_a_silence(listener, address, monkeypatch, is_late):
    """It does not mean that the process has ended: its machine may have been cut off, and may have given up the connection since."""
    with connection_to(address) as asking, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(handshake, asking, SECRET, HELLO, DEADLINE_S)
        peers = []
        while not peers:
            peers = listener.accepted(0.05)
        assert asked.result() is None
        if is_late:
            time.sleep(0.4)
            assert listener_module.silence_s(peers[0].socket) > 0.2
            monkeypatch.setattr(listener_module, "_FRESH_S", 0.2)
        reset(asking)
    peers[0].socket.settimeout(DEADLINE_S)
    assert peers[0].hear(()) == ([], False)
    assert peers[0].is_closed is not is_late
    peers[0].close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives up a machine that takes nothing")
@pytest.mark.parametrize("says", [False, True])
def test_machine_that_no_longer_answers(says):
    """It has not closed the connection, whichever call learns from the kernel that this one has given it up."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        assert poll.poll(1000 * DEADLINE_S)
        connection = Connection(ours)
        if says:
            connection.say(b"are you there?")
        assert connection.hear([]) == ([], False)
        assert not connection.is_closed
