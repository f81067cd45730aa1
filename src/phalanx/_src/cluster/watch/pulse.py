# SPDX-License-Identifier: Apache-2.0
"""Tells the other processes that this one is alive, although a long call in C keeps all its threads from running.

A thread cannot do this: it needs the lock of the interpreter, which such a call may hold. A child process can, and it looks whether this
process is stopped. Uses the standard library only.
"""

import os
from collections.abc import Iterable
from typing import final

from phalanx._src.cluster.processes.guard import Companion

SIGN = b"{}\n"
"""The message: one that says nothing."""

_CHILD = """
import os, select, sys
pid, every_s, sign, *descriptors = sys.argv[1:]
# The input ends when the process ends.
while not select.select([0], [], [], float(every_s))[0]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        state = file.read().rpartition(b")")[2].split()[0]
    if state in b"TtXZ":  # Stopped, or dead.
        continue
    for descriptor in descriptors:
        try:
            os.write(int(descriptor), sign.encode())
        except OSError:  # The other end has closed the connection, or takes nothing more.
            pass
"""


@final
class Pulse:
    """A child process that sends a sign of life over connections, as long as this process runs and is not stopped.

    It has the connections open too, and ends with this process. Without `/proc`, it sends nothing.

    Args:
      connections: descriptors of connections that take lines of JSON and do not block.
      every_s: time from one sign to the next, in seconds.

    Raises:
      OSError: the process cannot be started.
    """

    def __init__(self, connections: Iterable[int], every_s: float) -> None:
        descriptors = list(connections)
        words = [f"{os.getpid()}", f"{every_s}", SIGN.decode(), *map(str, descriptors)]
        self._process = Companion(["-c", _CHILD, *words], descriptors)

    def release(self) -> None:
        """Ends the child process."""
        self._process.release()
