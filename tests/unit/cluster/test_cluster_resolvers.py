"""What all resolvers share, and those that read no list of a scheduler."""

import importlib.util
import json
import subprocess
import sys

import pytest

from phalanx import cluster_resolver
from phalanx.cluster.resolvers.base import google_service
from phalanx.cluster.resolvers.environment import resolver_of_environment
from phalanx.cluster.spec import Task, tf_config
from phalanx.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)
from phalanx.errors import ClusterError, ClusterSourceError, ClusterTypeError, MissingDependencyError

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


class OwnResolver(ClusterResolver):
    """A user's resolver, without a constructor."""

    def cluster_spec(self):
        """Returns the cluster."""
        return SPEC


def test_a_resolver_of_ones_own():
    """It needs its cluster alone, and is told the rest."""
    own = OwnResolver()
    assert (own.task_type, own.task_id, own.rpc_layer, own.environment, own.master()) == (None, None, None, "", "")
    assert own.num_accelerators() == {}
    own.task_type, own.task_id, own.rpc_layer = "worker", 1, "grpc"
    assert own.master() == "grpc://b:1"
    assert own.master(task_id=0) == "grpc://a:1"
    assert own.master("ps", 0, rpc_layer="http") == "http://c:1"
    assert OwnResolver().task_type is None


def test_the_abstract_resolver():
    """It tells nothing."""
    with pytest.raises(TypeError, match="cluster_spec"):
        ClusterResolver()


def test_simple():
    """Everything is as given."""
    simple = SimpleClusterResolver(
        SPEC, "m:1", task_type="ps", task_id=0, environment="lab", num_accelerators={"GPU": 2}, rpc_layer="grpc"
    )
    assert simple.cluster_spec() == SPEC
    assert (simple.task_type, simple.task_id, simple.environment, simple.rpc_layer) == ("ps", 0, "lab", "grpc")
    assert simple.num_accelerators() == {"GPU": 2}
    assert (simple.master(), simple.master("worker", 1, "http")) == ("grpc://m:1", "http://b:1")
    simple.task_id = 7
    assert simple.task_id == 7


def test_simple_without_a_master():
    """An empty address gets no layer."""
    assert SimpleClusterResolver(SPEC, rpc_layer="grpc").master() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"worker": ["a:1"]},), "cluster_spec={'worker': .*: must be a ClusterSpec"),
        ((SPEC, 3), "master=3: must be a string"),
    ],
)
def test_simple_refuses(arguments, message):
    """Other types are TypeErrors."""
    with pytest.raises(ClusterTypeError, match=message):
        SimpleClusterResolver(*arguments)


def simple(cluster, **options):
    """Returns a resolver of a cluster."""
    return SimpleClusterResolver(ClusterSpec(cluster), **options)


def test_union_joins_lists():
    """In the order of the resolvers; everything else is the first one's."""
    first = simple(
        {"worker": ["a:1"]}, master="m:1", task_type="worker", task_id=0, rpc_layer="grpc", environment="lab"
    )
    union = UnionResolver(first, simple({"worker": ["b:1"], "ps": ["c:1"]}, num_accelerators={"GPU": 1}))
    assert union.cluster_spec() == SPEC
    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("worker", 0, "grpc", "lab")
    assert (union.master(), union.master("worker", 1), union.num_accelerators()) == ("grpc://m:1", "grpc://b:1", {})


def test_union_keeps_indices():
    """Where one of the resolvers tells them."""
    union = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {3: "d:1"}}), simple({"worker": {1: "b:1"}}))
    assert union.cluster_spec() == ClusterSpec({"worker": {0: "a:1", 1: "b:1", 3: "d:1"}})
    assert union.task_type is None


def test_union_may_be_told_the_task():
    """Against what its first resolver says."""
    first = simple({"worker": ["a:1"]}, task_type="worker", task_id=0)
    union = UnionResolver(first, task_type="ps", task_id=1, rpc_layer="grpc")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 1, "grpc")
    union.rpc_layer = None
    assert union.rpc_layer is None


def test_union_refuses():
    """Nothing, other things than resolvers, and an index that two of them have."""
    with pytest.raises(ClusterError, match="a union needs at least one resolver"):
        UnionResolver()
    with pytest.raises(ClusterTypeError, match="is not a ClusterResolver"):
        UnionResolver(SPEC)
    twice = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {0: "b:1", 2: "c:1"}}))
    with pytest.raises(ClusterError, match="index 0 of job 'worker': two resolvers have it: 'a:1' and 'b:1'"):
        twice.cluster_spec()


def test_tf_config_is_read_at_every_access():
    """A change of the environment is seen."""
    environ = {"TF_CONFIG": tf_config(SPEC, Task("worker", 1), rpc_layer="grpc")}
    resolver = TFConfigClusterResolver(environ=environ)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "grpc://b:1")
    assert (resolver.cluster_spec(), resolver.rpc_layer, resolver.environment) == (SPEC, "grpc", None)
    environ["TF_CONFIG"] = tf_config(SPEC, Task("ps", 0))
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "c:1")


