# SPDX-License-Identifier: Apache-2.0
"""JAX's coordination services, in a separate process: the launcher does not import JAX."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import final

from phalanx._src.cluster.connections.hosts import PRIVATE
from phalanx._src.cluster.connections.ports import short_folder


@final
class Service:
    """A process that runs JAX's coordination services, because the launcher does not import JAX.

    Args:
      environment: its environment.
      host: the address of this machine that the processes of the group can reach. Empty if all are on this machine.
    """

    def __init__(self, environment: Mapping[str, str], host: str) -> None:
        self._host, self._number = host, 0
        # Other users can enter no folder that is made by this function.
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-service-", dir=short_folder())
        self._process = subprocess.Popen(
            # -P: nothing is imported from the current folder, which may be another user's.
            [sys.executable, "-P", "-m", "phalanx._src.runtime.coordination"],
            env={**environment, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"},
            # If the launcher is killed, the service ends with its input.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C in the terminal reaches the launcher alone, whose workers need the service until they have ended.
            start_new_session=True,
        )

    def start(self, machines: Sequence[str]) -> str:
        """Starts the service for a group, and returns its address.

        Args:
          machines: the address from which each process of the group comes.

        Raises:
          OSError: it cannot be started.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._number += 1
        place, admitted = self._host or f"{PRIVATE}{self._folder.name}/{self._number}", machines if self._host else ()
        self._process.stdin.write(" ".join([place, f"{len(machines)}", *admitted]) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said.startswith("started "):
            raise OSError(f"JAX's coordination service did not start: {said or 'its process exited'}")
        return said.split()[1]

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()
        self._folder.cleanup()
