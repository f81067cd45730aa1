# SPDX-License-Identifier: Apache-2.0
"""The ports of this process: how it chooses them, keeps them for itself, and finds its own sockets. Uses the standard library only."""

import os
import resource
import select
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from errno import EADDRINUSE
from typing import Self, final

from phalanx._src.cluster.connections.hosts import LOOPBACK, PRIVATE, joined, place_to_listen

Socket = socket.socket
"""The type of a connection. Other rooms get theirs from this one, and open none themselves."""


_LONGEST_ROOT = 64


@final
class HeldPort:
    """A port at which no other user of this machine can listen, until it is released. Processes of this user can.

    Args:
      host: the address of this machine at which the port is.
      port: the port. 0 for a free one.

    Raises:
      OSError: another program has the port, or the address does not belong to this machine.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        family, place = place_to_listen(host, port)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            _share(self._socket)
            self._socket.bind(place)
        except OSError:
            self._socket.close()
            raise
        # With this option on both sides, the kernel would let another user listen at a port where nobody listens yet.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        self.host, self.port = host, int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address: `host:port`."""
        return joined(self.host, self.port)

    def close(self) -> None:
        """Releases the port."""
        self._socket.close()


def held_ports(count: int) -> list[HeldPort]:
    """Returns `count` distinct ports of this machine, which other machines cannot reach and other users cannot take."""
    return [HeldPort(LOOPBACK) for _ in range(count)]


def listen_at(host: str, port: int, backlog: int | None = None) -> Socket:
    """Returns a socket that listens at an address of this machine, of which this user may hold the port.

    Raises:
      OSError: this process cannot listen there.
    """
    family, place = place_to_listen(host, port)
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        _share(server)
        server.bind(place)
        # The kernel would divide the connections between two processes of this user that listen at one port.
        if _answers(server):
            raise OSError(EADDRINUSE, os.strerror(EADDRINUSE))
        server.listen(*([] if backlog is None else [backlog]))
    except OSError:
        server.close()
        raise
    return server


def _share(unbound: Socket) -> None:
    """Makes it possible that several sockets of this user are bound to one port, even soon after it was in use."""
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        unbound.setsockopt(socket.SOL_SOCKET, option, 1)


def _answers(bound: Socket) -> bool:
    """Whether a process listens where a socket is bound that does not listen."""
    host, port = bound.getsockname()[:2]
    with socket.socket(bound.family, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        # Nobody else can be bound to the port, so an answer comes from another process of this user.
        return client.connect_ex((host, port)) == 0


def something_waits(waiting: Socket) -> bool:
    """Returns whether data, or a connection that nobody has accepted, waits at a socket. Needs no file descriptor."""
    # Strangers may have opened more files than `select` can look at.
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    return bool(poll.poll(0))


def sockets_of_process() -> Iterator[Socket]:
    """Yields copies of the TCP sockets of this process, which the caller closes."""
    for name in os.listdir("/dev/fd"):
        # The descriptor may have been closed.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy
            else:
                copy.close()


def listening_ports() -> set[int]:
    """Returns the ports at which this process listens."""
    ports = set()
    # The kernel knows it from the socket, even if a library has opened it.
    for each in sockets_of_process():
        with each, suppress(OSError):
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(int(each.getsockname()[1]))
    return ports


def descriptors_at(place: int | str, but: Set[int]) -> list[int]:
    """Returns the file descriptors of incoming connections to a port or a path of this process, without those in `but`."""
    descriptors = []
    for fd in {int(name) for name in os.listdir("/dev/fd")} - but:
        # The descriptor may have been closed, and may not be a connected socket.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                name = connection.getsockname()
                if (name if connection.family == socket.AF_UNIX else name[1]) == place:
                    connection.getpeername()
                    descriptors.append(fd)
    return descriptors


def short_folder() -> str:
    """Returns a folder for temporary files whose path leaves room: paths of sockets have at most 107 characters."""
    root = tempfile.gettempdir()
    return root if len(root) <= _LONGEST_ROOT else "/tmp"


@final
class PrivateAddress:
    """An address that only processes of this user reach: a socket in a folder that no other user can enter.

    Attributes:
      address: the address, in the words of gRPC.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="phalanx-", dir=short_folder())
        self.address = f"{PRIVATE}{self._folder}/service"

    def close(self) -> None:
        """Removes the address. Connections stay."""
        shutil.rmtree(self._folder, ignore_errors=True)


def stop_reading(connection: Socket) -> None:
    """Makes a read of a connection end at once, in all threads that have it. The other end still gets what was sent to it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def cut(connection: Socket) -> None:
    """Ends a connection in both directions, in all threads that have it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def raise_limit_of_descriptors() -> None:
    """Raises the limit of file descriptors to what the system allows, so that strangers cannot use them up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS allows fewer than it says.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def hosts_of(connections: Sequence[Socket]) -> tuple[set[str], bool]:
    """Returns the addresses of this machine at which connections end, and whether all of them begin on this machine too."""
    ends = []
    for connection in connections:
        with suppress(OSError):  # The other process has gone already.
            ends.append((str(connection.getsockname()[0]), str(connection.getpeername()[0])))
    return {own for own, _ in ends}, len(ends) == len(connections) and all(own == other for own, other in ends)
