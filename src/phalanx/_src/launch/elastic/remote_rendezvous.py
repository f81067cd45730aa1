# SPDX-License-Identifier: Apache-2.0
"""The connection of a launcher with the rendezvous of its group, which another machine holds."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import enter
from phalanx._src.cluster.connections.ports import cut
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.launch.elastic.messages import GroupStatus, GroupTerms, KillRequest, LauncherReport
from phalanx._src.launch.plan import Machines
from phalanx.errors import StartupError

_LOOK_S = 1.0
"""Time between two looks for signals."""
_ANSWER_S = 30.0


@final
class RemoteRendezvous(threading.Thread):
    """The stand-in for a `Rendezvous` on the machines other than the first.

    Args:
      environment: environment of the processes, with the secret.
      kill: called with the number of a process of this machine that keeps the others from continuing, and the reason.
      machines: the machines of the group.
      is_interrupted: whether a signal has ended the wait for the first machine.
      terms: what the first machine must have been given too. See `GroupTerms`.

    Raises:
      InvalidArgumentError: PHALANX_START_TIMEOUT_S is not a number of seconds.
      StartupError: the first machine does not answer, or has another secret or other terms, or the wait for it was interrupted.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        kill: Callable[[int, str], None],
        machines: Machines,
        is_interrupted: Callable[[], bool] = lambda: False,
        *,
        terms: str = "",
    ) -> None:
        super().__init__(name="phalanx-rendezvous", daemon=True)
        self.address, self._kill = machines.address, kill
        timeout_s = start_timeout_s(environment)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                secret = secret_of([self.address], environment)
                # Not in one call: the handlers of signals only take notes.
                left_s = max(0.0, deadline_s - time.monotonic())
                self._connection = enter(self.address, secret, {"machine": machines.index}, min(left_s, _LOOK_S))
                break
            except OSError as e:
                if time.monotonic() >= deadline_s or is_interrupted():
                    raise StartupError(
                        f"the rendezvous at {self.address}",
                        f"machine {machines.index} could not connect to it for {timeout_s:g} s: {f'{e.strerror or e}'.rstrip('.')}.",
                        "start phalanx run on the first machine too, and check whether this machine can reach its address",
                    ) from e
        self._told, self._standing = LauncherReport(), GroupStatus()
        self._messages = self._connection.messages((GroupStatus, GroupTerms, KillRequest))
        self._require(terms)

    def _require(self, terms: str) -> None:
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
        raise StartupError(f"the group at {self.address}", problem, "the same --workers and cluster on all machines")

    def report(self, report: LauncherReport) -> GroupStatus:
        """See `Rendezvous.report`."""
        if report != self._told:  # Called at each turn of the launcher.
            self._told = report
            self._connection.say(report)
        return self._standing

    def end(self) -> None:
        """Ends the connection."""
        cut(self._connection.socket)
        # The end of the connection ends the loop of `run`.
        self.join()

    @override
    def run(self) -> None:
        with self._connection.socket:
            for message in self._messages:
                if isinstance(message, KillRequest):
                    self._kill(message.number, message.why)
                elif isinstance(message, GroupStatus):
                    self._standing = message
        if not self._standing.has_finished:
            # Nobody is left who could bring the processes of this machine together again.
            why = f"the launcher at {self.address}, which coordinates all machines, is gone"
            self._standing = replace(self._standing, gone=(), hopeless=self._standing.hopeless or why)
