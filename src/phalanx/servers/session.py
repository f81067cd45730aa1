# SPDX-License-Identifier: Apache-2.0
"""Ray's processes on this machine: their token, their files, and that they end with this process."""

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, final

from phalanx.cluster.guard import Guard, end_marked
from phalanx.errors import StartupError
from phalanx.servers.handles import Ray

_MARK = "PHALANX_RAY"
_TRIES = 3
_GRACE_S = 1.0
_LONGEST_ROOT = 24
"""Longest path of the folder for temporary files. Paths of Unix sockets have at most 107 characters, and Ray appends the rest."""


@final
class OwnedProcesses:
    """Child processes that end with this process, however it ends, and a folder for their files.

    The processes are recognized by a variable of their environment, which their own children inherit. Only the current user can
    enter the folder.

    Attributes:
      folder: path of the folder.
      variables: environment variables that mark the processes. Start them with these.
    """

    def __init__(self) -> None:
        root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="phalanx-", dir=root if len(root) <= _LONGEST_ROOT else "/tmp")
        self.variables = {_MARK: uuid.uuid4().hex}
        self._mark = f"{_MARK}={self.variables[_MARK]}"
        self._guard = Guard(self._mark, self.folder)

    def end(self, grace_s: float = 0.0) -> None:
        """Kills the processes that are still running after `grace_s` seconds."""
        end_marked(self._mark, self.folder, grace_s)

    def close(self, grace_s: float) -> None:
        """Ends the processes and removes the folder."""
        self.end(grace_s)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._guard.release()


@final
class Session:
    """Ray's processes on this machine, which end with this process, however it ends.

    Args:
      ray: the module `ray`.
      address: host name or address at which they listen.
      settings: environment variables for them.
      dashboard: whether to start Ray's dashboard.

    Raises:
      StartupError: Ray did not start.
    """

    def __init__(self, ray: Ray, address: str, settings: Mapping[str, str], *, dashboard: bool) -> None:
        self._ray, self._processes = ray, OwnedProcesses()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        make_token()
        try:
            with environment({**settings, **self._processes.variables}):
                self._start(address, dashboard=dashboard)
        except BaseException:
            self.close()
            raise
        _set_sigterm(_end if self._on_sigterm in (signal.SIG_DFL, None) else self._on_sigterm)

    def close(self) -> None:
        """Ends the processes."""
        self._ray.shutdown()
        self._processes.close(_GRACE_S)
        if signal.getsignal(signal.SIGTERM) is _end:
            _set_sigterm(signal.SIG_DFL)

    def _start(self, address: str, *, dashboard: bool) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                self._init(address, dashboard=dashboard)
                return
            except Exception as e:  # Ray raises plain `Exception` for a timeout.
                self._ray.shutdown()
                self._processes.end()
                # Ray waits 30 s for its own processes, which is too short on a very busy machine. The limit cannot be set:
                # https://github.com/ray-project/ray/issues/50474.
                if attempt == _TRIES or "timed out" not in str(e):
                    raise StartupError(
                        f"starting Ray at {address}",
                        f"Ray failed to start after {attempt} tries: {str(e).strip()[-1000:]}",
                        "try again when the machine is less busy; use an address of this machine with a free port for the chief; "
                        "make room on the disk of RAY_TMPDIR, or of the folder for temporary files",
                    ) from e

    def _init(self, address: str, *, dashboard: bool) -> None:
        with warnings.catch_warnings():
            # JAX warns about `os.fork()` in a process with threads. Ray forks only to execute another program at once,
            # which is safe.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            self._ray.init(
                address="local",
                num_cpus=max(1, os.cpu_count() or 1),
                include_dashboard=dashboard,
                configure_logging=False,
                _node_ip_address=socket.gethostbyname(address),
                # Ray makes its own folder world-writable, so place it inside one that only this user can enter.
                _temp_dir=f"{self._processes.folder}/ray",
            )


def make_token() -> None:
    """Creates the token file of this user with mode 600, unless the environment defines a token."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    path = Path.home() / ".ray" / "auth_token"
    # If the home directory is not writable, Ray reports it.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_EXCL: of several processes that start together, one creates the token and all others keep it.
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
        ):
            file.write(secrets.token_hex(32))
        path.chmod(0o600)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the context, and restores them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _set_sigterm(handler: Callable[[int, FrameType | None], object] | int) -> None:
    """Sets the handler of SIGTERM, in the main thread only.

    `ray.init` installs a handler that prints a stack and ends the process without running its `finally` blocks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _end(number: int, _: FrameType | None) -> NoReturn:
    """Handles SIGTERM like `sys.exit`, so that `finally` blocks run and child processes end."""
    sys.exit(128 + number)
