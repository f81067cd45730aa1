# SPDX-License-Identifier: Apache-2.0
"""The connection of a launcher with the rendezvous of its group, which another machine holds."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any, final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import RETRY_S, expect_answers, handshake, parsed, reach, send
from phalanx._src.cluster.connections.ports import Socket, cut
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.launch.elastic.messages import GroupStatus, LauncherReport
from phalanx._src.launch.plan import Machines
from phalanx.errors import StartupError

_HELLO_S = 5.0


@final
class RemoteRendezvous(threading.Thread):
    """The stand-in for a `Rendezvous` on the machines other than the first.

    Args:
      environment: environment of the processes, with the secret.
      kill: called with the number of a process of this machine that keeps the others from continuing, and the reason.
      machines: the machines of the group.

    Raises:
      InvalidArgumentError: PHALANX_START_TIMEOUT_S is not a number of seconds.
      StartupError: the first machine does not answer, or has another secret.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        kill: Callable[[int, str], None],
        machines: Machines,
    ) -> None:
        super().__init__(name="phalanx-rendezvous", daemon=True)
        self.address, self._kill = machines.address, kill
        self._secret, self._hello = secret_of([self.address], environment), {"machine": machines.index}
        self._connection = self._connected(start_timeout_s(environment))
        self._told, self._standing = LauncherReport(), GroupStatus()

    def report(self, report: LauncherReport) -> GroupStatus:
        """See `AbstractRendezvous`."""
        if report != self._told:
            self._told = report
            send(self._connection, asdict(report))
        return self._standing

    def end(self) -> None:
        """Ends the connection."""
        cut(self._connection)
        self.join()

    @override
    def run(self) -> None:
        with self._connection, self._connection.makefile("rb") as lines, suppress(OSError):
            for line in lines:
                self._hear(parsed(line))
        if not self._standing.has_finished:
            # Nobody is left who could bring the processes of this machine together again.
            why = f"the launcher at {self.address}, which coordinates all machines, is gone"
            self._standing = replace(self._standing, gone=(), hopeless=why)

    def _hear(self, message: dict[str, Any]) -> None:
        if "kill" in message:
            self._kill(message["kill"], message["why"])
        elif message:
            gone, members = message.pop("gone"), tuple(message.pop("members"))
            self._standing = GroupStatus(**message, members=members, gone=None if gone is None else tuple(gone))

    def _connected(self, timeout_s: float) -> Socket:
        deadline_s, cause = time.monotonic() + timeout_s, "it closes the connection"
        try:
            while (connection := reach(self.address, deadline_s)) is not None:
                if self._is_let_in(connection):
                    return connection
                time.sleep(RETRY_S)
        except OSError as e:
            cause = e.strerror or str(e)
        raise StartupError(
            f"the rendezvous at {self.address}",
            f"machine {self._hello['machine']} could not connect to it for {timeout_s:g} s: {cause}.",
            "start phalanx run on the first machine too, and check whether this machine can reach its address",
        )

    def _is_let_in(self, connection: Socket) -> bool:
        with ExitStack() as stack:
            stack.enter_context(connection)
            if handshake(connection, self._secret, self._hello, _HELLO_S) is not None:
                return False
            connection.settimeout(None)
            expect_answers(connection)
            stack.pop_all()
            return True
