# SPDX-License-Identifier: Apache-2.0
"""The door of a cluster whose members may come late and come again: they learn where to meet only after both ends have proved themselves.

The chief of parameter servers keeps one. A member that comes through it waits for the message of the chief, and keeps the connection, whose
end tells it that the chief has ended. A chief that was not killed says so before. Uses the standard library only.
"""

import selectors
import threading
from socket import MSG_PEEK
from typing import Self, final

from phalanx._src.cluster.connections.hosts import is_loopback
from phalanx._src.cluster.connections.listener import Connection, Listener, enter, expect_answers
from phalanx._src.cluster.connections.messages import Message
from phalanx._src.cluster.connections.ports import hosts_of
from phalanx._src.cluster.connections.secret import Secret
from phalanx.errors import StartupError

_TURN_S = 0.2


class MeetingPlace(Message):
    """The address of Ray, and the salt from which each member derives the token. Empty if Ray has a token of the user."""

    ray: str
    salt: str


class ChiefEnds(Message):
    """The chief closes its strategy. Its machine was not lost, and nobody killed it."""


_OF_CHIEF: tuple[type[Message], ...] = (MeetingPlace, ChiefEnds)


@final
class Door:
    """Admits the members of a cluster that know its secret, until it is closed.

    Args:
      address: `host:port` to listen at.
      secret: the secret of the cluster.
      size: number of members.

    Raises:
      OSError: this process cannot listen there.
    """

    def __init__(self, address: str, secret: Secret, size: int) -> None:
        self._address, self._listener = address, Listener(address, secret, size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.fileno, selectors.EVENT_READ, None)
        self._here: list[Connection] = []
        self._message: MeetingPlace | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="phalanx-door", daemon=True)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """The names of the members that are here. A name may be there twice."""
        with self._lock:
            return [str(member.hello.get("name")) for member in self._here]

    @property
    def is_local(self) -> bool:
        """Whether all members that are here, and the chief, are on one machine."""
        with self._lock:
            return is_loopback(self._address) or hosts_of([member.socket for member in self._here])[1]

    def tell(self, message: MeetingPlace) -> None:
        """Sends a message to all members, including those that will come."""
        with self._lock:
            self._message = message
            for member in self._here:
                member.say(message)

    def close(self) -> None:
        """Tells the members that the chief ends, and closes their connections."""
        self._is_closed = True
        # Members learn of the end by their connections, which the thread closes.
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._selector:
            # In turns, because a member may come while nothing else happens.
            while not self._is_closed:
                ready = self._selector.select(_TURN_S)
                for peer in self._listener.accepted(0):
                    self._admit(peer)
                for member in [key.data for key, _ in ready if key.data]:
                    self._hear(member)
            for member in self._here:
                member.say(ChiefEnds())
                member.close()

    def _admit(self, member: Connection) -> None:
        # A machine that disappears closes nothing, and its task may come again.
        expect_answers(member.socket)
        self._selector.register(member, selectors.EVENT_READ, member)
        with self._lock:
            self._here.append(member)
            if self._message is not None:
                member.say(self._message)

    def _hear(self, member: Connection) -> None:
        """Forgets a member whose connection has ended. It says nothing after its hello."""
        _, is_open = member.hear(())
        if not is_open:
            with self._lock:
                self._here.remove(member)
            self._selector.unregister(member)
            member.close()


@final
class Entrance:
    """The connection of a member with the chief.

    Args:
      address: `host:port` of the chief.
      secret: the secret of the cluster.
      name: name of the member.
      timeout_s: time until the chief must let it in, in seconds.

    Attributes:
      message: the message of the chief. None if it has ended before.
      has_said_so: whether the chief has said that it ends.
      is_local: whether the chief is on this machine.

    Raises:
      StartupError: the chief does not answer, has another secret, or is another program.
    """

    def __init__(self, address: str, secret: Secret, name: str, timeout_s: float) -> None:
        try:
            self._connection = enter(address, secret, {"name": name}, timeout_s)
        except OSError as e:
            raise StartupError(
                f"{name} of a cluster, for {timeout_s:g} s",
                f"no process listens at the address of the chief, {address}, that lets it in: {e.strerror or e}.",
                "start the script with ParameterServerStrategy on the chief",
            ) from e
        # The chief waits for all others before it says where they meet.
        self._connection.socket.settimeout(timeout_s)
        self.message: MeetingPlace | None = None
        self.has_said_so = False
        while self.message is None and self._hear():
            pass
        self.is_local = hosts_of([self._connection.socket])[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def is_open(self, wait_s: float) -> bool:
        """Whether the chief is there. Waits up to `wait_s` seconds for its end."""
        self._connection.socket.settimeout(wait_s)
        try:
            self._connection.socket.recv(1, MSG_PEEK)
        except TimeoutError:
            return True
        except OSError:
            return False
        return self._hear()

    def _hear(self) -> bool:
        """Notes what the chief says. Returns whether it may say more."""
        messages, is_open = self._connection.hear(_OF_CHIEF)
        for message in messages:
            if isinstance(message, MeetingPlace):
                self.message = message
            self.has_said_so |= isinstance(message, ChiefEnds)
        return is_open and not self.has_said_so
