"""Pods by their environment, and by the API."""

import json
import sys
from types import SimpleNamespace

import pytest

from phalanx.cluster_resolver import ClusterSpec, KubernetesClusterResolver, KubernetesExecutableLocation
from phalanx.errors import ClusterSourceError, ClusterTypeError, MissingDependencyError

# Kubernetes sets HOSTNAME and KUBERNETES_SERVICE_HOST in every pod, and JOB_COMPLETION_INDEX in those of an indexed Job, whose
# host names are $(job)-$(index): "Job with Pod-to-Pod Communication" of its documentation.
JOB = {
    "HOSTNAME": "example-job-1",
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "PHALANX_NUM_PODS": "3",
    "PHALANX_SERVICE": "headless-svc",
}
# The pods of a JobSet are $(jobset)-$(job)-$(job index)-$(pod index).$(jobset): jobset-with-network.yaml of its examples, where
# the template takes the names from the annotations jobset.sigs.k8s.io/jobset-name and /replicatedjob-name.
JOBSET = {
    "HOSTNAME": "pytorch-workers-0-3",
    "JOBSET_NAME": "pytorch",
    "JOB_COMPLETION_INDEX": "3",
    "PHALANX_NUM_PODS": "4",
    "REPLICATED_JOB_NAME": "workers",
}
# "StatefulSets" of the documentation: its pods are $(name)-$(ordinal).$(service).
STATEFUL = {"HOSTNAME": "web-1", "PHALANX_NUM_PODS": "2", "PHALANX_SERVICE": "nginx"}


def workers(*hosts):
    return ClusterSpec({"worker": [f"{host}:8470" for host in hosts]})


@pytest.mark.parametrize(
    ("environ", "spec", "index"),
    [
        (JOB, workers(*(f"example-job-{i}.headless-svc" for i in range(3))), 1),
        ({**JOB, "HOSTNAME": "node-7", "JOB_NAME": "job"}, workers(*(f"job-{i}.headless-svc" for i in range(3))), 1),
        (JOBSET, workers(*(f"pytorch-workers-0-{i}.pytorch" for i in range(4))), 3),
        ({**JOBSET, "PHALANX_SERVICE": "net"}, workers(*(f"pytorch-workers-0-{i}.net" for i in range(4))), 3),
        (STATEFUL, workers("web-0.nginx", "web-1.nginx"), 1),
    ],
)
def test_environment_gives_all_names_and_index(environ, spec, index):
    """All names follow from one, and the number says which this is."""
    resolver = KubernetesClusterResolver(environ=environ)
    assert resolver.cluster_spec() == spec
    assert (resolver.task_type, resolver.task_id) == ("worker", index)
    assert resolver.master() == f"grpc://{spec.task_address('worker', index)}"


def test_replicas_of_a_job():
    """A JobSet with two replicas of two pods: the pods of the first replica, then those of the second."""
    environ = {**JOBSET, "JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "1", "REPLICATED_JOB_REPLICAS": "2"}
    resolver = KubernetesClusterResolver(num_pods=2, environ=environ)
    assert resolver.task_id == 3
    assert resolver.cluster_spec() == workers(*(f"pytorch-workers-{j}-{i}.pytorch" for j in (0, 1) for i in (0, 1)))


def test_arguments_replace_variables():
    resolver = KubernetesClusterResolver(None, 5000, service="s", num_pods=2, environ=JOB)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["example-job-0.s:5000", "example-job-1.s:5000"]})


@pytest.mark.parametrize(
    ("environ", "changes", "message"),
    [
        (JOB, {"PHALANX_SERVICE": ""}, "PHALANX_SERVICE: is not set; the pod template must name the headless service"),
        (
            JOB,
            {"PHALANX_NUM_PODS": "x"},
            "PHALANX_NUM_PODS='x': must be a number; the pod template must set it to the number of pods",
        ),
        (
            JOB,
            {"PHALANX_NUM_PODS": "1"},
            "JOB_COMPLETION_INDEX or the end of HOSTNAME is 1: there are 1, numbered from 0",
        ),
        (JOB, {"HOSTNAME": "node-7"}, "JOB_NAME: is not set; it is needed because HOSTNAME is not the name of the pod"),
        (
            JOB,
            {"JOB_COMPLETION_INDEX": ""},
            "JOB_COMPLETION_INDEX: is not set; Kubernetes sets it for the pods of an indexed",
        ),
        (JOBSET, {"REPLICATED_JOB_NAME": ""}, "REPLICATED_JOB_NAME: is not set; the pod template must take it from"),
        (JOBSET, {"PHALANX_NUM_PODS": "3"}, "JOB_COMPLETION_INDEX is 3: there are 3, numbered from 0"),
        (JOBSET, {"REPLICATED_JOB_REPLICAS": "2"}, "JOB_INDEX: is not set"),
        (JOBSET, {"REPLICATED_JOB_REPLICAS": "2", "JOB_INDEX": "2"}, "JOB_INDEX is 2: there are 2, numbered from 0"),
        (
            JOBSET,
            {"PHALANX_NUM_PODS": "60000", "REPLICATED_JOB_REPLICAS": "60000", "JOB_INDEX": "0"},
            r"REPLICATED_JOB_REPLICAS=60000: with PHALANX_NUM_PODS=60000, the job has more than \d+ pods.",
        ),
        (STATEFUL, {"HOSTNAME": "web"}, r"HOSTNAME='web': a pod of a StatefulSet .*\nHINT: completionMode: Indexed"),
        (STATEFUL, {"HOSTNAME": ""}, "HOSTNAME='': a pod of a StatefulSet"),
    ],
)
def test_environment_refusal_names_the_variable(environ, changes, message):
    with pytest.raises(ClusterSourceError, match=message):
        KubernetesClusterResolver(environ={**environ, **changes}).cluster_spec()


