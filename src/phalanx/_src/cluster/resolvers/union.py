# SPDX-License-Identifier: Apache-2.0
"""Resolver that joins several clusters into one."""

from typing import final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.spec import ClusterSpec, Task
from phalanx.errors import ClusterError, ClusterTypeError, arguments, shown


@final
class UnionResolver(ClusterResolver):
    """Joins several clusters into one. May be used in any context.

    The tasks of a job are the tasks of the first resolver, followed by those of the next. If a resolver gives indices for a
    job, all tasks of that job keep their indices. Everything else comes from the first resolver.

    Args:
      *resolvers: resolvers of the clusters, at least one.
      task_type: job of this process.
      task_id: index of this process in its job.
      rpc_layer: prefix of the addresses in `master()`.

    Raises:
      ClusterError: no resolver was given.
      ClusterTypeError: an argument is not a resolver.

    Source: tf.distribute.cluster_resolver.UnionResolver.

    Example:
      >>> from phalanx._src.cluster.resolvers.simple import SimpleClusterResolver
      >>> parts = [SimpleClusterResolver(ClusterSpec({"worker": [f"host{i}:12345"]})) for i in range(2)]
      >>> UnionResolver(*parts).cluster_spec()
      ClusterSpec({'worker': ['host0:12345', 'host1:12345']})
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ClusterError("UnionResolver()", "a union needs at least one resolver.", "UnionResolver(a, b)")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise ClusterTypeError(shown(resolver, 80), "is not a ClusterResolver.", "UnionResolver(a, b)")
        self._resolvers = resolvers
        self._task_type, self._task_id = task_type, task_id
        # Read once, unlike everything else, so that a program can set the prefix to None afterwards.
        self._rpc_layer = rpc_layer or resolvers[0].rpc_layer

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all resolvers.

        Raises:
          ClusterError: two resolvers give the same index to different tasks.
        """
        specs = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = {job for spec in specs for job in spec}
        return ClusterSpec({job: _merged(job, [spec[job] for spec in specs if job in spec]) for job in jobs})

    @override
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    @override
    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    @override
    def environment(self) -> str | None:
        return self._resolvers[0].environment

    @override
    def _find_task(self) -> Task | None:
        first = self._resolvers[0]
        kind, index = first.task_type, first.task_id
        return None if kind is None or index is None else Task(kind, index)


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        # A list counts as indices from 0, so it may collide with a dict. Shifting it would rename tasks that know their index.
        tasks = part if isinstance(part, dict) else dict(enumerate(part))
        if twice := sorted(merged.keys() & tasks.keys()):
            problem = f"two resolvers have it: {merged[twice[0]]!r} and {tasks[twice[0]]!r}."
            raise ClusterError(
                f"index {twice[0]} of job {job!r}", problem, f'"{job}": {{{max(merged) + 1}: "host0:12345"}}'
            )
        merged |= tasks
    return merged
