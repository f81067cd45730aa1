# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections: both ends prove that they know the secret of the cluster before anything else is sent.

The server sends a nonce. The client answers with its own nonce, its hello, and a proof that it knows the secret. The server then
proves the same. Both proofs contain both nonces, so that neither can be replayed. All messages are lines of JSON. Uses the standard
library only.
"""

import contextlib
import json
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from errno import EAGAIN, ECONNRESET, EPIPE
from socket import IPPROTO_TCP, SHUT_WR, TCP_NODELAY
from types import MappingProxyType
from typing import Any, Self, TypeVar, final

from phalanx._src.cluster.connections.hosts import LOOPBACK, joined
from phalanx._src.cluster.connections.messages import M, Message, SignOfLife, decoded, encoded, parsed
from phalanx._src.cluster.connections.ports import Socket, cut, listen_at
from phalanx._src.cluster.connections.secret import TOKEN, Secret
from phalanx._src.cluster.connections.strangers import Strangers
from phalanx._src.cluster.spec import host_and_port
from phalanx.errors import StartupError

_HELLO_S = 5.0
_MIN_BACKLOG = 128
_MOST_PENDING = 256
_AT_ONCE = 32
_LONGEST_LINE = 1 << 16
_CONNECT_S = 2.0
ANSWER_S = 40
"""Time that another machine may be silent, in seconds. See `expect_answers`.

When a cable is pulled, the last answer may be 10 s old. What remains is not shorter than the silence that the watchdog allows (30 s): a launcher
must not give up before the processes that it has started do.
"""
_PROBE_S, _PROBES = 5, 6
_FRESH_S = 20.0
"""Longest time in seconds since the last answer of a machine after which a reset means that the process there has ended."""
_LAST_ANSWER = 56
"""Offset of the time since the last answer, in milliseconds, in `struct tcp_info` of Linux."""
_SILENT = "it closes the connection, or is silent"
_FIRST_RETRY_S = 0.005
RETRY_S = 0.1
"""Time between two attempts to connect, in seconds. It grows to this, because processes that meet again are there at once."""

T = TypeVar("T")

_of_this_process: "weakref.WeakSet[Socket]" = weakref.WeakSet()
"""The sockets of all connections. A child that is forked, for example by a data loader, would keep those of a killed process open."""


def _close_in_child() -> None:
    for connection in list(_of_this_process):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


@final
class Connection:
    """A connection both of whose ends have proved that they know the secret.

    Args:
      socket: its socket.
      hello: the first message of the client, as JSON has it: untyped, because even a process of another version must be understood.

    Attributes:
      is_closed: whether the other process has closed it, or has ended. False if its machine no longer answers, because the process may still run.
    """

    def __init__(self, socket: Socket, hello: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.socket, self.hello, self._read = socket, hello, b""
        self.is_closed = False
        self._failure: OSError | None = None
        # A closing socket with unread data drops what Nagle's algorithm still holds back: a process that had just said
        # that it leaves would count as killed (RFC 896; RFC 1122, section 4.2.2.13).
        self.socket.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        _of_this_process.add(self.socket)

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self.socket.fileno()

    def say(self, message: Message | bytes) -> None:
        """Sends a message, which may be encoded already. A process that has ended needs none."""
        # `hear` notices a closed connection. If the socket does not block, a stalled process accepts no more data.
        try:
            self.socket.sendall(encoded(message) if isinstance(message, Message) else message)
        except OSError as e:
            # The kernel reports the end of a connection once. After that, one to a silent machine reads like one that was closed.
            if e.errno not in (None, EAGAIN):
                self._failure = self._failure or e

    def hear(self, kinds: Iterable[type[M]]) -> tuple[list[M | SignOfLife], bool]:
        """Returns the messages of these classes that have arrived, and whether the connection is still open.

        Raises:
          TypeError: a message has other fields than its class, or values of other types.
        """
        try:
            new, failure = self.socket.recv(_LONGEST_LINE), self._failure
        except OSError as e:
            new, failure = b"", e
        self.is_closed = not new and (failure is None or self._is_end(failure))
        *whole, self._read = (self._read + new).split(b"\n")
        try:
            return [decoded(line, kinds) for line in whole], bool(new)
        except (ValueError, RecursionError):  # A process of the cluster sends JSON only.
            return [], False

    def _is_end(self, failure: OSError) -> bool:
        """Whether the other process has closed the connection, or has ended, if a call has failed like this."""
        # Whoever has given up this connection after a long silence answers with a reset too, when the cable is plugged in again.
        return failure.errno == EPIPE or (failure.errno == ECONNRESET and silence_s(self.socket) < _FRESH_S)

    def messages(self, kinds: Iterable[type[M]]) -> Iterator[M | SignOfLife]:
        """Yields the messages of these classes until the connection ends. Waits for them, if the socket blocks."""
        is_open = True
        while is_open:
            messages, is_open = self.hear(kinds)
            yield from messages

    def hang_up(self) -> None:
        """Sends nothing more."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(SHUT_WR)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


