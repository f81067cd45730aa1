# SPDX-License-Identifier: Apache-2.0
"""The process in which a tool runs that needs JAX: the command line itself imports none."""

import os
import runpy
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a module in a child process. Returns its exit code.

    It imports nothing from the current folder, which may be another user's.
    """
    command = [sys.executable, "-P", "-m", __name__, module, *arguments]
    return subprocess.run(command, check=False, env=environment).returncode


def main(module: str, *arguments: str) -> None:
    """Runs a module under the name `__main__`. Ends without a traceback if nobody reads its output any more.

    Args:
      module: its name.
      arguments: its arguments.
    """
    sys.argv = [module, *arguments]
    try:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            # Inside the `try`, because Python's own flush at its end only prints the error.
            sys.stdout.flush()
    except BrokenPipeError:
        # A script that the module runs may have lost its own connection.
        if not _has_no_reader(sys.stdout):
            raise
        # Python flushes the output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _has_no_reader(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe whose other end is closed."""
    poll = select.poll()
    # See poll(2): the end of a pipe that writes has this event once the other end is closed.
    poll.register(stream.fileno(), select.POLLERR)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
