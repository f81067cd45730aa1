# SPDX-License-Identifier: Apache-2.0
"""Resolver for a cluster that the program itself describes."""

from typing import final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.spec import ClusterSpec
from phalanx.errors import ClusterTypeError, arguments


@final
class SimpleClusterResolver(ClusterResolver):
    """Resolves a cluster that the program itself describes. May be used in any context.

    Args:
      cluster_spec: addresses of all tasks.
      master: result of `master()` if it is called without a task.
      task_type: job of this process.
      task_id: index of this process in its job.
      environment: name of the environment in which the cluster runs.
      num_accelerators: number of devices of a task per kind, as in `{"GPU": 2}`.
      rpc_layer: prefix of the addresses in `master()`.

    Raises:
      ClusterTypeError: `cluster_spec` is not a ClusterSpec, or `master` is not a string.

    Source: tf.distribute.cluster_resolver.SimpleClusterResolver.

    Example:
      >>> spec = ClusterSpec({"worker": ["host0:12345", "host1:12345"]})
      >>> SimpleClusterResolver(spec, task_type="worker", task_id=0).master("worker", 1, rpc_layer="grpc")
      'grpc://host1:12345'
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._spec, self._master, self._environment = cluster_spec, master, environment
        self._accelerators = dict(num_accelerators or {})
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer

    @override
    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    @override
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        # The constructor has a `master` for this call, so it is not the address of this task, as in other resolvers.
        if task_type is None or task_id is None:
            return self._with_layer(self._master, rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    @override
    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        return dict(self._accelerators)

    @property
    @override
    def environment(self) -> str:
        return self._environment
