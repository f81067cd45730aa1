"""The machines of an instance group."""

import sys

import pytest

from phalanx._src.cluster.resolvers.base import google_service
from phalanx._src.cluster.resolvers.gce import later_notice, termination_notice
from phalanx._src.launch.plan import free_ports
from phalanx.cluster_resolver import ClusterSpec, GCEClusterResolver
from phalanx.errors import ClusterSourceError, MissingDependencyError


class ComputeEngine:
    """Answers as the Compute Engine API v1 does, in pages of one machine, with what its reference shows."""

    def __init__(self, addresses):
        self.pages = [[{"instance": f"https://www.googleapis.com/compute/v1/p/z/instances/{n}"}] for n in addresses]
        self.addresses, self.answer = addresses, {}

    def instanceGroups(self):
        return self

    instances = instanceGroups

    def listInstances(self, *, project, zone, instanceGroup, body):
        assert (project, zone, instanceGroup, body) == ("p", "z", "g", {"instanceState": "RUNNING"})
        return self._request({"items": self.pages[0]} if self.pages else {})

    def listInstances_next(self, previous_request, previous_response):
        page = self.pages.index(previous_response["items"]) + 1 if self.pages else 0
        return self._request({"items": self.pages[page]}) if page < len(self.pages) else None

    def get(self, *, project, zone, instance):
        return self._request({"networkInterfaces": [{"networkIP": self.addresses[instance]}]})

    def _request(self, answer):
        request = ComputeEngine({})
        request.answer = answer
        return request

    def execute(self):
        return self.answer


def test_gce_sorts_machines_of_all_pages():
    service = ComputeEngine({"m1": "10.0.0.3", "m2": "10.0.0.1", "m3": "10.0.0.2"})
    resolver = GCEClusterResolver("p", "z", "g", 8470, task_type="ps", service=service)
    assert resolver.cluster_spec() == ClusterSpec({"ps": [f"10.0.0.{i}:8470" for i in (1, 2, 3)]})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "grpc://10.0.0.1:8470")
    resolver.task_id = 2
    assert resolver.master() == "grpc://10.0.0.3:8470"


def test_gce_refuses_empty_group_and_other_job():
    resolver = GCEClusterResolver("p", "z", "g", 8470, service=ComputeEngine({}))
    with pytest.raises(ClusterSourceError, match="instance_group='g' in z of p: no machine of this group is running"):
        resolver.cluster_spec()
    with pytest.raises(
        RuntimeError, match=r"task_type='ps': all machines of the group have the job 'worker'\.\nHINT: GCE"
    ):
        resolver.task_type = "ps"


def test_gce_without_its_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(MissingDependencyError, match="HINT: pip install google-api-python-client"):
        GCEClusterResolver("p", "z", "g", 8470).cluster_spec()


def test_the_real_client_of_google():
    """It is built without the network."""
    credentials = pytest.importorskip("google.auth.credentials")
    pytest.importorskip("googleapiclient")
    service = google_service("compute", "v1", credentials.AnonymousCredentials())
    assert callable(service.instanceGroups().listInstances_next)


@pytest.mark.parametrize(
    ("name", "answer", "notice"),
    [
        ("maintenance-event", "NONE", None),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "was notified by GCE that its host will be shut down"),
        ("preempted", "TRUE\n", "was notified by GCE that its machine is preempted"),
    ],
)
def test_notices_of_the_metadata_server(metadata, monkeypatch, name, answer, notice):
    """What the server says of a machine that stays, moves or ends. A proxy is not asked."""
    address, answers = metadata
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answers |= {"maintenance-event": "NONE", "preempted": "FALSE", name: answer}
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    assert termination_notice() == later_notice() == notice


def test_server_that_does_not_answer(monkeypatch):
    """The first question says so; later ones have no news."""
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(
        ClusterSourceError, match=r"the metadata server of GCE does not answer[^§]*HINT: run on a machine"
    ):
        termination_notice()
    assert later_notice() is None
