# SPDX-License-Identifier: Apache-2.0
"""The base class of resolvers, and functions that read the environment for them."""

import importlib
import math
import os
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from phalanx._src.cluster.spec import MAX_PORT, MOST_TASKS, ClusterSpec, Task, is_unlisted
from phalanx.errors import (
    ClusterSourceError,
    ClusterTypeError,
    InvalidArgumentError,
    MissingDependencyError,
    arguments,
    shown,
)

_START_TIMEOUT_S, _STALL_TIMEOUT_S = 300.0, 600.0
_METADATA_TIMEOUT_S = 5.0


class ClusterResolver(ABC):
    """Describes the cluster of a process, and the task of the process in it. May be used in any context.

    Nothing is cached: every call reads its source again. A custom resolver only needs `cluster_spec`; its user then sets
    `task_type` and `task_id`.

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

    # Class attributes, so that subclasses need not call `super().__init__()`.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _given_environ: Mapping[str, str] | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks, or an empty spec if there is no cluster."""

    @arguments.typed(ClusterTypeError)
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, or an empty string if the task is unknown or an evaluator without an address.

        Args:
          task_type: job of the task; by default the job of this process.
          task_id: index of the task in its job; by default the index of this process.
          rpc_layer: prefix of the address, as in `grpc://host0:12345`; by default the resolver's.

        Raises:
          ClusterError: the cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        spec = self.cluster_spec()
        if is_unlisted(spec, Task(task_type, task_id)):
            return ""
        return self._with_layer(spec.task_address(task_type, task_id), rpc_layer)

    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        """Returns the number of devices of a task per kind, as in `{"GPU": 2}`; empty if only the task itself knows."""
        del task_type, task_id, config_proto
        return {}

    @property
    def environment(self) -> str | None:
        """The environment in which the cluster runs; empty if it makes no difference."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process, or None if it is unknown."""
        if self._task_type is not None:
            return self._task_type
        return task.type if (task := self._find_task()) else None

    @task_type.setter
    @arguments.typed(ClusterTypeError)
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if it is unknown."""
        if self._task_id is not None:
            return self._task_id
        return task.index if (task := self._find_task()) else None

    @task_id.setter
    @arguments.typed(ClusterTypeError)
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of the addresses in `master()`."""
        return self._rpc_layer

    @rpc_layer.setter
    @arguments.typed(ClusterTypeError)
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _find_task(self) -> Task | None:
        """Returns the task of this process according to its environment, or None if it is unknown."""
        return None

    @property
    def _environ(self) -> Mapping[str, str]:
        return os.environ if self._given_environ is None else self._given_environ

    def _with_layer(self, address: str, rpc_layer: str | None) -> str:
        layer = rpc_layer or self.rpc_layer
        # A prefix without an address would look like an address.
        return f"{layer}://{address}" if layer and address else address


def check_port(port: object, name: str = "port") -> int:
    """Returns `port`, a valid port number.

    Raises:
      ClusterTypeError: `port` is not an integer from 1 to 65535.
    """
    if not arguments.is_integer(port, 1, MAX_PORT):
        raise ClusterTypeError(f"{name}={shown(port)}", f"must be a number from 1 to {MAX_PORT}.", f"{name}=12345")
    return port


def check_count(count: object, name: str) -> int | None:
    """Returns `count`, a number of tasks, pods or devices, or None.

    Raises:
      ClusterTypeError: `count` is neither None nor a positive integer.
    """
    if count is not None and not arguments.is_integer(count, 1):
        raise ClusterTypeError(f"{name}={shown(count)}", "must be a positive integer.", f"{name}=2")
    return count


def variable(environ: Mapping[str, str], name: str, meaning: str, hint: str) -> str:
    """Returns the value of an environment variable.

    Args:
      environ: the environment.
      name: name of the variable.
      meaning: what sets the variable, for the message.
      hint: what to do if the variable is missing.

    Raises:
      ClusterSourceError: the variable is not set or empty.
    """
    if not (value := environ.get(name, "").strip()):
        raise ClusterSourceError(name, f"is not set; {meaning}.", hint)
    return value


def start_timeout_s(environ: Mapping[str, str]) -> float:
    """Returns how long the processes of a cluster, or the launchers of its machines, wait for each other, in seconds.

    Raises:
      InvalidArgumentError: PHALANX_START_TIMEOUT_S is not such a time.
    """
    return _seconds_of(environ, "PHALANX_START_TIMEOUT_S", _START_TIMEOUT_S)


def stall_limit_s(environ: Mapping[str, str]) -> float:
    """Returns the time without progress in any process, in seconds, after which a waiting cluster counts as stalled.

    Raises:
      InvalidArgumentError: PHALANX_STALL_TIMEOUT_S is not such a time.
    """
    return _seconds_of(environ, "PHALANX_STALL_TIMEOUT_S", _STALL_TIMEOUT_S)


def _seconds_of(environ: Mapping[str, str], name: str, default: float) -> float:
    """Returns the value of an environment variable that holds a time in seconds.

    Args:
      environ: the environment.
      name: name of the variable.
      default: time to return if the variable is not set or empty.

    Raises:
      InvalidArgumentError: the variable is not a finite number above 0.
    """
    text = environ.get(name) or f"{default}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    # False for NaN too, which stands for a text that is not a number.
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(f"{name}={text!r}", "must be a number of seconds above 0.", f"{name}=60")
    return seconds


def number(environ: Mapping[str, str], name: str, meaning: str, hint: str, default: int | None = None) -> int:
    """Returns the value of an environment variable as an integer of at least 0.

    Args:
      environ: the environment.
      name: name of the variable.
      meaning: what sets the variable, for the message.
      hint: what to do if the variable is missing or wrong.
      default: value to return if the variable is not set. None makes a missing variable an error.

    Raises:
      ClusterSourceError: the variable is not set and has no default, or is not a number, or is too large.
    """
    if default is not None and not environ.get(name):
        return default
    value = variable(environ, name, meaning, hint)
    if not arguments.is_number(value) or int(value) > MOST_TASKS:
        kind = f"at most {MOST_TASKS}" if arguments.is_number(value) else "a number"
        raise ClusterSourceError(f"{name}={value!r:.80}", f"must be {kind}; {meaning}.", hint)
    return int(value)


def optional_module(name: str, asked: str, package: str) -> Any:
    """Returns a module of an optional package.

    Args:
      name: name of the module.
      asked: what needs the module, for the message.
      package: name of the package to install.

    Raises:
      MissingDependencyError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        problem = f"{name} is needed for it, but is not installed."
        raise MissingDependencyError(asked, problem, f"pip install {package}") from e


def metadata(url: str) -> str:
    """Returns the answer of the metadata server of this Google machine.

    Raises:
      OSError, ValueError: it does not answer, or not with a text.
    """
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # The server belongs to this machine, so it is not behind a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_METADATA_TIMEOUT_S) as answer:
        return str(answer.read().decode().strip())


def google_service(name: str, version: str, credentials: object, discovery_url: str | None = None) -> Any:
    """Returns a client of a Google service.

    Args:
      name: name of the service.
      version: version of the service.
      credentials: credentials of google-auth. "default" finds them.
      discovery_url: URL of the description of the service.

    Raises:
      MissingDependencyError: google-api-python-client is not installed.
    """
    discovery = optional_module("googleapiclient.discovery", f"the Google service {name!r}", "google-api-python-client")
    options = {"discoveryServiceUrl": discovery_url} if discovery_url else {}
    return discovery.build(name, version, credentials=None if credentials == "default" else credentials, **options)