@dataclass
class _PendingConnection:
    """A connection whose client has proved nothing yet."""

    connection: socket.socket
    nonce: str
    until_s: float
    text: bytes = field(default=b"", init=False)


@final
class Listener:
    """Listens at an address, and accepts clients that know the secret.

    Unauthenticated clients cannot block it: it waits for all connections at once, and drops handshakes that are silent or oversized.

    Args:
      address: `host:port` to listen at.
      secret: the secret of the cluster.
      size: number of clients that may connect at the same time.
      tell: writes a line for the user, about strangers. None means the standard error.

    Attributes:
      refused: number of connections whose proof was wrong.

    Raises:
      OSError: this process cannot listen there.
    """

    def __init__(self, address: str, secret: Secret, size: int, tell: Callable[[str], None] | None = None) -> None:
        # If the backlog is full, the kernel drops connections, and the other processes repeat them only after 1 s or more.
        self._server = listen(address, max(_MIN_BACKLOG, size))
        self._server.setblocking(False)
        self._address = address
        self._strangers = Strangers(f"the port {self.address}", tell)
        self._secret, self.refused = secret, 0
        self._most = max(_MOST_PENDING, 2 * size)
        self._pending: dict[int, _PendingConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._selector.close()
        self._server.close()

    @property
    def address(self) -> str:
        """The address of this listener, with its port."""
        host, _ = split(self._address)
        return joined(host, self._server.getsockname()[1])

    @property
    def fileno(self) -> int:
        """A file descriptor that is ready when `accepted` has something to do."""
        return self._selector.fileno()

    def accepted(self, timeout_s: float) -> list[Connection]:
        """Returns the connections that have been authenticated. Waits up to `timeout_s` seconds for the next event."""
        now_s = time.monotonic()
        while (oldest := self._oldest()) and oldest.until_s <= now_s:
            self._turn_away(oldest)
        if oldest:
            timeout_s = min(timeout_s, oldest.until_s - now_s)
        ready = [key.data for key, _ in self._selector.select(max(0.0, timeout_s))]
        # In a flood of connections, those whose answer has arrived must not be dropped for new ones.
        connections = [peer for pending in ready if pending for peer in self._hear(pending)]
        if None in ready:
            self._open()
        return connections

    def _open(self) -> None:
        """Accepts some of the connections that wait, and closes the oldest ones if there are too many."""
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError:  # No file descriptor is left, even if nobody waits, or the other end has gone already.
                if not has_arrived(self._server):
                    return
                self._make_room()
                continue
            if len(self._pending) >= self._most:
                self._make_room()
            pending = _PendingConnection(connection, secrets.token_hex(16), time.monotonic() + _HELLO_S)
            connection.setblocking(False)
            self._pending[connection.fileno()] = pending
            self._selector.register(connection, selectors.EVENT_READ, pending)
            send(connection, {"nonce": pending.nonce})

    def _make_room(self) -> None:
        if oldest := self._oldest():
            self._drop(oldest)

    def _oldest(self) -> _PendingConnection | None:
        """Returns the pending connection that has waited longest: the first one of the dict."""
        return next(iter(self._pending.values()), None)

    def _hear(self, pending: _PendingConnection) -> list[Connection]:
        """Reads from a pending connection. Returns the connection once it is authenticated."""
        try:
            new = pending.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            new = b""
        pending.text += new
        if new and b"\n" not in pending.text and len(pending.text) < _LONGEST_LINE:
            return []
        # A client sends nothing more until the server has answered, so no byte after the line is lost.
        message = parsed(pending.text)
        client_nonce, text = message.get("nonce"), message.get("hello")
        if not isinstance(client_nonce, str) or not isinstance(text, str):
            # A process that only looks whether this one is here, as another listener of this user does, has said nothing.
            self._turn_away(pending) if pending.text else self._drop(pending)
            return []
        nonces = pending.nonce, client_nonce
        if not self._secret.proves(message.get("proof"), "client", *nonces, text):
            self.refused += 1
            send(pending.connection, {"refused": True})
            self._turn_away(pending)
            return []
        self._forget(pending)
        pending.connection.setblocking(True)
        send(pending.connection, {"proof": self._secret.proof("server", *nonces)})
        return [Connection(pending.connection, parsed(text.encode()))]

    def _turn_away(self, pending: _PendingConnection) -> None:
        """Drops a connection that has proved nothing, and tells the user where it came from."""
        with contextlib.suppress(OSError):  # It has gone already.
            self._strangers.note([pending.connection.getpeername()[:2]])
        self._drop(pending)

    def _drop(self, pending: _PendingConnection) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]


