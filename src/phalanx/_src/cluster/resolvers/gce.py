# SPDX-License-Identifier: Apache-2.0
"""Resolver for the running machines of an instance group on Google Compute Engine."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver, check_port, google_service, metadata
from phalanx._src.cluster.spec import ClusterSpec
from phalanx.errors import ClusterSourceError, ClusterTypeError, arguments, shown

# MIGRATE_ON_HOST_MAINTENANCE is not one of them: GCE moves the machine, and the process continues.
_NOTICES = {
    ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"): "was notified by GCE that its host will be shut down",
    ("preempted", "TRUE"): "was notified by GCE that its machine is preempted",
}


def termination_notice() -> str | None:
    """Asks the metadata server of this machine whether GCE will end the machine.

    Returns:
      The answer as the end of a sentence about this process. None if the machine stays.

    Raises:
      ClusterSourceError: the server does not answer.

    Source: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    """
    # Google's own libraries read this variable too.
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    for (name, answer), notice in _NOTICES.items():
        url = f"http://{host}/computeMetadata/v1/instance/{name}"
        try:
            if metadata(url) == answer:
                return notice
        except (OSError, ValueError) as e:
            raise ClusterSourceError(
                f"GET {url}",
                f"the metadata server of GCE does not answer: {e}",
                "run on a machine of GCE, or pass another termination_watcher_fn",
            ) from e
    return None


def later_notice() -> str | None:
    """Asks again, like `termination_notice`. A server that does not answer for a while has no news."""
    with suppress(ClusterSourceError):
        return termination_notice()
    return None


@final
class GCEClusterResolver(ClusterResolver):
    """Resolves the running machines of an instance group on Google Compute Engine. May be used in any context.

    Args:
      project: project of the group.
      zone: zone of the group.
      instance_group: name of the group.
      port: port on which every machine listens.
      task_type: job of all machines.
      task_id: index of this machine.
      rpc_layer: prefix of the addresses in `master()`.
      credentials: credentials of google-auth; by default those of the machine.
      service: client of the Compute Engine API; by default that of google-api-python-client.

    Source: tf.distribute.cluster_resolver.GCEClusterResolver.

    Example:
      >>> resolver = GCEClusterResolver("my-project", "us-west1-a", "my-group", 8470)
      >>> resolver.task_type, resolver.task_id
      ('worker', 0)
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str = "grpc",
        credentials: object = "default",
        service: Any = None,
    ) -> None:
        self._project, self._zone, self._group, self._port = project, zone, instance_group, check_port(port)
        self._job, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._credentials, self._service = credentials, service

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the running machines, sorted.

        Raises:
          ClusterSourceError: no machine is running.
          MissingDependencyError: no service was given, and google-api-python-client is not installed.
        """
        # Sorted, as in tf.distribute: all machines must number the tasks in the same order.
        addresses = sorted(f"{address}:{self._port}" for address in self._internal_addresses())
        if not addresses:
            subject = f"instance_group={self._group!r} in {self._zone} of {self._project}"
            raise ClusterSourceError(
                subject, "no machine of this group is running.", "gcloud compute instance-groups list-instances ..."
            )
        return ClusterSpec({self._job: addresses})

    @property
    @override
    def task_type(self) -> str:
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ClusterSourceError(
            f"task_type={shown(task_type)}",
            f"all machines of the group have the job {self._job!r}.",
            f"GCEClusterResolver(..., task_type={shown(task_type)})",
        )

    def _internal_addresses(self) -> Iterator[str]:
        service = self._service or google_service("compute", "v1", self._credentials)
        place = {"project": self._project, "zone": self._zone}
        groups = service.instanceGroups()
        request = groups.listInstances(**place, instanceGroup=self._group, body={"instanceState": "RUNNING"})
        while request is not None:
            page = request.execute()
            for item in page.get("items", []):
                # One request per machine: the list has the URLs of the machines, but not their addresses.
                name = item["instance"].rsplit("/", 1)[-1]
                machine = service.instances().get(**place, instance=name).execute()
                yield machine["networkInterfaces"][0]["networkIP"]
            request = groups.listInstances_next(previous_request=request, previous_response=page)
