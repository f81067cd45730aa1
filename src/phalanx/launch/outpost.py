# SPDX-License-Identifier: Apache-2.0
"""The end of the rendezvous on the machines that do not hold it: the launcher there keeps a connection with the first machine."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import final

from typing_extensions import override

from phalanx.cluster.door import knock, parsed, send, split
from phalanx.cluster.secret import secret_of
from phalanx.errors import StartupError
from phalanx.launch.plan import Machines
from phalanx.launch.standing import START_S, Report, Standing

_CONNECT_S = 5.0
_RETRY_S = 0.2


@final
class Outpost(threading.Thread):
    """What an elastic group has instead of a `Rendezvous`, on a machine other than the first.

    Args:
      environment: environment of the processes, with the secret.
      kill: called with the number of a process of this machine that keeps the others from going on, and the reason.
      machines: the machines of the group.

    Raises:
      StartupError: the first machine does not answer, or has another secret.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        kill: Callable[[int, str], None],
        machines: Machines,
    ) -> None:
        super().__init__(name="phalanx-outpost", daemon=True)
        self.address, self._kill = machines.address, kill
        self._secret, self._hello = secret_of([self.address], environment), {"machine": machines.index}
        self._connection = self._connected()
        self._told, self._standing = Report(), Standing()

    def report(self, report: Report) -> Standing:
        """See `AbstractRendezvous`."""
        if report != self._told:
            self._told = report
            send(self._connection, asdict(report))
        return self._standing

    def end(self) -> None:
        """Ends the connection."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.join()

    @override
    def run(self) -> None:
        with self._connection, self._connection.makefile("rb") as lines, suppress(OSError):
            for line in lines:
                self._hear(parsed(line))
        # Nobody is left who could bring the processes of this machine together again.
        self._standing = Standing(
            self._standing.steps, (), not self._standing.has_finished, self._standing.has_finished
        )

    def _hear(self, message: dict[str, object]) -> None:
        if "kill" in message:
            self._kill(int(str(message["kill"])), str(message["why"]))
        elif message:
            gone = message["gone"]
            self._standing = Standing(**{**message, "gone": tuple(gone) if isinstance(gone, list) else None})  # type: ignore[arg-type]

    def _connected(self) -> socket.socket:
        deadline_s, cause = time.monotonic() + START_S, "it closes the connection"
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                connection = socket.create_connection(split(self.address), timeout=min(left_s, _CONNECT_S))
            except OSError as e:
                cause = e.strerror or str(e)
            else:
                try:
                    if knock(connection, self._secret, self._hello, _CONNECT_S) is None:
                        connection.settimeout(None)
                        return connection
                except BaseException:
                    connection.close()
                    raise
                connection.close()
            time.sleep(min(_RETRY_S, max(0.0, left_s)))
        raise StartupError(
            f"the rendezvous at {self.address}",
            f"machine {self._hello['machine']} could not connect to it for {START_S:g} s: {cause}.",
            "start phalanx run on the first machine too, and check whether this machine can reach its address",
        )