def handshake(connection: socket.socket, secret: Secret, hello: Mapping[str, Any], timeout_s: float) -> bytes | None:
    """Authenticates this process to a server, and the server to this process.

    Args:
      connection: a new connection to the server.
      secret: the secret of the cluster.
      hello: the first message to the server.
      timeout_s: time to wait for the server, in seconds.

    Returns:
      None if both ends have proved that they know the secret. Otherwise the bytes that the server sent instead: none if it closed the
      connection or was silent.

    Raises:
      StartupError: only one of the two ends knows the secret.
    """
    peer, deadline_s = _peer(connection), time.monotonic() + timeout_s
    line = read_line(connection, deadline_s)
    server_nonce, client_nonce, text = parsed(line).get("nonce"), secrets.token_hex(16), json.dumps(hello)
    if not isinstance(server_nonce, str):
        return line
    send(
        connection,
        {"nonce": client_nonce, "hello": text, "proof": secret.proof("client", server_nonce, client_nonce, text)},
    )
    line = read_line(connection, deadline_s)
    answer = parsed(line)
    if secret.proves(answer.get("proof"), "server", server_nonce, client_nonce):
        return None
    if answer:
        raise StartupError(
            secret.origin,
            f"the process that it connected to, {peer}, has another secret.",
            f"set the same {TOKEN} for all processes of the cluster",
        )
    return line


def enter(address: str, secret: Secret, hello: Mapping[str, Any], timeout_s: float) -> Connection:
    """Returns a connection with a listener that may start later, or may be full for a while.

    Raises:
      OSError: no process that knows the secret has answered in time. The error says what happened instead.
      StartupError: only one of the two ends knows the secret.
    """
    connection = _repeated(lambda left_s: visit(address, secret, hello, left_s), time.monotonic() + timeout_s)
    if connection is None:
        raise OSError(_SILENT)
    return connection


