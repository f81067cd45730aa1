# SPDX-License-Identifier: Apache-2.0
"""Ray as this process starts it: who may reach it, where it writes, and what ends it."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, final

from phalanx.cluster.guard import Guard, end_marked
from phalanx.errors import StartupError

_MARK = "PHALANX_RAY"
_TRIES = 3
_GRACE_S = 1.0
_LONGEST_ROOT = 24
"""Names of sockets may have 107 characters, of which Ray needs the others."""


@final
class OwnedProcesses:
    """Processes that end with this one, however it ends, and a folder for their files, which this user alone may enter.

    Attributes:
      folder: the folder.
      variables: the environment that marks the processes.
    """

    def __init__(self) -> None:
        root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="phalanx-", dir=root if len(root) <= _LONGEST_ROOT else "/tmp")
        self.variables = {_MARK: uuid.uuid4().hex}
        self._mark = f"{_MARK}={self.variables[_MARK]}"
        self._guard = Guard(self._mark, self.folder)

    def end(self, grace_s: float = 0.0) -> None:
        """Ends the processes that are still there after the grace period."""
        end_marked(self._mark, self.folder, grace_s)

    def close(self, grace_s: float) -> None:
        """Ends the processes, and removes the folder."""
        self.end(grace_s)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._guard.release()


@final
class Session:
    """Ray's processes on this machine, which end with this process, however it ends.

    Args:
      ray: the module.
      address: the host at which they listen.
      settings: variables of their environment.
      dashboard: whether to start Ray's.

    Raises:
      StartupError: they did not start.
    """

    def __init__(self, ray: Any, address: str, settings: Mapping[str, str], *, dashboard: bool) -> None:
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
            except Exception as e:  # Ray raises plain ones too.
                self._ray.shutdown()
                self._processes.end()
                # It waits 30 s for its own processes, which is too little on a machine that is very busy.
                if attempt == _TRIES or "timed out" not in str(e):
                    raise StartupError(
                        f"starting Ray at {address}",
                        f"it failed {attempt} times, and said: {str(e).strip()[-1000:]}",
                        "the same again when the machine is less busy; an address for the chief that is this machine's, with a free port; "
                        "a disk with room below RAY_TMPDIR, or else the folder for temporary files",
                    ) from e

    def _init(self, address: str, *, dashboard: bool) -> None:
        with warnings.catch_warnings():
            # Ray starts its processes by a fork, which executes another program at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            self._ray.init(
                address="local",
                num_cpus=max(1, os.cpu_count() or 1),
                include_dashboard=dashboard,
                configure_logging=False,
                _node_ip_address=socket.gethostbyname(address),
                # It opens what it makes itself to everybody; the folder around it is closed.
                _temp_dir=f"{self._processes.folder}/ray",
            )


def make_token() -> None:
    """Makes the token of this user, if Ray will look for one, and closes its file to others."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    path = Path.home() / ".ray" / "auth_token"
    # A home that cannot be written is for Ray to complain about.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
        ):
            file.write(secrets.token_hex(32))
        path.chmod(0o600)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment, and restores them afterwards."""
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


def _set_sigterm(handler: Any) -> None:
    """Sets what SIGTERM does. Ray has set what prints a stack, and ends the process without its `finally` blocks."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _end(number: int, _: Any) -> NoReturn:
    """Ends this process as `sys.exit` does: `finally` blocks run, and all that was started ends."""
    sys.exit(128 + number)