def test_tf_config_of_this_process(monkeypatch):
    """It is the default."""
    monkeypatch.setenv("TF_CONFIG", tf_config(SPEC, Task("worker", 0)))
    assert TFConfigClusterResolver().master() == "a:1"


def test_tf_config_that_is_not_set():
    """There is no cluster."""
    resolver = TFConfigClusterResolver(environ={})
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.master()) == (None, None, None, "")


def test_tf_config_against_arguments():
    """What the program says goes before what the environment says, from the constructor or later."""
    environ = {"TF_CONFIG": tf_config(SPEC, Task("worker", 1), rpc_layer="grpc")}
    resolver = TFConfigClusterResolver("ps", 0, "http", "lab", environ=environ)
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("ps", 0, "lab")
    assert (resolver.master(), resolver.master("worker", 1, "ftp")) == ("http://c:1", "ftp://b:1")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "tcp"
    assert resolver.master() == "tcp://a:1"


@pytest.mark.parametrize(
    ("more", "cluster", "master"),
    [
        ({"session_master": "m:1"}, {"worker": ["a:1", "b:1"]}, "m:1"),
        ({"session_master": "m:1", "rpc_layer": "grpc"}, {"worker": ["a:1"]}, "m:1"),
        ({}, {"worker": ["a:1"]}, ""),
        ({}, {"worker": ["a:1"], "ps": ["b:1"]}, "a:1"),
    ],
)
def test_master_of_tf_config(more, cluster, master):
    """`session_master` goes first, as it is, and one task alone needs none."""
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}, **more}
    assert TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)}).master() == master


def test_master_of_a_cluster_with_gaps():
    """One known address of several is the master still."""
    config = {"cluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": 1}}
    assert TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)}).master() == "b:1"


def test_master_of_an_evaluator_alone():
    """There is no address, and that is no error."""
    environ = {"TF_CONFIG": '{"task": {"type": "evaluator", "index": 0}}'}
    assert TFConfigClusterResolver(environ=environ).master() == ""


@pytest.mark.parametrize("ask", ["cluster_spec", "master"])
def test_malformed_tf_config(ask):
    """Every question ends in the error."""
    with pytest.raises(ClusterError, match="TF_CONFIG: is not JSON"):
        getattr(TFConfigClusterResolver(environ={"TF_CONFIG": "{"}), ask)()


def test_master_of_a_task_that_is_not_there():
    """The message lists the tasks."""
    environ = {"TF_CONFIG": tf_config(SPEC, Task("worker", 0))}
    with pytest.raises(ClusterError, match="task 7 of job 'worker': 'worker' has the tasks 0, 1"):
        TFConfigClusterResolver(environ=environ).master("worker", 7)


def test_sagemaker_arguments():
    """Those of tf.distribute replace what the environment says."""
    resolver = SageMakerClusterResolver(2224, "chief", 3, "grpc", "sagemaker", environ=SAGEMAKER)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 3, "grpc")
    assert resolver.environment == "sagemaker"
    assert resolver.master("worker", 0).startswith("grpc://")
    with pytest.raises(ClusterTypeError, match="port=0: must be a number from 1 to 65535"):
        SageMakerClusterResolver(0)


# From "SageMaker Training Toolkit", ENVIRONMENT_VARIABLES.md.
SAGEMAKER = {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-2","algo-1"]', "SM_NUM_GPUS": "1", "SM_NUM_CPUS": "4"}


def test_sagemaker():
    """Hosts are sorted, and each is a worker."""
    resolver = SageMakerClusterResolver(environ=SAGEMAKER)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["algo-1:2223", "algo-2:2223"]})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "algo-2:2223")
    assert resolver.num_accelerators() == {"GPU": 1}
    assert SageMakerClusterResolver(environ={**SAGEMAKER, "SM_NUM_GPUS": "0"}).num_accelerators() == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SM_HOSTS": ""}, "SM_HOSTS: is not set; SageMaker sets it for each container of a training job"),
        ({"SM_CURRENT_HOST": ""}, "SM_CURRENT_HOST: is not set"),
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1': must be a JSON list of host names"),
        ({"SM_HOSTS": "[1]"}, r"SM_HOSTS='\[1\]': must be a JSON list of host names"),
        ({"SM_CURRENT_HOST": "algo-9"}, "SM_CURRENT_HOST='algo-9': is not one of SM_HOSTS="),
    ],
)
@pytest.mark.parametrize("ask", [lambda r: r.cluster_spec(), lambda r: r.task_id])
def test_sagemaker_refuses(changes, message, ask):
    """Both questions tell what is wrong."""
    with pytest.raises(ClusterSourceError, match=message):
        ask(SageMakerClusterResolver(environ={**SAGEMAKER, **changes}))


