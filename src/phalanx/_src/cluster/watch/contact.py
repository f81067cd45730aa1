# SPDX-License-Identifier: Apache-2.0
"""The connection of a process with the rendezvous of its elastic group, which may move to another machine. Uses the standard library only."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import final

from phalanx._src.cluster.connections.listener import Connection, expect_answers, visit
from phalanx._src.cluster.connections.messages import Message
from phalanx._src.cluster.connections.ports import cut
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.watch import meeting
from phalanx.errors import StartupError, listed

_CONNECT_S = 30.0
_VISIT_S = 2.0
_PAUSE_S = 0.1
ANSWER_S = 10
"""Time in seconds that the rendezvous may be silent. It knows a process that connects again, so this is short."""


@final
class Contact:
    """A connection that is made again, at another address, when it is lost. It may be used in several threads.

    Args:
      addresses: the addresses at which the rendezvous may be.
      number: number of this process.

    Attributes:
      is_late: whether the others had begun to train when this process connected first.
      host: the address of this machine from which it reached the rendezvous.

    Raises:
      StartupError: the rendezvous does not answer at any of the addresses.
    """

    def __init__(self, addresses: Sequence[str], number: int) -> None:
        self._addresses, self._hello, self._secret = addresses, {"member": number}, secret_of(addresses)
        # No message may begin inside another one.
        self._lock = threading.Lock()
        self._state, self._is_closed = meeting.MemberState(), False
        self._question: Message | None = None
        self._connection: Connection
        self._messages: Iterator[meeting.RendezvousMessage]
        self.is_late = self._connect(_CONNECT_S)
        self.host = str(self._connection.socket.getsockname()[0])

    def say(self, message: Message, state: meeting.MemberState | None = None) -> None:
        """Sends a message. It is lost with its connection.

        Args:
          message: the message.
          state: the state of this process from now on. None if it stays.
        """
        with self._lock:
            self._state = state or self._state
            self._connection.say(message)

    def ask(self, question: Message, state: meeting.MemberState) -> None:
        """Sends a message, and once more after each loss of the connection, until `answered`."""
        with self._lock:
            self._state, self._question = state, question
            self._connection.say(question)

    def answered(self, state: meeting.MemberState) -> None:
        """Must be called for each answer, with the state of this process from now on."""
        with self._lock:
            self._state, self._question = state, None

    @property
    def state(self) -> meeting.MemberState:
        """The state of this process, which a rendezvous gets first."""
        return self._state

    def messages(self, timeout_s: float) -> Iterator[meeting.RendezvousMessage]:
        """Yields the messages of the rendezvous, until `close`, or until it has not been there for a time in seconds."""
        while True:
            with self._connection.socket:
                yield from self._messages
            if self._is_closed or len(self._addresses) == 1:
                return
            # A rendezvous that turns this process away would do so many times a second.
            time.sleep(_PAUSE_S)
            try:
                self._connect(timeout_s)
            except StartupError:  # Whoever waits for an answer says so.
                return

    def close(self) -> None:
        """Ends the connection for good."""
        self._is_closed = True
        cut(self._connection.socket)

    def _connect(self, timeout_s: float) -> bool:
        """Connects with the rendezvous, wherever it is, and tells it what has happened so far. Returns whether the others train already."""
        is_alone = len(self._addresses) == 1
        # If it is at one address, it is there before this process is started.
        deadline_s, visit_s = time.monotonic() + (0.0 if is_alone else timeout_s), _CONNECT_S if is_alone else _VISIT_S
        # The port of a machine that was lost may belong to another group by now.
        absent: tuple[type[Exception], ...] = (OSError,) if is_alone else (OSError, StartupError)
        while True:
            for address in self._addresses:
                with suppress(*absent):
                    connection = visit(address, self._secret, self._hello, visit_s)
                    if not is_alone:
                        expect_answers(connection.socket, ANSWER_S)
                    connection.socket.settimeout(_CONNECT_S)
                    messages = connection.messages(meeting.TO_MEMBER)
                    welcome = next(messages, None)
                    connection.socket.settimeout(None)
                    if isinstance(welcome, meeting.Welcome):
                        # From the next one on, if this one turns the process away: it belongs to the group of another machine.
                        place = self._addresses.index(address) + 1
                        self._addresses = [*self._addresses[place:], *self._addresses[:place]]
                        self._take(connection, messages)
                        return welcome.is_late
                    connection.close()
            if self._is_closed or time.monotonic() >= deadline_s:
                raise StartupError(
                    f"the rendezvous at {listed(self._addresses)}",
                    "it rejected this process: phalanx run has exited, or another program uses the port.",
                    "unset PHALANX_RENDEZVOUS, or start the script by: phalanx run --workers 2:4 train.py",
                )
            time.sleep(_PAUSE_S)

    def _take(self, connection: Connection, messages: Iterator[meeting.RendezvousMessage]) -> None:
        with self._lock:
            self._connection, self._messages = connection, messages
            connection.say(self._state)
            if self._question is not None:
                connection.say(self._question)
