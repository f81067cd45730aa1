# SPDX-License-Identifier: Apache-2.0
"""A process that ends what another process has started, if that one is killed and cannot do it itself.

Whatever is to end carries a mark, a variable of its environment, which all its children inherit, in whatever group or session they are.
A process that shows a title of its own, as Ray's do, has overwritten its environment; it is known by the files that it has open.
Run as a script, this file waits for the end of its input and then kills all processes with the mark. It needs the standard library alone.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

_PATIENCE_S = 10.0
_POLL_S = 0.05


@final
class Guard:
    """The process that waits for the end of this one.

    Args:
      mark: `NAME=value`, as it stands in the environment of the processes to kill.
      folder: a folder to remove afterwards; empty for none.
      groups: groups of processes to kill as well, where the system does not show environments.

    Example:
      >>> guard = Guard("PHALANX_EXAMPLE=1")
      >>> guard.release()
    """

    def __init__(self, mark: str, folder: str = "", groups: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, folder, *map(str, groups)],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C and the end of a terminal are not for it.
            start_new_session=True,
        )

    def release(self) -> None:
        """Ends it, once there is nothing to guard."""
        # In this order: it would take the end of its input for the end of this process.
        self._process.kill()
        self._process.communicate()


def marked(mark: str, folder: str = "") -> list[int]:
    """Returns the processes with the mark, as far as the system shows environments.

    Args:
      mark: `NAME=value`.
      folder: where those whose environment is overwritten have open files; empty if there are none.
    """
    found, wanted = [], mark.encode()
    for path in Path("/proc").glob("[0-9]*"):
        # A process that ends just now, and those of other users, cannot be read.
        with suppress(OSError):
            environment = (path / "environ").read_bytes()
            is_overwritten = folder and environment.startswith(b"\0")
            if wanted in environment.split(b"\0") or (is_overwritten and _uses(path, folder)):
                found.append(int(path.name))
    return found


def end_marked(mark: str, folder: str = "", grace_s: float = 0.0) -> None:
    """Waits until no process has the mark, and kills those that have it after the grace period."""
    began = time.monotonic()
    while (pids := marked(mark, folder)) and (waited_s := time.monotonic() - began) < grace_s + _PATIENCE_S:
        if waited_s >= grace_s:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _uses(process: Path, folder: str) -> bool:
    return any(os.readlink(fd).startswith(folder + "/") for fd in (process / "fd").iterdir())


def _main(mark: str, folder: str, *groups: str) -> None:
    sys.stdin.buffer.read()
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(group), signal.SIGKILL)
    end_marked(mark, folder)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