class ComputeEngine:
    """Answers as the Compute Engine API v1 does, in pages of one machine, with what its reference shows."""

    def __init__(self, addresses):
        self.pages = [[{"instance": f"https://www.googleapis.com/compute/v1/p/z/instances/{n}"}] for n in addresses]
        self.addresses, self.answer = addresses, {}

    def instanceGroups(self):
        """Returns the part for groups."""
        return self

    def instances(self):
        """Returns the part for machines."""
        return self

    def listInstances(self, *, project, zone, instanceGroup, body):
        """Returns a request for the first page."""
        assert (project, zone, instanceGroup, body) == ("p", "z", "g", {"instanceState": "RUNNING"})
        return self._request({"items": self.pages[0]} if self.pages else {})

    def listInstances_next(self, previous_request, previous_response):
        """Returns a request for the page after, or None."""
        page = self.pages.index(previous_response["items"]) + 1 if self.pages else 0
        return self._request({"items": self.pages[page]}) if page < len(self.pages) else None

    def get(self, *, project, zone, instance):
        """Returns a request for one machine."""
        return self._request({"networkInterfaces": [{"networkIP": self.addresses[instance]}]})

    def _request(self, answer):
        request = ComputeEngine({})
        request.answer = answer
        return request

    def execute(self):
        """Returns the answer."""
        return self.answer


def test_gce():
    """The machines of all pages, sorted by address."""
    service = ComputeEngine({"m1": "10.0.0.3", "m2": "10.0.0.1", "m3": "10.0.0.2"})
    resolver = GCEClusterResolver("p", "z", "g", 8470, task_type="ps", service=service)
    assert resolver.cluster_spec() == ClusterSpec({"ps": [f"10.0.0.{i}:8470" for i in (1, 2, 3)]})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "grpc://10.0.0.1:8470")
    resolver.task_id = 2
    assert resolver.master() == "grpc://10.0.0.3:8470"


def test_gce_refuses():
    """A group without machines, and another job."""
    resolver = GCEClusterResolver("p", "z", "g", 8470, service=ComputeEngine({}))
    with pytest.raises(ClusterSourceError, match="instance_group='g' in z of p: no machine of this group is running"):
        resolver.cluster_spec()
    with pytest.raises(
        RuntimeError, match=r"task_type='ps': all machines of the group have the job 'worker'\.\nHINT: GCE"
    ):
        resolver.task_type = "ps"


@pytest.mark.skipif(importlib.util.find_spec("googleapiclient") is not None, reason="google-api-python-client is here")
def test_gce_without_its_client():
    """The message says what to install."""
    with pytest.raises(MissingDependencyError, match="HINT: pip install google-api-python-client"):
        GCEClusterResolver("p", "z", "g", 8470).cluster_spec()


def test_the_real_client_of_google():
    """It is built without the network."""
    credentials = pytest.importorskip("google.auth.credentials")
    pytest.importorskip("googleapiclient")
    service = google_service("compute", "v1", credentials.AnonymousCredentials())
    assert callable(service.instanceGroups().listInstances_next)


STEP = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
PODS = {"PHALANX_NUM_PODS": "2", "PHALANX_SERVICE": "s", "HOSTNAME": "web-1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "0"}
CONFIG = {"TF_CONFIG": tf_config(SPEC, Task("worker", 0))}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({**SLICE, **SAGEMAKER, **PODS, **STEP, **CONFIG}, TFConfigClusterResolver),
        ({**SLICE, **SAGEMAKER, **PODS, **STEP}, SlurmClusterResolver),
        ({**SLICE, **SAGEMAKER, **PODS}, KubernetesClusterResolver),
        ({**SLICE, **SAGEMAKER}, SageMakerClusterResolver),
        (SLICE, TPUClusterResolver),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, type(None)),
        # The script of `sbatch` itself, outside of a step, has a rank but is no task.
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}, type(None)),
        # A Job whose pods have nothing to do with each other.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "sweep-1"}, type(None)),
        ({}, type(None)),
    ],
)
def test_order_of_environments(environ, kind):
    """What a person wrote goes before what a machine set, and no cluster is guessed."""
    resolver = resolver_of_environment(environ)
    assert type(resolver) is kind
    assert resolver is None or len(resolver.cluster_spec().task_indices("worker")) == 2


def test_environment_of_this_process(monkeypatch):
    """It is the default."""
    monkeypatch.setenv("TF_CONFIG", CONFIG["TF_CONFIG"])
    assert resolver_of_environment().cluster_spec() == SPEC


def test_public_names():
    """They are sorted and exist."""
    assert cluster_resolver.__all__ == sorted(cluster_resolver.__all__, key=str.lower)
    assert all(hasattr(cluster_resolver, name) for name in cluster_resolver.__all__)


def test_imports():
    """Neither JAX nor Keras nor NumPy is needed to look at a cluster."""
    code = "import sys, phalanx.cluster_resolver, phalanx.cluster.resolvers.environment; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "keras", "numpy", "click"} & {*done.stdout.split()}
