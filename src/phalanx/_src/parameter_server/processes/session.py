# SPDX-License-Identifier: Apache-2.0
"""Ray's processes on this machine: their token, their files, and which process they end with."""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import ClassVar, NoReturn, final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import answers, reach
from phalanx._src.cluster.connections.ports import HeldPort
from phalanx._src.cluster.connections.secret import new_token
from phalanx._src.cluster.processes.owned import MarkedProcesses, OwnedProcesses, job_of_ray
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.launch.processes import MARK
from phalanx._src.parameter_server.processes.handles import Ray
from phalanx.errors import StartupError

_TRIES = 3
_GRACE_S = 1.0
_START_S = 300.0
_NAMESPACE = "phalanx"
ADDRESS = "RAY_ADDRESS"
"""The variable with which `ray job submit` and KubeRay name a Ray cluster. `ray.init` reads it."""
_TOKEN = "RAY_AUTH_TOKEN"
# The command line of Ray. See `_loopback_kept`.
_RAY = (
    "import sys\nfrom ray._private import services\nservices.resolve_ip_for_localhost = lambda host: host\n"
    "from ray.scripts.scripts import main\nsys.exit(main())"
)


class AbstractSession(ABC):
    """The connection of this process to Ray's processes on this machine.

    Args:
      ray: the module `ray`.
      processes: Ray's processes.
      address: the address at which they listen: the loopback one, or else all of this machine.
      token: the token with which they know each other. It is in a file of their folder, which only this user can enter.
      dashboard: whether to start Ray's dashboard.

    Raises:
      StartupError: Ray did not start.
    """

    outlives: ClassVar[bool]
    """Whether Ray's processes, and actors that have names, outlive this process."""

    def __init__(self, ray: Ray, processes: MarkedProcesses, address: str, token: str, *, dashboard: bool) -> None:
        self._ray, self._processes = ray, processes
        self._settings = token_variables(processes.folder, token)
        self._address, self._dashboard = address, dashboard
        try:
            with _sigterm_kept():
                self._start()
        except BaseException:
            self.close()
            raise

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
        # Ray remembers the token of an earlier session of this process.
        importlib.import_module("ray._raylet").AuthenticationTokenLoader.instance().reset_cache()
        settings = {**self._settings, **self._processes.variables}
        with _environment(settings), _loopback_kept(), warnings.catch_warnings():
            # JAX warns about `os.fork()` in a process with threads. Ray forks only to execute another program at once,
            # which is safe.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            self._ray.init(
                configure_logging=False,
                _node_ip_address=self._address,
                namespace=_NAMESPACE,
                job_config=job_of_ray(self._ray),
                **options,
            )


@final
class Session(AbstractSession):
    """Ray's processes end with this process, however it ends."""

    outlives = False

    def __init__(self, ray: Ray, address: str, token: str, *, dashboard: bool) -> None:
        self._owned = OwnedProcesses()
        super().__init__(ray, self._owned.marked, address, token, dashboard=dashboard)

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

    def __init__(self, ray: Ray, folder: str, address: str, *, dashboard: bool) -> None:
        # Contains the port of Ray's head process, once that accepts connections.
        self._port = Path(folder, "port")
        super().__init__(ray, MarkedProcesses(folder), address, new_token(), dashboard=dashboard)

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
            if answers(address):
                self._init(address=address)
                return True
        self._ray.shutdown()
        return False

    def _started(self) -> str:
        """Starts Ray's processes, and returns their port."""
        with HeldPort(self._address) as held:
            port = held.port
        node = subprocess.run(
            [
                *RAY_START,
                "--head",
                f"--port={port}",
                f"--node-ip-address={self._address}",
                f"--num-cpus={_num_cpus()}",
                f"--include-dashboard={self._dashboard}",
                f"--temp-dir={self._processes.folder}/ray",
                "--disable-usage-stats",
            ],
            # Without the mark of the launcher's group, which ends before the next start.
            env={k: v for k, v in os.environ.items() if k not in {MARK, _TOKEN}}
            | self._settings
            | self._processes.variables,
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


def join(ray: Ray) -> None:
    """Connects this process with the Ray cluster that RAY_ADDRESS names, until its end.

    Raises:
      StartupError: the cluster does not answer.
    """
    address = os.environ[ADDRESS]
    try:
        # Ray itself tries for minutes, and says nothing that a user understands.
        if re.fullmatch(r"[^/]+:[0-9]+", address) and (
            connection := reach(address, time.monotonic() + start_timeout_s(os.environ))
        ):
            connection.close()
        with _sigterm_kept():
            ray.init(configure_logging=False, job_config=job_of_ray(ray))
    except Exception as e:  # Ray raises many kinds.
        raise StartupError(
            f"{ADDRESS}={address}",
            f"this Ray cluster does not answer: {str(e).strip().partition(chr(10))[0]}",
            f"{ADDRESS}=auto on a node of the cluster, with its RAY_AUTH_MODE and RAY_AUTH_TOKEN; "
            f"unset {ADDRESS} to start the processes on this machine",
        ) from e


RAY_START = (sys.executable, "-P", "-c", _RAY, "start")
"""The command that starts Ray's processes on this machine, without its options."""


def _num_cpus() -> int:
    return max(1, os.cpu_count() or 1)


def token_variables(folder: str, token: str) -> dict[str, str]:
    """Returns variables with which Ray's processes find their token, which an earlier start may have put into their folder."""
    path = os.path.join(folder, "token")
    with suppress(FileExistsError), os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(token)
    return {"RAY_AUTH_TOKEN_PATH": path}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the context, where Ray does not see a token of the user, and restores them afterwards."""
    before = dict(os.environ)
    os.environ.pop(_TOKEN, None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in (_TOKEN, *values):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@contextmanager
def _loopback_kept() -> Iterator[None]:
    """Makes Ray listen at 127.0.0.1 if that is its address. By default it takes another address of the machine then, and listens at all.

    The function whose place this takes is not public. `_RAY` does the same in the command line.
    """
    services = importlib.import_module("ray._private.services")
    resolve = services.resolve_ip_for_localhost
    vars(services)["resolve_ip_for_localhost"] = lambda host: host
    try:
        yield
    finally:
        vars(services)["resolve_ip_for_localhost"] = resolve


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Calls of `ray.init` inside the context leave the handler of SIGTERM as it is, or else `finally` blocks run."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    _set_sigterm(_end if handler in (signal.SIG_DFL, None) else handler)


def _set_sigterm(handler: Callable[[int, FrameType | None], object] | int) -> None:
    """Sets the handler of SIGTERM, in the main thread only.

    `ray.init` installs a handler that prints a stack and ends the process without running its `finally` blocks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _end(number: int, _: FrameType | None) -> NoReturn:
    """Handles SIGTERM like `sys.exit`, so that `finally` blocks run and child processes end."""
    sys.exit(128 + number)
