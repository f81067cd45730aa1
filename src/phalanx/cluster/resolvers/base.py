# SPDX-License-Identifier: Apache-2.0
"""What a resolver is, and how the resolvers read their environment."""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from phalanx.cluster.spec import MAX_PORT, ClusterSpec, Task
from phalanx.errors import ClusterSourceError, ClusterTypeError, MissingDependencyError, arguments, shown


class ClusterResolver(ABC):
    """Tells a process which cluster it belongs to, and which task it is. May be used in any context.

    Each question is answered anew. A resolver of your own needs `cluster_spec` alone; its user then sets `task_type` and
    `task_id`.

    Source: tf.distribute.cluster_resolver.ClusterResolver.

    Example:
      >>> class TwoHosts(ClusterResolver):
      ...     def cluster_spec(self):
      ...         return ClusterSpec({"worker": ["host0:12345", "host1:12345"]})
      >>> resolver = TwoHosts()
      >>> resolver.task_type, resolver.task_id = "worker", 1
      >>> resolver.master()
      'host1:12345'
    """

    # Of the class, so that a resolver whose constructor does not call this one has them too.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _given_environ: Mapping[str, str] | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks; an empty spec where there is no cluster."""

    @arguments.typed(ClusterTypeError)
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, of this process's own by default; empty where it has none.

        Args:
          task_type: a job.
          task_id: an index in it.
          rpc_layer: what precedes the address, as in `grpc://host0:12345`; by default the resolver's.

        Raises:
          ClusterError: the cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return self._with_layer(self.cluster_spec().task_address(task_type, task_id), rpc_layer)

    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        """Returns how many devices of each kind a task has, as in `{"GPU": 2}`; empty where only the task itself knows."""
        del task_type, task_id, config_proto
        return {}

    @property
    def environment(self) -> str | None:
        """Where the cluster runs; empty where that makes no difference."""
        return ""

    @property
    def task_type(self) -> str | None:
        """This process's job, or None where nothing tells."""
        if self._task_type is not None:
            return self._task_type
        return task.type if (task := self._find_task()) else None

    @task_type.setter
    @arguments.typed(ClusterTypeError)
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job, or None where nothing tells."""
        if self._task_id is not None:
            return self._task_id
        return task.index if (task := self._find_task()) else None

    @task_id.setter
    @arguments.typed(ClusterTypeError)
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """What precedes addresses in `master()`."""
        return self._rpc_layer

    @rpc_layer.setter
    @arguments.typed(ClusterTypeError)
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _find_task(self) -> Task | None:
        """Returns the task that the surroundings say this process is."""
        return None

    @property
    def _environ(self) -> Mapping[str, str]:
        return os.environ if self._given_environ is None else self._given_environ

    def _with_layer(self, address: str, rpc_layer: str | None) -> str:
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{address}" if layer and address else address


def check_port(port: Any, name: str = "port") -> int:
    """Returns a port.

    Raises:
      ClusterTypeError: it is not a number from 1 to 65535.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= MAX_PORT:
        raise ClusterTypeError(f"{name}={shown(port)}", f"must be a number from 1 to {MAX_PORT}.", f"{name}=12345")
    return port


def variable(environ: Mapping[str, str], name: str, meaning: str, hint: str) -> str:
    """Returns a variable of the environment.

    Args:
      environ: the environment.
      name: the variable.
      meaning: who sets it, for the error.
      hint: what to do where it is missing.

    Raises:
      ClusterSourceError: it is not set, or empty.
    """
    if not (value := environ.get(name, "").strip()):
        raise ClusterSourceError(name, f"is not set; {meaning}.", hint)
    return value


def number(environ: Mapping[str, str], name: str, meaning: str, hint: str, default: int | None = None) -> int:
    """Returns a variable of the environment that is a number, 0 or more.

    Args:
      environ: the environment.
      name: the variable.
      meaning: who sets it, for the error.
      hint: what to do where it is missing or wrong.
      default: the number where it is not set; None makes that an error.

    Raises:
      ClusterSourceError: it is not set and has no default, or is no number.
    """
    if default is not None and not environ.get(name):
        return default
    value = variable(environ, name, meaning, hint)
    if not value.isdecimal():
        raise ClusterSourceError(f"{name}={value!r}", f"must be a number; {meaning}.", hint)
    return int(value)


def optional_module(name: str, asked: str, package: str) -> Any:
    """Returns a module of an optional package.

    Args:
      name: the module.
      asked: what needs it, for the error.
      package: what to install.

    Raises:
      MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        found = f"{name} is needed for it, and is not installed."
        raise MissingDependencyError(asked, found, f"pip install {package}") from e


def google_service(name: str, version: str, credentials: Any, discovery_url: str | None = None) -> Any:
    """Returns a client of one of Google's services.

    Args:
      name: the service.
      version: its version.
      credentials: of google-auth; "default" finds them.
      discovery_url: where the service describes itself.

    Raises:
      MissingDependencyError: google-api-python-client is not installed.
    """
    discovery = optional_module("googleapiclient.discovery", f"the Google service {name!r}", "google-api-python-client")
    options = {"discoveryServiceUrl": discovery_url} if discovery_url else {}
    return discovery.build(name, version, credentials=None if credentials == "default" else credentials, **options)
