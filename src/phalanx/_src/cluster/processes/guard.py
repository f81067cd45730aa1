# SPDX-License-Identifier: Apache-2.0
"""Kills the processes that another process started, if that process is killed and cannot do it itself.

The processes carry a mark: an environment variable, which their children inherit in every process group and session.
A process that sets its own title, as Ray's do, overwrites its environment. The guard recognizes it by its open files.
As a script, this file waits for the end of its input and then kills all marked processes. Each line of the input has the process groups
to kill as well, instead of those of the line before. It uses the standard library only.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

_PATIENCE_S = 10.0
_POLL_S = 0.05


def start_apart(arguments: Sequence[str], descriptors: Sequence[int], stdin: int) -> subprocess.Popen[bytes]:
    """Starts a child process that outlives this one, and a signal to it.

    Args:
      arguments: arguments of Python. The process uses the standard library only.
      descriptors: open files that it takes over.
      stdin: its input, as for `subprocess.Popen`.

    Raises:
      OSError: the process cannot be started.
    """
    return subprocess.Popen(
        # Neither modules of the current folder nor start hooks of installed packages run in it.
        [sys.executable, "-I", "-S", *arguments],
        pass_fds=descriptors,
        # With the mark of its owner in its environment, the launcher or another guard would end it together with its owner.
        env={},
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # It must survive Ctrl-C, the end of the terminal, and what a launcher sends to the group of this process.
        start_new_session=True,
    )


class Companion:
    """A child process that learns of the end of this one by the end of its input. See `start_apart`.

    Args:
      arguments: arguments of Python.
      descriptors: open files that it takes over.

    Raises:
      OSError: the process cannot be started.
    """

    def __init__(self, arguments: Sequence[str], descriptors: Sequence[int] = ()) -> None:
        self._process = start_apart(arguments, descriptors, subprocess.PIPE)

    def say(self, line: str) -> None:
        """Writes a line to its input."""
        assert self._process.stdin is not None
        with suppress(OSError):  # It has ended, for example because the user has killed it.
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def release(self) -> None:
        """Ends the process."""
        # Kill first: closing its input would look like the end of this process.
        self._process.kill()
        self._process.communicate()


@final
class Guard:
    """A child process that waits until this process ends, and then kills the marked processes.

    Args:
      mark: `NAME=value`, an entry in the environment of the processes to kill.
      folder: folder to remove afterwards. Empty for none.

    Example:
      >>> guard = Guard("PHALANX_EXAMPLE=1")
      >>> guard.release()
    """

    def __init__(self, mark: str, folder: str = "") -> None:
        self._process = Companion([__file__, mark, folder])

    def watch(self, groups: Iterable[int]) -> None:
        """Sets the process groups to kill as well, for systems that do not show environments."""
        self._process.say(" ".join(map(str, groups)))

    def release(self) -> None:
        """Ends the guard process, once there is nothing to guard."""
        self._process.release()


def marked(mark: str, folder: str = "") -> list[int]:
    """Returns the ids of the marked processes, as far as the system shows environments.

    Args:
      mark: `NAME=value`.
      folder: folder in which processes with an overwritten environment have open files. Empty if there are none.
    """
    pids, entry = [], mark.encode()
    for path in Path("/proc").glob("[0-9]*"):
        # Processes that have just ended, or belong to other users, cannot be read.
        with suppress(OSError):
            environment = (path / "environ").read_bytes()
            is_overwritten = folder and environment.startswith(b"\0")
            if entry in environment.split(b"\0") or (is_overwritten and _uses(path, folder)):
                pids.append(int(path.name))
    return pids


def end_marked(mark: str, folder: str = "", grace_s: float = 0.0) -> None:
    """Waits until no process has the mark, and kills the processes that still have it after the grace period."""
    began = time.monotonic()
    while (pids := marked(mark, folder)) and (waited_s := time.monotonic() - began) < grace_s + _PATIENCE_S:
        if waited_s >= grace_s:
            # In each turn again: a process may have started another one just before it was killed.
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _uses(process: Path, folder: str) -> bool:
    return any(os.readlink(fd).startswith(folder + "/") for fd in (process / "fd").iterdir())


def _main(mark: str, folder: str) -> None:
    groups: list[bytes] = []
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):  # The process may have been killed while it wrote the last line.
            groups = line.split()
    # First, because this works without /proc too.
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(group), signal.SIGKILL)
    end_marked(mark, folder)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
