# SPDX-License-Identifier: Apache-2.0
"""The roll call: the processes of a cluster meet before JAX connects them, and report which ones are missing.

JAX's own start ends the process if another one is missing. Uses the standard library only.

Rank 0 listens on its address. Every other process connects, sends its rank and its view of the cluster, and waits for a
reply: `go` once all processes are present, otherwise an error. The connections stay open for `phalanx.cluster.watch`.
"""

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.errors import StartupError, listed

_HELLO_S = 5.0
_RETRY_S = 0.1
_MIN_BACKLOG = 128
_LONGEST_LINE = 1 << 16
_LONGEST_VIEW = 1000


def call_roll(addresses: Sequence[str], rank: int, *, about: str, timeout_s: float) -> dict[int, socket.socket]:
    """Waits until the processes of all ranks have called this function.

    Args:
      addresses: `host:port` of each rank. The processes meet at the address of rank 0.
      rank: rank of this process.
      about: this process's view of the cluster, which must be equal in all processes.
      timeout_s: time to wait for the others, in seconds.

    Returns:
      Open connections by rank: on rank 0 to all other ranks, and on any other rank to rank 0.

    Raises:
      StartupError: a rank is missing at the deadline, was started twice or belongs to another cluster, or the address of
        rank 0 is taken, does not belong to this machine or does not answer.
    """
    deadline = time.monotonic() + timeout_s
    about = _shortened(about)
    if rank == 0:
        return _Chief(addresses, about, deadline, timeout_s).wait()
    return {0: _report(addresses, rank, about, deadline, timeout_s)}


class _Chief:
    """Rank 0, to which the other ranks connect."""

    def __init__(self, addresses: Sequence[str], about: str, deadline: float, timeout_s: float) -> None:
        self._addresses, self._about, self._deadline, self._timeout_s = addresses, about, deadline, timeout_s
        self._present: dict[int, socket.socket] = {}

    def wait(self) -> dict[int, socket.socket]:
        with _listening(self._addresses[0], backlog=max(_MIN_BACKLOG, len(self._addresses))) as server:
            try:
                while len(self._present) < len(self._addresses) - 1 and (left := self._deadline - time.monotonic()) > 0:
                    server.settimeout(left)
                    with contextlib.suppress(TimeoutError):
                        self._meet(server.accept()[0])
                if self._missing:
                    raise self._error()
                self._refuse_others(server)
            except StartupError as e:
                self._tell({"error": [e.asked, e.found, e.hint]})
                for connection in self._present.values():
                    connection.close()
                raise
        self._tell({"go": True})
        return self._present

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(1, len(self._addresses)) if rank not in self._present]

    def _refuse_others(self, server: socket.socket) -> None:
        """Sends an error to processes that connected after all ranks were present."""
        server.settimeout(0)
        with contextlib.suppress(OSError):
            while True:
                self._meet(server.accept()[0])

    def _error(self) -> StartupError:
        missing = listed([f"rank {r} ({self._addresses[r]})" for r in self._missing])
        return StartupError(
            f"a cluster of {len(self._addresses)} processes",
            f"after {self._timeout_s:g} s {missing} had not connected to rank 0 ({self._addresses[0]}).",
            "look at the output of the missing processes, or use a longer CommunicationOptions(timeout_seconds=...)",
        )

    def _meet(self, connection: socket.socket) -> None:
        hello = _received(connection, _HELLO_S)
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 < rank < len(self._addresses):
            connection.close()  # Not a process of this cluster.
            return
        if rank in self._present:
            twice = _twice(rank, self._addresses[rank])
            _send(connection, {"error": [twice.asked, twice.found, twice.hint]})
            connection.close()
            return
        self._present[rank] = connection
        if hello.get("about") != self._about:
            raise StartupError(
                f"rank {rank} ({self._addresses[rank]})",
                f"it was started for another cluster, {hello.get('about')}, than rank 0, {self._about}.",
                "set the same cluster in TF_CONFIG of all processes, and a different task in each",
            )

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._present.values():
            _send(connection, message)


def _report(addresses: Sequence[str], rank: int, about: str, deadline: float, timeout_s: float) -> socket.socket:
    """Connects another rank to rank 0 and waits for the reply."""
    connection = _connected(addresses[0], rank, deadline, timeout_s)
    _send(connection, {"rank": rank, "about": about})
    # Rank 0 waits as long, but may have started later.
    text = _line(connection, max(0.0, deadline - time.monotonic()) + timeout_s)
    answer = _parsed(text)
    if "go" in answer:
        return connection
    connection.close()
    if "error" in answer:
        raise StartupError(*answer["error"])
    if text:
        # JAX's service answered. Rank 0 starts it on this port once all ranks are present.
        raise _twice(rank, addresses[rank])
    raise StartupError(
        f"rank 0 ({addresses[0]})",
        f"it closed the connection, or did not reply, while rank {rank} waited for the other ranks.",
        f"look at the output of rank 0, and check whether rank {rank} was started twice",
    )


def _twice(rank: int, address: str) -> StartupError:
    return StartupError(
        f"rank {rank} ({address})",
        "a process with this rank has connected already.",
        "start one process per task of the cluster",
    )


def _shortened(about: str) -> str:
    """Returns a view of the cluster that fits into one message: a hash stands for the rest of a long text."""
    if len(about) <= _LONGEST_VIEW:
        return about
    hash_of_all = hashlib.sha256(about.encode()).hexdigest()[:16]
    return f"{about[:_LONGEST_VIEW]}... ({len(about)} characters, SHA-256 {hash_of_all})"


@contextlib.contextmanager
def _listening(address: str, backlog: int) -> Iterator[socket.socket]:
    host, port = _split(address)
    try:
        # If the backlog is full, the kernel drops connections, and the other processes repeat them only after 1 s or more.
        server = socket.create_server((host, port), backlog=backlog)
    except OSError as e:
        raise StartupError(
            f"rank 0 at {address}",
            f"it cannot listen there ({e.strerror or e}): another process has the port, perhaps a second rank 0, or the address "
            "does not belong to this machine.",
            "use a free port and this machine's name in the address of the first worker",
        ) from e
    with server:
        yield server


def _connected(address: str, rank: int, deadline: float, timeout_s: float) -> socket.socket:
    cause: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection(_split(address), timeout=left)
        except OSError as e:
            cause = e
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise StartupError(
        f"rank 0 ({address})",
        f"rank {rank} could not reach it for {timeout_s:g} s ({cause}).",
        "start rank 0, and check whether this machine can reach its address",
    ) from cause


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    # A process that has ended needs no message.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _received(connection: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Returns one message, or an empty dict if none arrived or the line is not a message."""
    return _parsed(_line(connection, timeout_s))


def _line(connection: socket.socket, timeout_s: float) -> bytes:
    """Returns the bytes up to the end of the first line. The bytes after it belong to another reader and stay unread."""
    connection.settimeout(timeout_s)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            waiting = connection.recv(_LONGEST_LINE - len(line), socket.MSG_PEEK)
            if not waiting:
                break
            line += connection.recv(waiting.find(b"\n") + 1 or len(waiting))
    return line


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
