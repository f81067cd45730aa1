# SPDX-License-Identifier: Apache-2.0
"""The connection of a launcher with the rendezvous of its group, which another machine holds."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import Connection
from phalanx._src.cluster.connections.messages import SignOfLife
from phalanx._src.cluster.connections.ports import cut
from phalanx._src.cluster.watch.meeting import Ping
from phalanx._src.launch.elastic.messages import (
    NO_STATUS,
    GroupStatus,
    GroupTerms,
    KillRequest,
    LauncherReport,
    Presence,
)
from phalanx.errors import StartupError

_ANSWER_S = 30.0


@final
class RemoteRendezvous(threading.Thread):
    """The stand-in for a `Rendezvous` on the machines that do not hold it.

    Args:
      machine: index of the machine that holds it.
      address: its address.
      connection: a connection with it.
      kill: called with the number of a process of this machine that keeps the others from continuing, and the reason.
      terms: what that machine must have been given too. See `GroupTerms`.
      before: the last state of the training that this machine knows.

    Attributes:
      machine: index of the machine that holds it.
      standing: the last state of the training.
      has_ended: whether its launcher has ended. False if it only no longer answers.

    Raises:
      StartupError: that machine has other terms, or does not answer.
    """

    def __init__(
        self,
        machine: int,
        address: str,
        connection: Connection,
        kill: Callable[[int, str], None],
        terms: str,
        *,
        before: GroupStatus = NO_STATUS,
    ) -> None:
        super().__init__(name="phalanx-rendezvous", daemon=True)
        self.machine, self._connection, self._kill = machine, connection, kill
        self._told, self.standing = LauncherReport(), before
        self._messages = connection.messages((GroupStatus, GroupTerms, KillRequest, Ping, Presence))
        # No message may begin inside another one.
        self._saying = threading.Lock()
        self.has_ended = False
        self._require(terms, address)

    def _require(self, terms: str, address: str) -> None:
        """Checks that the first message has these terms. Closes the connection otherwise."""
        self._connection.socket.settimeout(_ANSWER_S)
        first = next(self._messages, None)
        self._connection.socket.settimeout(None)
        if isinstance(first, GroupTerms) and first.text == terms:
            return
        self._connection.close()
        problem = "it does not answer."
        if isinstance(first, GroupTerms):
            problem = f"it has {first.text}, and this machine {terms}."
        raise StartupError(f"the group at {address}", problem, "the same --workers and cluster on all machines")

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended before the training has."""
        is_over = self.standing.has_finished or self.standing.gone is not None or bool(self.standing.hopeless)
        return not self.is_alive() and not is_over

    def report(self, report: LauncherReport) -> GroupStatus:
        """See `Rendezvous.report`."""
        if report != self._told:  # Called at each turn of the launcher.
            self._told = report
            with self._saying:
                self._connection.say(report)
        return self.standing

    def give_up(self, why: str) -> None:
        """Nobody is left who could bring the processes of this machine together again."""
        self.standing = replace(self.standing, gone=(), hopeless=why)

    def end(self) -> None:
        """Ends the connection."""
        cut(self._connection.socket)
        # The end of the connection ends the loop of `run`.
        self.join()

    @override
    def run(self) -> None:
        is_elsewhere = False
        with self._connection.socket:
            for message in self._messages:
                if isinstance(message, KillRequest):
                    self._kill(message.number, message.why)
                elif isinstance(message, GroupStatus):
                    self.standing = message
                elif isinstance(message, Ping):
                    with self._saying:
                        self._connection.say(SignOfLife())
                else:
                    is_elsewhere |= isinstance(message, Presence)
        self.has_ended = self._connection.is_closed and not is_elsewhere
