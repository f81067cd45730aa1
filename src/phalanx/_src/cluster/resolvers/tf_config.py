# SPDX-License-Identifier: Apache-2.0
"""Resolver for the cluster that the environment variable TF_CONFIG describes."""

from collections.abc import Mapping
from typing import final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.spec import ClusterSpec, Task, TFConfig, parse_tf_config
from phalanx.errors import ClusterTypeError, arguments


@final
class TFConfigClusterResolver(ClusterResolver):
    """Resolves the cluster that the environment variable TF_CONFIG describes. May be used in any context.

    Every call reads the variable again. If it is not set, there is no cluster and no task.

    Args:
      task_type: overrides the type of the task.
      task_id: overrides the index of the task.
      rpc_layer: overrides the prefix of the addresses in `master()`.
      environment: name of the environment in which the cluster runs.
      environ: environment variables to read; by default those of this process.

    Source: tf.distribute.cluster_resolver.TFConfigClusterResolver.

    Example:
      >>> environ = {"TF_CONFIG": '{"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 1}}'}
      >>> resolver = TFConfigClusterResolver(environ=environ)
      >>> resolver.task_type, resolver.task_id, resolver.master()
      ('worker', 1, 'b:12345')
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment, self._given_environ = environment, environ

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks.

        Raises:
          ClusterError: TF_CONFIG is wrong. The message says where.
        """
        return self._config().spec

    @override
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the `session_master` of TF_CONFIG, or the address of a task; empty if the cluster has at most one task."""
        config = self._config()
        # As it is, without the prefix of `rpc_layer`, as in tf.distribute.
        if config.session_master is not None:
            return config.session_master
        # Missing indices count: those tasks exist, but this one need not know their addresses.
        if sum(len(config.spec.job_tasks(job)) for job in config.spec.jobs) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    @property
    @override
    def environment(self) -> str | None:
        return self._environment

    @property
    @override
    def rpc_layer(self) -> str | None:
        return self._rpc_layer or self._config().rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @override
    def _find_task(self) -> Task | None:
        return self._config().task

    def _config(self) -> TFConfig:
        text = self._environ.get("TF_CONFIG", "{}")
        # Arguments go in before the text is checked, because the task in it may be incomplete without them.
        return parse_tf_config(text, task_type=self._task_type, task_id=self._task_id)
