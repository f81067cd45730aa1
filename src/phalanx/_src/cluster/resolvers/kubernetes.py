# SPDX-License-Identifier: Apache-2.0
"""Resolver for the pods of a Kubernetes Job, JobSet or StatefulSet, or for pods that the API finds by label."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import (
    ClusterResolver,
    check_count,
    check_port,
    number,
    optional_module,
    variable,
)
from phalanx._src.cluster.spec import MOST_TASKS, ClusterSpec, Task
from phalanx.errors import ClusterSourceError, ClusterTypeError, arguments

_LABELS = {"worker": ["job-name=tensorflow"]}  # The default of tf.distribute.
_SERVICE = "the pod template must name the headless service that gives the pods their addresses, like `subdomain`"
_COUNT = "the pod template must set it to the number of pods, like `completions` or `replicas`"


class KubernetesExecutableLocation(enum.Enum):
    """Location of the process that queries the Kubernetes API. May be used in any context.

    Source: tf.distribute.cluster_resolver.KubernetesExecutableLocation.

    Example:
      >>> KubernetesExecutableLocation.OFF_CLUSTER
      <KubernetesExecutableLocation.OFF_CLUSTER: 1>
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class _Pods(NamedTuple):
    """The host names of all pods, and the index of this pod."""

    hosts: list[str]
    pod_index: int


