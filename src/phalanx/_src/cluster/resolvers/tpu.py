# SPDX-License-Identifier: Apache-2.0
"""Resolver for the hosts of a TPU slice. Reads the environment on GKE, and metadata on Google Compute Engine."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver, check_port, google_service, metadata, number
from phalanx._src.cluster.spec import MOST_TASKS, ClusterSpec, Task
from phalanx.errors import ClusterSourceError, ClusterTypeError, arguments, shown

_MEANING = "GKE sets it for each host of a slice"


class TPUSystemMetadata(NamedTuple):
    """The size of a TPU system, as `TPUClusterResolver.get_tpu_system_metadata` returns it.

    Args:
      num_cores: number of cores of all hosts.
      num_hosts: number of hosts.
      num_of_cores_per_host: number of cores per host.
      topology: always None. `phalanx.tpu.experimental.initialize_tpu_system` returns the topology.
      devices: names of the cores in tf.distribute.

    Source: tf.tpu.experimental.TPUSystemMetadata.

    Example:
      >>> environ = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
      >>> TPUClusterResolver(environ=environ).get_tpu_system_metadata()[:3]
      (8, 2, 4)
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: tuple[str, ...]


@final
class TPUClusterResolver(ClusterResolver):
    """Resolves the hosts of a TPU slice, one worker per host. May be used in any context.

    The first source that is available is used: the addresses in `tpu`; the Cloud TPU API (if `service`, or `zone` and
    `project` are given); TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES with TPU_WORKER_ID, which GKE sets; the metadata
    server of a TPU machine.

    Args:
      tpu: "local" for the TPUs of this machine only, addresses such as `grpc://10.0.0.2:8470` separated by commas, or a
        name; by default TPU_NAME.
      zone: zone of the TPU.
      project: project of the TPU.
      job_name: job of all hosts.
      coordinator_name: an additional job, with one task that has no TPU.
      coordinator_address: address of that task.
      credentials: credentials of google-auth; by default those of the machine.
      service: client of the Cloud TPU API; by default that of google-api-python-client.
      discovery_url: URL of the description of that API.
      port: port on which every host listens, for hosts that are known by name.
      environ: environment variables to read; by default those of this process.

    Source: tf.distribute.cluster_resolver.TPUClusterResolver.

    Example:
      >>> environ = {"TPU_WORKER_HOSTNAMES": "tpu-0.slice,tpu-1.slice", "TPU_WORKER_ID": "1"}
      >>> resolver = TPUClusterResolver(environ=environ)
      >>> resolver.task_id, resolver.cluster_spec()
      (1, ClusterSpec({'worker': ['tpu-0.slice:8482', 'tpu-1.slice:8482']}))
    """

    @arguments.typed(ClusterTypeError)
    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        port: int = 8482,  # The coordinator port of JAX on TPUs.
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._tpu, self._zone, self._project, self._port = tpu, zone, project, check_port(port)
        self._job, self._coordinator = job_name, (coordinator_name, coordinator_address)
        self._credentials, self._service, self._discovery_url = credentials, service, discovery_url
        self._given_environ = environ
        self._cores_of_hosts: list[int] | None = None

    @staticmethod
    def connect(tpu: str | None = None, zone: str | None = None, project: str | None = None) -> "TPUClusterResolver":
        """Returns a resolver for a TPU. May be called in any context.

        In TensorFlow this also connects to the TPU and initializes it. Here `initialize_tpu_system` and `TPUStrategy` do so.

        Args:
          tpu: as in the constructor.
          zone: as in the constructor.
          project: as in the constructor.
        """
        return TPUClusterResolver(tpu, zone, project)

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all hosts, or an empty spec for "local".

        Raises:
          ClusterSourceError: the hosts are unknown, the TPU is not ready, or there are several slices.
          MissingDependencyError: the API must be queried, and google-api-python-client is not installed.
        """
        if self._name() == "local":
            return ClusterSpec({})
        cluster = {self._job: self._addresses()}
        name, address = self._coordinator
        return ClusterSpec({**cluster, name: [address]} if name and address else cluster)

    @override
    @arguments.typed(ClusterTypeError)
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> dict[str, int]:
        # A process may have only some of the chips of its host, so its own bounds come first.
        names = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
        bounds = next((self._environ[n] for n in names if self._environ.get(n)), "")
        sides = bounds.split(",")
        if not all(map(arguments.is_number, sides)) or math.prod(map(int, sides)) > MOST_TASKS:
            return {}
        # In these two generations, every chip is two devices.
        cores = 2 if self._environ.get("TPU_ACCELERATOR_TYPE", "")[:3] in ("v2-", "v3-") else 1
        return {"TPU": cores * math.prod(map(int, sides))}

    def get_job_name(self) -> str:
        """Returns the job of all hosts."""
        return self._job

    def get_master(self) -> str:
        """Returns `master()`, for code written for TensorFlow."""
        return self.master()

    def get_coordination_service_leader(self) -> str:
        """Returns the name of the task that the others connect to, in the notation of tf.distribute."""
        return f"/job:{self._job}/task:0"

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Records the topology, for `get_tpu_system_metadata`.

        Args:
          serialized_tpu_topology: the result of `Topology.serialized()`.

        Raises:
          ClusterTypeError: the argument is not a serialized topology.
        """
        try:
            if not (counts := [len(task) for task in json.loads(serialized_tpu_topology)["device_coordinates"]]):
                raise ValueError("a topology has at least one host")
        except (TypeError, ValueError, KeyError, RecursionError) as e:
            raise ClusterTypeError(
                f"serialized_tpu_topology={shown(serialized_tpu_topology)}",
                "must be a serialized Topology.",
                "resolver.set_tpu_topology(topology.serialized())",
            ) from e
        self._cores_of_hosts = counts

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the number of cores and hosts, from the recorded topology or else from the cluster.

        Raises:
          ClusterSourceError: the number of cores is unknown.
        """
        counts = self._cores_of_hosts
        if counts is None:
            per_host = self.num_accelerators().get("TPU", 0)
            # "local" has an empty cluster, and is one host.
            counts = [per_host] * max(len(self.cluster_spec().as_dict().get(self._job, [])), 1)
        if not all(counts):
            raise ClusterSourceError(
                "TPUClusterResolver.get_tpu_system_metadata",
                "TPU_CHIPS_PER_PROCESS_BOUNDS and TPU_CHIPS_PER_HOST_BOUNDS are not set, and no topology was recorded.",
                "resolver.set_tpu_topology(phalanx.tpu.experimental.initialize_tpu_system(resolver).serialized())",
            )
        devices = tuple(f"/job:{self._job}/task:{t}/device:TPU:{i}" for t, n in enumerate(counts) for i in range(n))
        return TPUSystemMetadata(len(devices), len(counts), counts[0], None, devices)

    @override
    def _find_task(self) -> Task:
        return Task(self._job, self._index())

    def _index(self) -> int:
        if self._given_addresses() or self._asks_api() or self._name() == "local":
            return 0
        if not self._hosts_of_environ():
            return int(self._metadata("agent-worker-number"))
        # If a host runs several processes, each has its own number.
        name = "CLOUD_TPU_TASK_ID" if "CLOUD_TPU_TASK_ID" in self._environ else "TPU_WORKER_ID"
        count = len(self._hosts_of_environ())
        index = number(self._environ, name, _MEANING, f"{name}=0")
        if index >= count:
            raise ClusterSourceError(f"{name}={index}", f"the slice has {count} hosts.", f"{name}=0")
        return index

    def _addresses(self) -> list[str]:
        if addresses := self._given_addresses():
            return addresses
        if self._asks_api():
            return self._addresses_of_api()
        if number(self._environ, "MEGASCALE_NUM_SLICES", _MEANING, "MEGASCALE_NUM_SLICES=1", default=1) > 1:
            raise ClusterSourceError(
                f"MEGASCALE_NUM_SLICES={self._environ['MEGASCALE_NUM_SLICES']}",
                "a host only knows the hosts of its own slice.",
                "use KubernetesClusterResolver(num_pods=...) in a JobSet with one replica of the job per slice",
            )
        return self._with_ports(self._hosts_of_environ() or self._hosts_of_metadata())

    def _name(self) -> str:
        return self._tpu or self._environ.get("TPU_NAME", "")

    def _given_addresses(self) -> list[str]:
        text = self._tpu or self._environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "")
        return [a.strip().removeprefix("grpc://") for a in text.split(",")] if text.startswith("grpc://") else []

    def _asks_api(self) -> bool:
        return self._service is not None or bool(self._zone and self._project)

    def _hosts_of_environ(self) -> list[str]:
        names = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
        text = next((self._environ[n] for n in names if self._environ.get(n)), "")
        # TPU_PROCESS_ADDRESSES has ports, which are those of the TPU runtime. The processes of a cluster have others.
        return [host.strip().partition(":")[0] for host in text.split(",") if host.strip()]

    def _hosts_of_metadata(self) -> list[str]:
        # Older machines report `name:number:address`, newer ones only the address.
        return [item.strip().rpartition(":")[2] for item in self._metadata("worker-network-endpoints").split(",")]

    def _with_ports(self, hosts: list[str]) -> list[str]:
        # Several processes may run on one host. Its n-th process listens at the n-th port.
        return [f"{host}:{self._port + hosts[:i].count(host)}" for i, host in enumerate(hosts)]

    def _metadata(self, key: str) -> str:
        host = self._environ.get("GCE_METADATA_IP", "metadata.google.internal")  # JAX reads this variable too.
        subject = f"TPUClusterResolver(tpu={self._tpu!r})"
        hint = 'TPUClusterResolver("local") for the TPUs of this machine only'
        if self._environ.get("TPU_SKIP_MDS_QUERY"):
            raise ClusterSourceError(
                subject,
                "TPU_WORKER_HOSTNAMES is not set, and TPU_SKIP_MDS_QUERY forbids asking the metadata server.",
                hint,
            )
        url = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
        try:
            return metadata(url)
        except (OSError, ValueError) as e:
            problem = f"TPU_WORKER_HOSTNAMES is not set, and {url} does not answer: {e}."
            raise ClusterSourceError(subject, problem, hint) from e

    def _addresses_of_api(self) -> list[str]:
        service = self._service or google_service("tpu", "v1", self._credentials, self._discovery_url)
        name = f"projects/{self._project}/locations/{self._zone}/nodes/{self._name()}"
        node = service.projects().locations().nodes().get(name=name).execute()
        state, health = node.get("state"), node.get("health", "HEALTHY")
        if (state, health) != ("READY", "HEALTHY"):
            problem = f"its state is {state} and its health is {health}."
            raise ClusterSourceError(f"TPU {name}", problem, "gcloud compute tpus tpu-vm describe ...")
        return [f"{end['ipAddress']}:{end.get('port', self._port)}" for end in node["networkEndpoints"]]
