# SPDX-License-Identifier: Apache-2.0
"""The machines on which the processes of a group run: the plan of each start, and what starts a process."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol, Self, final

from phalanx._src.cluster.connections.ports import held_ports
from phalanx._src.launch.plan import ALONE, Machine, Machines, ProcessSpec, Request, plan
from phalanx._src.launch.processes import AbstractWorkerProcess, WorkerProcess
from phalanx.errors import InvalidArgumentError


class AbstractNodes(Protocol):
    """The machines on which a launcher starts processes. A context manager.

    Attributes:
      machines: the machines whose launchers form one group.
    """

    machines: Machines

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def plan(self, restart: int) -> list[ProcessSpec]:
        """Returns the processes to start.

        Args:
          restart: how often the group was started before.
        """

    def start(self, spec: ProcessSpec, mark: str, started_s: float) -> AbstractWorkerProcess:
        """Starts a process.

        Args:
          spec: the process.
          mark: marks it, and what it starts.
          started_s: when its group was started.
        """


@final
class ThisNode:
    """This machine, and its part of a request for several.

    Args:
      request: the script to run and the number of workers of all machines.
      environment: environment of the processes.
      machines: the machines of the group.

    Raises:
      InvalidArgumentError: the machines cannot have the same number of workers.
    """

    def __init__(self, request: Request, environment: Mapping[str, str], machines: Machines = ALONE) -> None:
        self.machines = machines
        self._request, self._environment = request.on(machines), environment
        self._machine = Machine.this(environment)

        self._held = ExitStack()
        self._ports: list[int] = []

    def __enter__(self) -> Self:
        # Held until the group has ended, so that nobody takes them before the workers do.
        with ExitStack() as stack:
            try:
                self._ports = [stack.enter_context(held).port for held in held_ports(self._request.workers)]
            except OSError as e:
                problem = f"this machine has no port for each worker: {e}."
                raise InvalidArgumentError(f"--workers {self._request.workers}", problem, "--workers 2") from e
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def plan(self, restart: int) -> list[ProcessSpec]:
        """See `AbstractNodes`."""
        return plan(self._request, self._machine, self._environment, self._ports, restart=restart)

    def start(self, spec: ProcessSpec, mark: str, started_s: float) -> AbstractWorkerProcess:
        """See `AbstractNodes`."""
        return WorkerProcess(spec, mark, started_s)
