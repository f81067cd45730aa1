# SPDX-License-Identifier: Apache-2.0
"""The handshake: the processes of a cluster meet before JAX connects them, and report which ones are missing.

JAX's own start ends the process if another one is missing. Uses the standard library only.

Rank 0 listens on its address. Every other process connects, proves that it knows the secret of the cluster, sends its rank and its view
of the cluster, and waits for a reply: `go` once all processes are present, otherwise an error. These messages have no classes, because processes
of other versions must understand them. The connections stay open for `phalanx._src.cluster.watch.watch`.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socket import gaierror
from typing import Any, Self

from phalanx._src.cluster.connections.filters import MOST_ADDRESSES, addresses_of_machine, host_of_other
from phalanx._src.cluster.connections.hosts import LOOPBACK, host_for_others, is_private, joined, shares_files
from phalanx._src.cluster.connections.listener import (
    RETRY_S,
    Connection,
    Listener,
    handshake,
    reach,
    read_line,
    send,
    split,
)
from phalanx._src.cluster.connections.messages import parsed
from phalanx._src.cluster.connections.ports import HeldPort, PrivateAddress, Socket, hosts_of
from phalanx._src.cluster.connections.secret import TOKEN, Secret
from phalanx.errors import StartupError, listed

_LONGEST_VIEW = 1000
_SETTINGS = b"\x04"
"""The type of the first frame of a server of gRPC, in its byte 3 (RFC 9113, sections 3.4 and 4.1)."""


@dataclass
class Roll:
    """The processes of a cluster, once all have met.

    Args:
      addresses: `host:port` of each rank, as the description of the cluster has them.
      lines: open connections by rank: on rank 0 to all other ranks, and on any other rank to rank 0.
      host: the address of this machine at which the others reach this process: one of this machine alone, if all are on it.
      service: address of the service by which JAX connects all: a private one, if all are on this machine.
      bind: the address at which rank 0 starts it.
      held: what rank 0 needs until all are connected: its port, which nobody else can take, and the private address.
      machines: the addresses of all machines, from which alone processes of the cluster come. Empty if all are on this one, or if they are unknown.
    """

    addresses: Sequence[str]
    lines: dict[int, Socket]
    host: str
    service: str
    bind: str
    held: list[HeldPort | PrivateAddress] = field(default_factory=list)
    machines: Sequence[str] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.held:
            each.close()


def call_roll(
    addresses: Sequence[str],
    rank: int,
    *,
    about: str,
    secret: Secret,
    timeout_s: float,
    versions: Mapping[str, str] | None = None,
) -> Roll:
    """Waits until the processes of all ranks have called this function.

    Args:
      addresses: `host:port` of each rank. The processes meet at the address of rank 0.
      rank: rank of this process.
      about: this process's view of the cluster, which must be equal in all processes.
      secret: the secret of the cluster.
      timeout_s: time to wait for the others, in seconds.
      versions: versions of what this process runs, by name, which must be equal in all processes.

    Returns:
      The processes. Its context releases the ports that rank 0 holds.

    Raises:
      StartupError: a rank is missing at the deadline, was started twice, belongs to another cluster or has other versions, or the address of
        rank 0 is taken, does not belong to this machine or does not answer.
    """
    call = _RollCall(addresses, _shortened(about), secret, timeout_s, versions or {})
    return _Chief(call).wait() if rank == 0 else _Other(call, rank).wait()


class _RollCall:
    """The facts about a handshake that all ranks have. The arguments are those of `call_roll`."""

    def __init__(
        self, addresses: Sequence[str], about: str, secret: Secret, timeout_s: float, versions: Mapping[str, str]
    ) -> None:
        self.addresses, self.about, self.secret, self.timeout_s = addresses, about, secret, timeout_s
        self.versions = dict(versions)
        self.deadline_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Time until the deadline, in seconds."""
        return max(0.0, self.deadline_s - time.monotonic())

    def place(self, rank: int) -> str:
        """Returns rank and address of a process."""
        return f"rank {rank} ({self.addresses[rank]})"

    def twice(self, rank: int) -> StartupError:
        """Returns the error of a process whose rank has already connected."""
        return StartupError(
            self.place(rank),
            "a process with this rank has connected already.",
            "start one process per task of the cluster",
        )


