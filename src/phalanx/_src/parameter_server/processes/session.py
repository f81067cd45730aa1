# SPDX-License-Identifier: Apache-2.0
"""Ray's processes on this machine: their token, their files, and which process they end with."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import ClassVar, NoReturn, final

from typing_extensions import override

from phalanx._src.cluster.processes.owned import MarkedProcesses, OwnedProcesses
from phalanx._src.launch.plan import free_ports
from phalanx._src.launch.processes import MARK
from phalanx._src.parameter_server.processes.handles import Ray
from phalanx.errors import StartupError

_TRIES = 3
_GRACE_S = 1.0
_START_S = 300.0
_NAMESPACE = "phalanx"


class AbstractSession(ABC):
    """The connection of this process to Ray's processes on this machine.

    Args:
      ray: the module `ray`.
      processes: Ray's processes.
      address: host name or address at which they listen.
      settings: environment variables for them.
      dashboard: whether to start Ray's dashboard.

    Raises:
      StartupError: Ray did not start.
    """

    outlives: ClassVar[bool]
    """Whether Ray's processes, and actors that have names, outlive this process."""

    def __init__(
        self, ray: Ray, processes: MarkedProcesses, address: str, settings: Mapping[str, str], *, dashboard: bool
    ) -> None:
        self._ray, self._processes, self._settings = ray, processes, settings
        self._address, self._dashboard = address, dashboard
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        make_token()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        _set_sigterm(_end if self._on_sigterm in (signal.SIG_DFL, None) else self._on_sigterm)

    def close(self) -> None:
        """Ends the connection, and the processes if they do not outlive this one."""
        self._ray.shutdown()
        self._release()
        if signal.getsignal(signal.SIGTERM) is _end:
            _set_sigterm(signal.SIG_DFL)

    @abstractmethod
    def _open(self) -> None:
        """Starts Ray's processes if they are not running, and connects to them. Raises any exception if that fails."""

    @abstractmethod
    def _release(self) -> None:
        """Ends Ray's processes, if this process owns them."""

    def _start(self) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                self._open()
                return
            except Exception as e:  # Ray raises plain `Exception` for a timeout.
                self._ray.shutdown()
                self._processes.end()
                # Ray waits 30 s for its own processes, which is too short on a very busy machine. The limit cannot be set:
                # https://github.com/ray-project/ray/issues/50474.
                if attempt == _TRIES or "timed out" not in str(e):
                    raise StartupError(
                        f"starting Ray at {self._address}",
                        f"Ray failed to start after {attempt} tries: {str(e).strip()[-1000:]}",
                        "try again when the machine is less busy; use an address of this machine with a free port for the chief; "
                        "make room on the disk of RAY_TMPDIR, or of the folder for temporary files",
                    ) from e

    def _init(self, **options: object) -> None:
        """Calls `ray.init`."""
        with environment({**self._settings, **self._processes.variables}), warnings.catch_warnings():
            # JAX warns about `os.fork()` in a process with threads. Ray forks only to execute another program at once,
            # which is safe.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            self._ray.init(
                configure_logging=False,
                _node_ip_address=socket.gethostbyname(self._address),
                namespace=_NAMESPACE,
                **options,
            )


@final
class Session(AbstractSession):
    """Ray's processes end with this process, however it ends."""

    outlives = False

    def __init__(self, ray: Ray, address: str, settings: Mapping[str, str], *, dashboard: bool) -> None:
        self._owned = OwnedProcesses()
        super().__init__(ray, self._owned.marked, address, settings, dashboard=dashboard)

    @override
    def _open(self) -> None:
        self._init(
            address="local",
            num_cpus=_num_cpus(),
            include_dashboard=self._dashboard,
            # Ray makes its own folder world-writable, so place it inside one that only this user can enter.
            _temp_dir=f"{self._processes.folder}/ray",
        )

    @override
    def _release(self) -> None:
        self._owned.close(_GRACE_S)


@final
class KeptSession(AbstractSession):
    """Ray's processes belong to the launcher, so the next start of this script finds them again.

    Args:
      folder: the folder of the launcher.
    """

    outlives = True

    def __init__(self, ray: Ray, folder: str, address: str, settings: Mapping[str, str], *, dashboard: bool) -> None:
        # Contains the port of Ray's head process, once that accepts connections.
        self._port = Path(folder, "port")
        super().__init__(ray, MarkedProcesses(folder), address, settings, dashboard=dashboard)

    @override
    def _open(self) -> None:
        if not self._has_reconnected():
            # Processes of a Ray that has died, or whose start was cut off.
            self._processes.end()
            self._port.write_text(self._started())
            self._init(address=f"{self._address}:{self._port.read_text()}")

    @override
    def _release(self) -> None:
        """Does nothing: the launcher ends the processes."""

    def _has_reconnected(self) -> bool:
        """Connects to the processes of an earlier start. Returns whether that was possible."""
        with suppress(Exception):  # Ray raises plain `Exception` too.
            address = f"{self._address}:{self._port.read_text()}"
            if listens(address):
                self._init(address=address)
                return True
        self._ray.shutdown()
        return False

    def _started(self) -> str:
        """Starts Ray's processes, and returns their port."""
        (port,) = free_ports(1)
        node = subprocess.run(
            [
                ray_command(),
                "start",
                "--head",
                f"--port={port}",
                f"--node-ip-address={self._address}",
                f"--num-cpus={_num_cpus()}",
                f"--include-dashboard={self._dashboard}",
                f"--temp-dir={self._processes.folder}/ray",
                "--disable-usage-stats",
            ],
            # Without the mark of the launcher's group, which ends before the next start.
            env={k: v for k, v in os.environ.items() if k != MARK} | dict(self._settings) | self._processes.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_START_S,
            check=False,
            start_new_session=True,
        )
        if node.returncode:
            raise RuntimeError(node.stdout)
        return str(port)


def ray_command() -> str:
    """Returns the path of Ray's command line."""
    return str(Path(sys.executable).with_name("ray"))


def listens(address: str) -> bool:
    """Returns whether a process accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except OSError:
        return False


def _num_cpus() -> int:
    return max(1, os.cpu_count() or 1)


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