def visit(address: str, secret: Secret, hello: Mapping[str, Any], timeout_s: float = _CONNECT_S) -> Connection:
    """Returns a connection with a listener that is there now.

    Raises:
      OSError: nobody is there, or it is another program. The error says what happened instead.
      StartupError: only one of the two ends knows the secret.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connect(address, timeout_s))
        said = handshake(connection, secret, hello, max(timeout_s, _HELLO_S))
        if said is not None:
            # It may be a program that has the port for a moment.
            cut(connection)
            raise OSError(f"another program answers there: {said[:40]!r}" if said else _SILENT)
        stack.pop_all()
    connection.settimeout(None)
    expect_answers(connection)
    return Connection(connection)


def reach(address: str, deadline_s: float) -> socket.socket | None:
    """Connects with a process that may start later. Tries until the deadline of `time.monotonic`.

    Returns:
      The connection. None if the deadline has passed already.

    Raises:
      OSError: no attempt has succeeded.
    """
    return _repeated(lambda left_s: connect(address, left_s), deadline_s)


def _repeated(attempt: Callable[[float], T], deadline_s: float) -> T | None:
    """Repeats an attempt until it succeeds, and returns its result. See `reach`.

    Args:
      attempt: raises an OSError if it fails. Takes the most seconds that it may last.
      deadline_s: the deadline of `time.monotonic`.
    """
    cause: OSError | None = None
    pause_s = _FIRST_RETRY_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            # The kernel repeats a dropped attempt after 1 s, 2 s, 4 s and so on. A new one is sooner.
            return attempt(min(left_s, _CONNECT_S))
        except OSError as e:
            cause = e
            time.sleep(max(0.0, min(pause_s, deadline_s - time.monotonic())))
            pause_s = min(2 * pause_s, RETRY_S)
    if cause is not None:
        raise cause
    return None


def connect(address: str, timeout_s: float) -> Socket:
    """Returns a connection with an address `host:port`, whose operations take at most `timeout_s` seconds.

    Raises:
      OSError: nobody listens there.
    """
    return socket.create_connection(split(address), timeout=timeout_s)


def answers(address: str) -> bool:
    """Returns whether a process accepts connections at `host:port`."""
    try:
        connect(address, _CONNECT_S).close()
    except OSError:
        return False
    return True


def listen(address: str, backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens at an address `host:port`.

    Raises:
      OSError: this process cannot listen there.
    """
    return listen_at(*split(address), backlog)


def split(address: str) -> tuple[str, int]:
    """Returns the host and the port at which the processes of a cluster meet."""
    host, port = host_and_port(address)
    # The name may lead to two addresses. Another user could listen at the one that this cluster does not use.
    return LOOPBACK if host == "localhost" else host, port


def expect_answers(connection: socket.socket, answer_s: int | None = None) -> None:
    """Makes the kernel end a connection whose other machine has not answered for some time.

    A machine that disappears does not close its connections. One of its processes may be stopped: its kernel answers. See RFC 1122,
    section 4.2.3.6, and RFC 5482.

    Args:
      connection: the connection.
      answer_s: the time in seconds, counted from the first message without an answer. None means `ANSWER_S`.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    answer_s = answer_s or ANSWER_S
    probe_s = min(_PROBE_S, max(1, answer_s // (_PROBES + 1)))
    options = {
        "TCP_KEEPIDLE": answer_s - _PROBES * probe_s,
        "TCP_KEEPALIVE": answer_s - _PROBES * probe_s,  # The name of the same on macOS.
        "TCP_KEEPINTVL": probe_s,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": 1000 * answer_s,
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_s(connection: socket.socket) -> float:
    """Returns how long the other machine has answered nothing, in seconds. 0 where the kernel does not say it."""
    if sys.platform != "linux":
        return 0.0
    with contextlib.suppress(OSError, struct.error):
        info = connection.getsockopt(IPPROTO_TCP, socket.TCP_INFO, _LAST_ANSWER + 4)
        return float(struct.unpack_from("I", info, _LAST_ANSWER)[0]) / 1000
    return 0.0


def has_arrived(waiting: socket.socket) -> bool:
    """Returns whether data or a connection waits at a socket. Needs no file descriptor."""
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    return bool(poll.poll(0))


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a message. A process that has ended needs none."""
    with contextlib.suppress(OSError):
        connection.sendall(encoded(message))


def read_line(connection: socket.socket, deadline_s: float) -> bytes:
    """Returns the bytes up to the end of the first line. The bytes after it belong to another reader and stay unread.

    Returns the received bytes if the other end closes the connection, has not finished the line at the deadline of `time.monotonic`, or
    sends something else than JSON, because then there may be no line.
    """
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and line[:1] in (b"", b"{"):
            connection.settimeout(max(0.0, deadline_s - time.monotonic()))
            waiting = connection.recv(_LONGEST_LINE - len(line), socket.MSG_PEEK)
            if not waiting:
                break
            line += connection.recv(waiting.find(b"\n") + 1 or len(waiting))
    return line


def _peer(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # It has gone already.
        return "which has gone"
    return f"{host}:{port}"
