"""Hosts of TPUs: on GKE, by the metadata server, by the API, by address."""

import sys

import pytest

from phalanx.cluster_resolver import ClusterSpec, TPUClusterResolver
from phalanx.errors import ClusterSourceError, ClusterTypeError, MissingDependencyError

# What GKE sets in the pods of a slice of four v5e hosts; names as in "About TPUs in GKE" and libtpu.
GKE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "2,2,1",
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_TOPOLOGY": "4x4",
    "TPU_WORKER_HOSTNAMES": ",".join(f"slice-job-{i}.headless-svc" for i in range(4)),
    "TPU_WORKER_ID": "2",
}
HOSTS = [f"slice-job-{i}.headless-svc:8482" for i in range(4)]


def test_gke_orders_hosts_by_number():
    resolver = TPUClusterResolver(environ=GKE)
    assert resolver.cluster_spec() == ClusterSpec({"worker": HOSTS})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 2, HOSTS[2])
    assert resolver.num_accelerators() == {"TPU": 4}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v3-8"}, {"TPU": 8}),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}, {"TPU": 1}),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": ""}, {}),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "9" * 5000}, {}),
    ],
)
def test_devices_of_a_host(changes, count):
    """A chip is a device, and two in the generations 2 and 3."""
    assert TPUClusterResolver(environ={**GKE, **changes}).num_accelerators() == count


def test_processes_of_one_host():
    """They listen at ports of their own, and have numbers of their own."""
    addresses = ",".join(f"localhost:{8476 + i}" for i in range(3))
    environ = {"TPU_PROCESS_ADDRESSES": addresses, "CLOUD_TPU_TASK_ID": "1", "TPU_WORKER_ID": "0"}
    resolver = TPUClusterResolver(port=5000, environ=environ)
    assert resolver.cluster_spec() == ClusterSpec({"worker": [f"localhost:{5000 + i}" for i in range(3)]})
    assert resolver.task_id == 1


def test_a_coordinator_and_another_job():
    resolver = TPUClusterResolver(
        job_name="tpu_worker", coordinator_name="coordinator", coordinator_address="c:1", environ=GKE
    )
    assert resolver.cluster_spec() == ClusterSpec({"tpu_worker": HOSTS, "coordinator": ["c:1"]})
    assert (resolver.task_type, resolver.get_job_name()) == ("tpu_worker", "tpu_worker")


@pytest.mark.parametrize(("tpu", "environ"), [("local", GKE), (None, {"TPU_NAME": "local"})])
def test_local_has_no_cluster(tpu, environ):
    resolver = TPUClusterResolver(tpu, environ=environ)
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


@pytest.mark.parametrize(
    ("tpu", "environ"),
    [
        ("grpc://10.0.0.2:8470,grpc://10.0.0.3:8470", {}),
        (None, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470"}),
    ],
)
def test_addresses_become_the_cluster(tpu, environ):
    resolver = TPUClusterResolver(tpu, environ=environ)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]})
    assert resolver.task_id == 0


# Both formats of the attribute stand in the cluster detection of JAX.
@pytest.mark.parametrize("endpoints", ["10.0.0.2,10.0.0.3", "unknown:0:10.0.0.2,unknown:1:10.0.0.3"])
def test_metadata_server_gives_the_cluster(metadata, endpoints, monkeypatch):
    """A TPU machine asks its metadata server, and no proxy."""
    address, answers = metadata
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answers |= {"attributes/worker-network-endpoints": endpoints, "attributes/agent-worker-number": "1"}
    resolver = TPUClusterResolver("my-tpu", environ={"GCE_METADATA_IP": address})
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.2:8482", "10.0.0.3:8482"]})
    assert resolver.task_id == 1


