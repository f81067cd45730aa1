# SPDX-License-Identifier: Apache-2.0
"""The machines on which the processes of a group run: the plan of each start, and what starts a process."""

from collections.abc import Mapping
from typing import Protocol, Self, final

from phalanx._src.launch.plan import ALONE, Machine, Machines, ProcessSpec, Request, free_ports, plan
from phalanx._src.launch.processes import AbstractWorkerProcess, WorkerProcess


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def plan(self, restart: int) -> list[ProcessSpec]:
        """See `AbstractNodes`."""
        ports = free_ports(self._request.workers)
        return plan(self._request, self._machine, self._environment, ports, restart=restart)

    def start(self, spec: ProcessSpec, mark: str, started_s: float) -> AbstractWorkerProcess:
        """See `AbstractNodes`."""
        return WorkerProcess(spec, mark, started_s)
