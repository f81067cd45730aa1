"""The door of a cluster: members come before and after the message, and strangers learn nothing. The sockets are real."""

import contextlib
import queue
import socket
import struct
import threading

import pytest
from tests.waiting import wait_until

from phalanx._src.cluster.connections.door import Door, Entrance, MeetingPlace
from phalanx._src.cluster.connections.listener import listen
from phalanx._src.cluster.connections.messages import SignOfLife
from phalanx._src.cluster.connections.ports import HeldPort
from phalanx._src.cluster.connections.secret import Secret
from phalanx.errors import StartupError

OURS, THEIRS = Secret("a secret of the cluster"), Secret("a secret of another one")
PLACE = MeetingPlace("there", "")
DEADLINE_S = 60.0


@pytest.fixture
def address():
    with HeldPort("127.0.0.1") as held:
        yield held.address


def entering(address, name, secret=OURS, timeout_s=DEADLINE_S):
    """Lets a member enter in a thread. Returns a function that returns its entrance, or the error."""
    came = queue.SimpleQueue()

    def enter():
        try:
            came.put(Entrance(address, secret, name, timeout_s))
        except StartupError as e:
            came.put(e)

    threading.Thread(target=enter, daemon=True).start()
    return lambda: came.get(timeout=2 * DEADLINE_S)


def test_members_learn_where_to_meet(address):
    """Before the message and after it; the end of the chief is the end of their connections, and theirs is noticed."""
    first = entering(address, "worker:0")
    with contextlib.closing(Door(address, OURS, 2)) as door:
        wait_until(lambda: door.names == ["worker:0"])
        assert door.is_local
        door.tell(PLACE)
        with first() as one:
            one._connection.say(SignOfLife())  # It need not, but may.
            with entering(address, "ps:0")() as other:
                assert one.message == other.message == PLACE
                assert sorted(door.names) == ["ps:0", "worker:0"]
                assert one.is_open(0.01)
            wait_until(lambda: door.names == ["worker:0"])
            assert not one.has_said_so
            door.close()
            assert not one.is_open(DEADLINE_S)
            assert one.has_said_so


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("end", [lambda connection: connection.shutdown(socket.SHUT_RDWR), reset], ids=["end", "reset"])
def test_a_chief_that_is_killed_says_nothing(address, end):
    """Its kernel closes the connection, or its machine has started again and resets it."""
    with contextlib.closing(Door(address, OURS, 1)) as door:
        door.tell(PLACE)
        with entering(address, "worker:0")() as member:
            end(door._here[0].socket)
            assert not member.is_open(DEADLINE_S)
            assert not member.has_said_so


def test_a_chief_that_ends_at_once(address):
    """Its message and its end may come in one packet; without a message, the member was not needed."""
    door = Door(address, OURS, 1)
    member = entering(address, "worker:0")
    wait_until(lambda: door.names == ["worker:0"])
    door.close()
    with member() as one:
        assert one.message is None
        assert one.has_said_so
        assert not one.is_open(DEADLINE_S)


def test_another_secret_does_not_open_the_door(address):
    """Neither does garbage; both are no members."""
    with contextlib.closing(Door(address, OURS, 2)) as door:
        door.tell(PLACE)
        assert "has another secret" in str(entering(address, "worker:0", THEIRS)())
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), 60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"there" not in b"".join(iter(lambda: stranger.recv(100), b""))
        assert door.names == []


def test_stranger_at_the_address_of_the_chief(address):
    """It gets a proof of no use to it, and nothing else; the member says what answers there."""
    heard = []
    with listen(address) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        connection.settimeout(0.2)
                        with contextlib.suppress(OSError):
                            heard.append(connection.recv(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StartupError, match="(?s)another program answers there: b'HTTP/1.1 400 Bad Request.*HINT"):
            Entrance(address, OURS, "worker:0", 1.0)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert b"".join(heard) == b""


def test_nobody_at_the_address_of_the_chief(address):
    with pytest.raises(StartupError, match=f"(?s)no process listens at the address of the chief, {address}.*HINT"):
        Entrance(address, OURS, "worker:0", 0.05)