def test_metadata_without_the_attribute(metadata):
    message = r"does not answer: HTTP Error 404.*\n?.*HINT: TPUClusterResolver\(\"local\"\)"
    with pytest.raises(ClusterSourceError, match=message):
        TPUClusterResolver(environ={"GCE_METADATA_IP": metadata[0]}).cluster_spec()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"TPU_SKIP_MDS_QUERY": "1"},
            r"tpu=None\): TPU_WORKER_HOSTNAMES is not set, and TPU_SKIP_MDS_QUERY forbids asking the metadata server\.",
        ),
        (
            {"GCE_METADATA_IP": "127.0.0.1:1"},
            "TPU_WORKER_HOSTNAMES is not set, and http://127.0.0.1:1/.* does not answer",
        ),
        ({**GKE, "TPU_WORKER_ID": "4"}, "TPU_WORKER_ID=4: the slice has 4 hosts"),
        ({**GKE, "TPU_WORKER_ID": ""}, "TPU_WORKER_ID: is not set; GKE sets it for each host of a slice"),
        ({**GKE, "MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_NUM_SLICES=2: a host only knows the hosts of its own slice"),
    ],
)
def test_refusal_says_what_is_missing(environ, message):
    with pytest.raises(ClusterSourceError, match=message):
        TPUClusterResolver(environ=environ).master()


class CloudTpu:
    """Answers as the Cloud TPU API v1 does for one node."""

    def __init__(self, **node):
        self.node = node

    def projects(self):
        return self

    locations = nodes = projects

    def get(self, name):
        assert name == "projects/p/locations/z/nodes/my-tpu"
        return self

    def execute(self):
        return self.node


def test_api_gives_hosts_and_default_port():
    """The hosts that it knows, and port 8482 where it knows none."""
    ends = [{"ipAddress": "10.0.0.2", "port": 8470}, {"ipAddress": "10.0.0.3"}]
    service = CloudTpu(state="READY", health="HEALTHY", networkEndpoints=ends)
    resolver = TPUClusterResolver("my-tpu", "z", "p", service=service, environ={})
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.2:8470", "10.0.0.3:8482"]})
    assert resolver.task_id == 0


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"state": "CREATING"}, "its state is CREATING and its health is HEALTHY"),
        ({"state": "READY", "health": "TIMEOUT"}, "its state is READY and its health is TIMEOUT"),
    ],
)
def test_api_of_a_sick_tpu(node, message):
    with pytest.raises(RuntimeError, match=f"TPU projects/p/locations/z/nodes/my-tpu: {message}"):
        TPUClusterResolver("my-tpu", "z", "p", service=CloudTpu(**node), environ={}).cluster_spec()


def test_connect_makes_a_resolver():
    """As in TensorFlow, by the name of the TPU."""
    assert not TPUClusterResolver.connect("local").cluster_spec()


def test_api_without_its_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(MissingDependencyError, match="HINT: pip install google-api-python-client"):
        TPUClusterResolver("my-tpu", "z", "p", environ={}).cluster_spec()


def test_system_metadata_comes_from_environment_or_topology():
    environ = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
    resolver = TPUClusterResolver(environ=environ)
    found = resolver.get_tpu_system_metadata()
    assert (found.num_cores, found.num_hosts, found.num_of_cores_per_host, found.topology) == (8, 2, 4, None)
    assert found.devices[4] == "/job:worker/task:1/device:TPU:0"
    resolver.set_tpu_topology(b'{"mesh_shape": [1, 2], "device_coordinates": [[[0, 0], [0, 1]]]}')
    assert resolver.get_tpu_system_metadata()[:3] == (2, 1, 2)
    assert (resolver.get_master(), resolver.get_coordination_service_leader()) == (
        resolver.master(),
        "/job:worker/task:0",
    )


def test_system_metadata_of_an_unknown_system():
    resolver = TPUClusterResolver("local", environ={})
    with pytest.raises(ClusterSourceError, match="TPU_CHIPS_PER_HOST_BOUNDS are not set, and no topology was recorded"):
        resolver.get_tpu_system_metadata()
    for text in (b"x", b'{"device_coordinates": []}'):
        with pytest.raises(ClusterTypeError, match="serialized_tpu_topology=b'.*': must be a serialized Topology"):
            resolver.set_tpu_topology(text)