class Api:
    """Answers as `kubernetes.client.CoreV1Api` does, with pods that have a selector, a name, a phase and addresses."""

    def __init__(self, *pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        found = [
            SimpleNamespace(
                metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, pod_ip=pod_ip, host_ip=host_ip)
            )
            for selector, name, phase, pod_ip, host_ip in self.pods
            if selector == label_selector
        ]
        return SimpleNamespace(items=found)


def test_api_orders_pods_by_selector_and_name():
    """Selectors in their order, pods by name; two pods of one node differ."""
    api = Api(
        ("job-name=b", "b-0", "Running", "10.1.0.9", "10.0.0.1"),
        ("job-name=a", "a-1", "Running", "10.1.0.2", "10.0.0.1"),
        ("job-name=a", "a-0", "Running", "10.1.0.1", "10.0.0.1"),
        ("role=ps", "p", "Running", None, "10.0.0.5"),
    )
    labels = {"worker": ["job-name=b", "job-name=a"], "ps": ["role=ps"]}
    resolver = KubernetesClusterResolver(labels, override_client=api, environ=JOB)
    spec = ClusterSpec({"worker": ["10.1.0.9:8470", "10.1.0.1:8470", "10.1.0.2:8470"], "ps": ["10.0.0.5:8470"]})
    assert resolver.cluster_spec() == spec
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.master("worker", 1) == "grpc://10.1.0.1:8470"


def test_api_by_default():
    """The pods of the Job named tensorflow, as in tf.distribute."""
    api = Api(
        ("job-name=tensorflow", "t", "Running", None, "10.0.0.1"), ("job-name=x", "x", "Running", None, "10.0.0.2")
    )
    resolver = KubernetesClusterResolver(override_client=api, environ={})
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:8470"]})


def test_a_pod_that_does_not_run():
    api = Api(("job-name=tensorflow", "t-1", "Pending", None, None))
    with pytest.raises(RuntimeError, match='Pod "t-1" of .*: is not running; phase: "Pending"'):
        KubernetesClusterResolver(override_client=api, environ={}).cluster_spec()


@pytest.mark.parametrize("count", [-1, 0])
def test_number_of_pods_is_positive(count):
    with pytest.raises(ClusterTypeError, match=rf"num_pods={count}.*\nHINT: num_pods=2"):
        KubernetesClusterResolver(num_pods=count, environ=JOB)


def test_an_unknown_location():
    with pytest.raises(ClusterTypeError, match="executable_location=1: must be a KubernetesExecutableLocation"):
        KubernetesClusterResolver(executable_location=1)
    assert [(e.name, e.value) for e in KubernetesExecutableLocation] == [("WITHIN_CLUSTER", 0), ("OFF_CLUSTER", 1)]


def test_missing_client_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingDependencyError, match=r"kubernetes is needed for it, .*\nHINT: pip install kubernetes"):
        KubernetesClusterResolver(environ={}).cluster_spec()


def test_the_real_client(serve, tmp_path, monkeypatch):
    """From a machine outside, with the credentials of kubectl."""
    pytest.importorskip("kubernetes")
    from kubernetes.config import kube_config

    pods = [
        {
            "metadata": {"name": f"t-{i}"},
            "spec": {"containers": []},
            "status": {"phase": "Running", "hostIP": "10.0.0.1", "podIP": f"10.1.0.{i}"},
        }
        for i in (1, 0)
    ]
    answers = {
        "/api/v1/pods?labelSelector=job-name%3Dtensorflow": {"kind": "PodList", "apiVersion": "v1", "items": pods}
    }
    address = serve(lambda path, headers: json.dumps(answers[path]) if path in answers else None)
    config = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": f"http://{address}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    resolver = KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER, environ={})
    assert resolver.cluster_spec() == workers("10.1.0.0", "10.1.0.1")


def test_the_real_client_outside_of_a_cluster():
    pytest.importorskip("kubernetes")
    with pytest.raises(
        ClusterSourceError, match=r"num_pods is not given, and the Kubernetes API .*\nHINT: set PHALANX_NUM_PODS=2"
    ):
        KubernetesClusterResolver(environ={}).cluster_spec()