class _Chief:
    """Rank 0, to which the other ranks connect."""

    def __init__(self, call: _RollCall) -> None:
        self._call, self._refused = call, 0
        self._present: dict[int, Connection] = {}
        self._held: list[HeldPort | PrivateAddress] = []

    def wait(self) -> Roll:
        try:
            # If another user has it, `_listening` says so.
            with suppress(OSError):
                self._held.append(HeldPort(*split(self._call.addresses[0])))
            with self._listening() as listener:
                while not self._is_complete and self._call.left_s:
                    self._meet(listener.accepted(self._call.left_s))
                self._refused = listener.refused
                if not self._is_complete:
                    raise self._error()
                # Processes that connected too late must receive the error too.
                self._meet(listener.accepted(0))
        except StartupError as e:
            self._tell({"error": [e.asked, e.found, e.hint]})
            for held in self._held:
                held.close()
            for peer in self._present.values():
                peer.close()
            raise
        roll = self._roll()
        private = roll.service if is_private(roll.service) else None
        self._tell({"go": True, "service": private, "machines": roll.machines})
        return roll

    def _roll(self) -> Roll:
        """Returns the processes, which need no address that others reach if all are on this machine."""
        lines = {rank: peer.socket for rank, peer in self._present.items()}
        addresses, (name, port) = self._call.addresses, split(self._call.addresses[0])
        hosts, are_here = hosts_of([*lines.values()])
        # Containers may share the network of a machine, and not its files.
        if are_here and all(peer.hello.get("files") == shares_files() for peer in self._present.values()):
            private = PrivateAddress()
            self._held.append(private)
            return Roll(addresses, lines, LOOPBACK, private.address, private.address, self._held)
        machines = self._machines()
        # All others have come by one address, so none needs another.
        if len(hosts) == 1:
            (host,) = hosts
            return Roll(addresses, lines, host, joined(host, port), joined(host, port), self._held, machines)
        host = host_for_others(lines.values(), addresses)
        return Roll(addresses, lines, host, joined(name, port), joined("::", port), self._held, machines)

    def _machines(self) -> list[str]:
        """Returns the addresses of all machines. Empty if a process comes by one that its machine does not have, because a router changes it."""
        machines = {*addresses_of_machine()}
        for peer in self._present.values():
            theirs = peer.hello.get("machine") or []
            if host_of_other(peer.socket) not in theirs:
                return []
            machines |= {*theirs}
        return sorted(machines) if len(machines) <= MOST_ADDRESSES else []

    @property
    def _is_complete(self) -> bool:
        return len(self._present) == len(self._call.addresses) - 1

    def _listening(self) -> Listener:
        address = self._call.addresses[0]
        try:
            return Listener(address, self._call.secret, len(self._call.addresses))
        except gaierror as e:
            raise StartupError(
                f"rank 0 at {address}",
                f"this machine does not know the name ({e.strerror}).",
                "use an address, or a name that all machines know, in the address of the first worker",
            ) from e
        except OSError as e:
            raise StartupError(
                f"rank 0 at {address}",
                f"it cannot listen there ({e.strerror or e}): another process has the port, perhaps a second rank 0, or the address "
                "does not belong to this machine.",
                "use a free port and this machine's name in the address of the first worker",
            ) from e

    def _error(self) -> StartupError:
        ranks = range(1, len(self._call.addresses))
        missing = listed([self._call.place(rank) for rank in ranks if rank not in self._present])
        problem = f"after {self._call.timeout_s:g} s {missing} had not connected to {self._call.place(0)}."
        hint = "look at the output of the missing processes, or use a longer CommunicationOptions(timeout_seconds=...)"
        if self._refused:
            problem += f" Connections with another secret than {self._call.secret.origin}: {self._refused}."
            hint = f"set the same {TOKEN} for all processes of the cluster"
        return StartupError(f"a cluster of {len(self._call.addresses)} processes", problem, hint)

    def _meet(self, peers: Sequence[Connection]) -> None:
        for peer in peers:
            rank = peer.hello.get("rank")
            if type(rank) is not int or not 0 < rank < len(self._call.addresses):
                peer.close()
            elif rank in self._present:
                twice = self._call.twice(rank)
                send(peer.socket, {"error": [twice.asked, twice.found, twice.hint]})
                peer.close()
            else:
                self._present[rank] = peer
                # Other versions may describe the cluster in other words.
                self._require_versions(rank, peer.hello.get("versions"))
                self._require_same(rank, peer.hello.get("about"))

    def _require_versions(self, rank: int, versions: object) -> None:
        theirs = versions if isinstance(versions, dict) else {}
        if differing := [name for name, ours in self._call.versions.items() if theirs.get(name) != ours]:
            raise StartupError(
                self._call.place(rank),
                f"it has {listed([f'{name} {theirs.get(name)}' for name in differing])}, but rank 0 has "
                f"{listed([f'{name} {self._call.versions[name]}' for name in differing])}.",
                "install the same versions on all machines",
            )

    def _require_same(self, rank: int, about: object) -> None:
        if about != self._call.about:
            raise StartupError(
                self._call.place(rank),
                f"it was started for another cluster, {about}, than rank 0, {self._call.about}.",
                "set the same cluster in TF_CONFIG of all processes, and a different task in each",
            )

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._present.values():
            send(peer.socket, message)