@final
class KubernetesClusterResolver(ClusterResolver):
    """Resolves the pods of a Kubernetes workload, one worker per pod. May be used in any context.

    If the number of pods is known, from `num_pods` or PHALANX_NUM_PODS, the environment of the pod is enough:

    - JobSet: JOBSET_NAME, REPLICATED_JOB_NAME, JOB_COMPLETION_INDEX, and with several replicas of the job also
      JOB_INDEX and REPLICATED_JOB_REPLICAS. The number of pods is counted per replica.
    - Indexed Job: JOB_COMPLETION_INDEX, and HOSTNAME or JOB_NAME.
    - StatefulSet: HOSTNAME.

    Otherwise the Kubernetes API is queried. In that case set `task_type` and `task_id`.

    Args:
      job_to_label_mapping: dict from job to the label selectors of its pods. If given, the API is queried.
      tf_server_port: port on which every pod listens.
      rpc_layer: prefix of the addresses in `master()`.
      override_client: a `kubernetes.client.CoreV1Api`. If given, the API is queried.
      executable_location: whether this process runs in the cluster, which determines where its credentials are.
      service: headless service of the pods; by default PHALANX_SERVICE, or the name of the JobSet.
      num_pods: number of pods.
      environ: environment variables to read; by default those of this process.

    Raises:
      ClusterTypeError: `executable_location` is not a KubernetesExecutableLocation.

    Source: tf.distribute.cluster_resolver.KubernetesClusterResolver.

    Example:
      >>> environ = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
      >>> resolver = KubernetesClusterResolver(service="trainers", num_pods=2, environ=environ)
      >>> resolver.task_id, resolver.cluster_spec()
      (1, ClusterSpec({'worker': ['train-0.trainers:8470', 'train-1.trainers:8470']}))
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str = "grpc",
        override_client: object = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        service: str | None = None,
        num_pods: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._labels, self._client, self._location = job_to_label_mapping, override_client, executable_location
        self._port, self._service = check_port(tf_server_port, "tf_server_port"), service
        self._num_pods = check_count(num_pods, "num_pods")
        self._rpc_layer, self._given_environ = rpc_layer, environ

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all pods.

        Raises:
          ClusterSourceError: a variable is missing or wrong, or a pod is not running.
          MissingDependencyError: the API must be queried, and its client is not installed.
        """
        if self._asks_api():
            return self._spec_of_api()
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in self._pods().hosts]})

    @override
    def _find_task(self) -> Task | None:
        return None if self._asks_api() else Task("worker", self._pods().pod_index)

    def _asks_api(self) -> bool:
        has_count = self._num_pods is not None or "PHALANX_NUM_PODS" in self._environ
        return self._labels is not None or self._client is not None or not has_count

    def _pods(self) -> _Pods:
        count = self._num_pods
        if count is None:
            count = number(self._environ, "PHALANX_NUM_PODS", _COUNT, "PHALANX_NUM_PODS=2")
        # First: the pods of a JobSet also have the HOSTNAME and the index of an indexed Job.
        if "JOBSET_NAME" in self._environ:
            return self._pods_of_jobset(count)
        name, index = self._name_and_index()
        _check_index("JOB_COMPLETION_INDEX or the end of HOSTNAME", index, count)
        service = self._service or variable(self._environ, "PHALANX_SERVICE", _SERVICE, "PHALANX_SERVICE=trainers")
        # Indexed Jobs and StatefulSets name pods alike. See "Job with Pod-to-Pod Communication" in the documentation of Kubernetes.
        return _Pods([f"{name}-{i}.{service}" for i in range(count)], index)

    def _pods_of_jobset(self, count: int) -> _Pods:
        meaning = "the pod template must take it from the annotations of the JobSet"
        name = variable(self._environ, "JOBSET_NAME", meaning, "JOBSET_NAME=train")
        job = variable(self._environ, "REPLICATED_JOB_NAME", meaning, "REPLICATED_JOB_NAME=workers")
        replicas = number(self._environ, "REPLICATED_JOB_REPLICAS", meaning, "REPLICATED_JOB_REPLICAS=1", default=1)
        # Templates with one replica, such as those of `phalanx run --print`, need not pass its index on.
        replica = number(self._environ, "JOB_INDEX", meaning, "JOB_INDEX=0", default=0 if replicas == 1 else None)
        index = self._completion_index()
        _check_index("JOB_COMPLETION_INDEX", index, count)
        _check_index("JOB_INDEX", replica, replicas)
        # Each of the two numbers is at most MOST_TASKS (see `number`), but their product need not be.
        if replicas * count > MOST_TASKS:
            problem = f"with PHALANX_NUM_PODS={count}, the job has more than {MOST_TASKS} pods."
            raise ClusterSourceError(f"REPLICATED_JOB_REPLICAS={replicas}", problem, "REPLICATED_JOB_REPLICAS=1")
        # By default, JobSet makes a headless service with its own name.
        service = self._service or self._environ.get("PHALANX_SERVICE") or name
        # The names that JobSet gives to pods: jobset-with-network.yaml of its examples.
        hosts = [f"{name}-{job}-{r}-{i}.{service}" for r in range(replicas) for i in range(count)]
        return _Pods(hosts, replica * count + index)

    def _name_and_index(self) -> tuple[str, int]:
        """Returns the common prefix of the pod names, and the index at the end of this pod's name."""
        name, _, end = self._environ.get("HOSTNAME", "").rpartition("-")
        if "JOB_COMPLETION_INDEX" not in self._environ:
            if not name or not arguments.is_number(end):
                raise ClusterSourceError(
                    f"HOSTNAME={self._environ.get('HOSTNAME', '')!r}",
                    "a pod of a StatefulSet has a name that ends in its number, and a pod of an indexed Job has "
                    "JOB_COMPLETION_INDEX, but this process has neither.",
                    "completionMode: Indexed",
                )
            return name, int(end)
        index = self._completion_index()
        # A pod that uses the network of its node has the host name of the node.
        if name and end == str(index):
            return name, index
        return variable(
            self._environ, "JOB_NAME", "it is needed because HOSTNAME is not the name of the pod", "JOB_NAME=train"
        ), index

    def _completion_index(self) -> int:
        meaning = "Kubernetes sets it for the pods of an indexed Job"
        return number(self._environ, "JOB_COMPLETION_INDEX", meaning, "completionMode: Indexed")

    def _spec_of_api(self) -> ClusterSpec:
        client = self._client or self._default_client()
        labels = _LABELS if self._labels is None else self._labels
        return ClusterSpec({job: list(self._addresses(client, selectors)) for job, selectors in labels.items()})

    def _addresses(self, client: Any, selectors: Sequence[str]) -> Iterator[str]:
        for selector in selectors:
            pods = client.list_pod_for_all_namespaces(label_selector=selector).items
            for pod in sorted(pods, key=lambda pod: pod.metadata.name):
                # A pending pod may have no address yet, and a list without it would renumber the others.
                if pod.status.phase != "Running":
                    subject = f'Pod "{pod.metadata.name}" of {selector!r}'
                    raise ClusterSourceError(
                        subject, f'is not running; phase: "{pod.status.phase}".', "kubectl get pods"
                    )
                # On the host network both addresses are equal. Otherwise only `pod_ip` tells two pods of one node apart.
                yield f"{pod.status.pod_ip or pod.status.host_ip}:{self._port}"

    def _default_client(self) -> Any:
        module = optional_module("kubernetes", "KubernetesClusterResolver()", "kubernetes")
        is_within = self._location is KubernetesExecutableLocation.WITHIN_CLUSTER
        try:
            (module.config.load_incluster_config if is_within else module.config.load_kube_config)()
        except module.config.ConfigException as e:
            raise ClusterSourceError(
                f"KubernetesClusterResolver(executable_location={self._location.name})",
                f"num_pods is not given, and the Kubernetes API cannot be queried: {e}",
                "set PHALANX_NUM_PODS=2 in the pod template, or use KubernetesExecutableLocation.OFF_CLUSTER",
            ) from e
        return module.client.CoreV1Api()


def _check_index(source: str, index: int, count: int) -> None:
    if index >= count:
        raise ClusterSourceError(f"{source} is {index}", f"there are {count}, numbered from 0.", "PHALANX_NUM_PODS=2")
