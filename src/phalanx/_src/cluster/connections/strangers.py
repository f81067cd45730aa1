# SPDX-License-Identifier: Apache-2.0
"""Names the strangers at a port of this process: one line per minute for each machine that they come from."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import final

from phalanx.errors import listed
from phalanx.errors.printable import printable

_SILENT_S = 60.0

End = tuple[str, int]
"""The host and the port at which a connection ends."""


@final
class Strangers:
    """The strangers at a port.

    Args:
      port: which port it is, in words.
      tell: writes a line for the user.
      clock: returns the time in seconds.

    Attributes:
      places: where all of them came from.
    """

    def __init__(
        self, port: str, tell: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port, self._tell, self._clock = port, tell or write_line, clock
        self.places: set[str] = set()
        self._silent_until_s: dict[str, float] = {}

    def note(self, ends: Iterable[End]) -> None:
        """Notes that connections with these other ends were refused or ended. Tells the user, but not too often."""
        ends, now_s = set(ends), self._clock()
        places = {f"{host}{_user_at(host, port)}" for host, port in ends}
        self.places |= places
        hosts = {host for host, _ in ends}
        if any(now_s >= self._silent_until_s.get(host, 0.0) for host in hosts):
            self._silent_until_s |= dict.fromkeys(hosts, now_s + _SILENT_S)
            self._tell(
                f"Strangers have connected to {self._port}, from {listed(sorted(places))}. "
                f"Their connections were ended, {len(ends)} at this moment."
            )


def write_line(text: str) -> None:
    """Writes a line to the standard error, whatever the program has done with it."""
    with suppress(OSError):
        os.write(2, f"\nPhalanx: {printable(text)}\n".encode())


def _user_at(host: str, port: int) -> str:
    """Returns which user of this machine has a connection, if one has."""
    with suppress(OSError, ValueError):
        # The kernel writes the bytes of an address backwards.
        place = "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{port:04X}"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, _, _, _, _, user, _, inode, *_ = line.split()
            # A connection that was closed belongs to nobody any more, and the kernel writes 0 for that.
            if local == place and inode != "0":
                return f" (user {user} of this machine)"
    return ""