class _Other:
    """A rank above 0, which connects to rank 0."""

    def __init__(self, call: _RollCall, rank: int) -> None:
        self._call, self._rank, self._private = call, rank, ""
        self._machines: Sequence[str] = ()

    def wait(self) -> Roll:
        while True:
            connection = self._connected()
            try:
                said = self._ask(connection)
            except BaseException:
                connection.close()
                raise
            if said is None:
                return self._roll(connection)
            connection.close()
            if said[3:4] == _SETTINGS:
                # JAX's service answered. Rank 0 starts it on this port once all ranks are present.
                raise self._call.twice(self._rank)
            if said:
                raise StartupError(
                    f"rank 0 ({self._call.addresses[0]})",
                    f"another program answers there: {said[:40]!r}.",
                    "use a free port in the address of the first worker",
                )
            # Rank 0 closes connections that it has no room for.
            if not self._call.left_s:
                raise self._nothing_said()
            time.sleep(min(RETRY_S, self._call.left_s))

    def _roll(self, connection: Socket) -> Roll:
        host, port = connection.getpeername()[:2]
        reached = LOOPBACK if self._private else host_for_others([connection], self._call.addresses)
        service = self._private or joined(host, port)
        return Roll(self._call.addresses, {0: connection}, reached, service, service, machines=self._machines)

    def _ask(self, connection: Socket) -> bytes | None:
        """Returns None if all ranks have connected, and otherwise what rank 0 sent instead of a message."""
        hello = {
            "rank": self._rank,
            "about": self._call.about,
            "versions": self._call.versions,
            "files": shares_files(),
            "machine": addresses_of_machine(),
        }
        said = handshake(connection, self._call.secret, hello, self._call.left_s)
        if said is not None:
            return said
        # Rank 0 waits as long, but may have started later.
        answer = parsed(read_line(connection, self._call.deadline_s + self._call.timeout_s))
        if "error" in answer:
            raise StartupError(*answer["error"])
        if "go" not in answer:
            raise self._nothing_said()
        self._private, self._machines = answer.get("service") or "", answer.get("machines") or ()
        return None

    def _connected(self) -> Socket:
        try:
            connection = reach(self._call.addresses[0], self._call.deadline_s)
        except OSError as e:
            raise StartupError(
                f"rank 0 ({self._call.addresses[0]})",
                f"rank {self._rank} could not reach it for {self._call.timeout_s:g} s ({e}).",
                "start rank 0, and check whether this machine can reach its address",
            ) from e
        if connection is None:
            raise self._nothing_said()
        return connection

    def _nothing_said(self) -> StartupError:
        return StartupError(
            f"rank 0 ({self._call.addresses[0]})",
            f"it closed the connection, or did not reply, while rank {self._rank} waited for the other ranks.",
            f"look at the output of rank 0, and check whether rank {self._rank} was started twice",
        )


def _shortened(about: str) -> str:
    """Returns a view of the cluster that fits into one message: a hash stands for the rest of a long text."""
    if len(about) <= _LONGEST_VIEW:
        return about
    hash_of_all = hashlib.sha256(about.encode()).hexdigest()[:16]
    return f"{about[:_LONGEST_VIEW]}... ({len(about)} characters, SHA-256 {hash_of_all})"
