# SPDX-License-Identifier: Apache-2.0
"""Resolver for the hosts of a training job on Amazon SageMaker."""

import json
from collections.abc import Mapping
from typing import final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver, check_port, number, variable
from phalanx._src.cluster.spec import ClusterSpec, Task
from phalanx.errors import ClusterSourceError, ClusterTypeError, arguments, shown

_MEANING = "SageMaker sets it for each container of a training job"
_HINT = """SM_HOSTS='["algo-1", "algo-2"]' SM_CURRENT_HOST=algo-1"""


@final
class SageMakerClusterResolver(ClusterResolver):
    """Resolves the hosts of a training job on Amazon SageMaker, one worker per host. May be used in any context.

    Args:
      port: port on which every host listens.
      task_type: job of this process; "worker" by default.
      task_id: index of this process; by default the index of SM_CURRENT_HOST in the sorted hosts.
      rpc_layer: prefix of the addresses in `master()`.
      environment: name of the environment in which the cluster runs.
      environ: environment variables to read; by default those of this process.

    Source: tf.distribute's SageMakerClusterResolver.

    Example:
      >>> environ = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
      >>> resolver = SageMakerClusterResolver(environ=environ)
      >>> resolver.task_id, resolver.cluster_spec()
      (1, ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}))
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._port, self._given_environ, self._environment = check_port(port), environ, environment
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer

    @property
    @override
    def environment(self) -> str | None:
        return self._environment

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all hosts, sorted.

        Raises:
          ClusterSourceError: SM_HOSTS or SM_CURRENT_HOST is missing or wrong.
        """
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in self._hosts()]})

    @override
    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        count = number(self._environ, "SM_NUM_GPUS", _MEANING, "SM_NUM_GPUS=1", default=0)
        return {"GPU": count} if count else {}

    @override
    def _find_task(self) -> Task:
        # `_hosts` has checked that the variable is set and that the host is in the list.
        return Task("worker", self._hosts().index(self._environ["SM_CURRENT_HOST"].strip()))

    def _hosts(self) -> list[str]:
        text = variable(self._environ, "SM_HOSTS", _MEANING, _HINT)
        current_host = variable(self._environ, "SM_CURRENT_HOST", _MEANING, _HINT)
        try:
            hosts = json.loads(text)
        except (RecursionError, ValueError):  # Thousands of brackets, or no JSON.
            hosts = None
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ClusterSourceError(f"SM_HOSTS={shown(text, 80)}", "must be a JSON list of host names.", _HINT)
        if current_host not in hosts:
            raise ClusterSourceError(
                f"SM_CURRENT_HOST={current_host!r:.80}", f"is not one of SM_HOSTS={text:.200}.", _HINT
            )
        # As in tf.distribute: the order in SM_HOSTS does not decide which host is the chief.
        return sorted(hosts)
