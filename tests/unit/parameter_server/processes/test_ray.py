"""Places in a Ray cluster: what the processes ask of it, and errors. Ray itself is replaced; tests/cluster has a real one."""

from types import SimpleNamespace

import pytest

from phalanx._src.cluster.processes import places
from phalanx._src.parameter_server.processes import ray
from phalanx._src.parameter_server.processes.ray import RayCluster
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx.errors import InvalidArgumentError, StartupError


class RayError(Exception):
    """The base class of the errors of Ray."""


class GetTimeoutError(RayError):
    """There is no result in time."""


class JoinedRay:
    """A cluster that this process has joined."""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def __init__(self, *nodes):
        self._nodes = nodes
        self.groups, self.started, self.error, self.answer, self.is_ready = [], [], None, None, True
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=self.groups.remove)

    def on_wait(self):
        """Is called when there may be places."""

    def _group(self, bundles, strategy):
        self.groups.append(SimpleNamespace(bundles=bundles, strategy=strategy, ready=object))
        return self.groups[-1]

    def PlacementGroupSchedulingStrategy(self, group, placement_group_bundle_index):  # noqa: N802
        return group.bundles[placement_group_bundle_index]

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": node} for node in self._nodes] + [
            {"Alive": False, "Resources": {"CPU": 9}}
        ]

    def available_resources(self):
        return {"CPU": 0.5}

    def get_runtime_context(self):
        return SimpleNamespace(runtime_env={"env_vars": {"JAX_ENABLE_X64": "0"}})

    def remote(self, kind):
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *args: self._start(options, args))
        )

    def _start(self, options, args):
        self.started.append((options, args))
        return len(self.started)

    def wait(self, references, timeout):
        self.on_wait()
        return (references, []) if self.is_ready else ([], references)

    def get(self, references, timeout):
        if self.error:
            raise self.error
        return [self.answer or ray._version()] * len(references)

    def kill(self, actor, *, no_restart):
        self.started[actor - 1] = None


@pytest.fixture
def join(monkeypatch):
    """Returns a function that makes this process one of a cluster with some nodes."""

    def join(*nodes):
        fake = JoinedRay(*nodes)
        monkeypatch.setattr(ray, "load_ray", lambda *, is_joining: fake)
        monkeypatch.setattr(places, "optional_module", lambda *_: fake)
        return fake

    # The tests run on CPUs, so no process would ask for a GPU.
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return join


def cluster_of(resources=None, workers=2, ps=2):
    return RayCluster(None, workers, ps, 1.0, dashboard=False, resources=resources)


ONE = {"CPU": 1.0}


@pytest.mark.parametrize(
    ("nodes", "resources", "of_worker", "of_server"),
    [
        ([{"CPU": 8.0}, {"CPU": 8.0}], None, {"CPU": 4}, {"CPU": 4}),
        ([{"CPU": 8.0}, {"memory": 1.0}], None, {"CPU": 2}, {"CPU": 2}),
        ([{"memory": 1.0}], None, {"CPU": 1}, {"CPU": 1}),
        ([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}], None, {"CPU": 1.0, "GPU": 1.0}, ONE),
        ([{"CPU": 8.0, "GPU": 4.0}], {"worker": {"CPU": 3}}, {"CPU": 3}, ONE),
        ([{"CPU": 8.0}], {"ps": {"memory": 5, "disk": 0.5}}, ONE, {"memory": 5, "disk": 0.5}),
    ],
    ids=["equal shares", "of the nodes with cores", "an autoscaler adds nodes", "GPUs", "worker only", "ps only"],
)
def test_needs_of_the_processes(join, nodes, resources, of_worker, of_server):
    """A process has the number of threads that Ray counts for it."""
    joined = join(*nodes)
    cluster = cluster_of(resources)
    (group,) = joined.groups
    assert group.bundles == [of_worker] * 2 + [of_server] * 2
    assert group.strategy == "SPREAD"
    joined.started.clear()
    for job, needs in (("worker", of_worker), ("ps", of_server)):
        cluster.actor(object, job, 1, "argument", threads=5)
        options, args = joined.started.pop()
        assert args == (max(1, needs.get("CPU", 0)), "argument")
        assert options["scheduling_strategy"] == needs
        assert options["max_concurrency"] == 5
        assert (options["num_cpus"], options["num_gpus"]) == (needs.get("CPU", 0), needs.get("GPU", 0))
        assert (options.get("memory"), options["resources"].get("disk")) == (needs.get("memory"), needs.get("disk"))
    joined.started.extend([None, None])
    cluster.actors.clear()
    cluster.close()
    assert not joined.groups


def test_variables_of_the_script(join, monkeypatch):
    """JAX_PLATFORMS=cpu of the script counts on all nodes, and Ray's own variables for the job win."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("PHALANX_TOKEN", "secret")
    joined = join({"CPU": 8.0, "GPU": 4.0})
    cluster_of().close()
    options, _ = joined.started[0]
    variables = options["runtime_env"]["env_vars"]
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert not variables.keys() & {"JAX_ENABLE_X64", "PHALANX_TOKEN"}
    assert options["scheduling_strategy"] == {"CPU": 2}


def test_a_node_is_lost_before_the_start(join, caplog):
    """Ray notices it late: while there is no room, equal shares are those of the nodes that are left."""
    joined = join({"CPU": 8.0}, {"CPU": 8.0})

    def lose():
        joined.is_ready, joined.on_wait = False, lose_at_last

    def lose_at_last():
        joined.is_ready = len(joined._nodes) == 1
        joined._nodes = joined._nodes[:1]

    joined.on_wait = lose
    cluster_of()
    (group,) = joined.groups
    assert group.bundles == [{"CPU": 2}] * 4
    text = "waiting for places for 2 workers with {0} CPU each and 2 parameter servers with {0} CPU each in"
    assert [message.startswith(text.format(n)) for message, n in zip(caplog.messages, (4, 2), strict=True)] == [
        True
    ] * 2


def test_starts_that_fail(join, caplog, monkeypatch):
    """No room, nodes that cannot import Phalanx, and those with another version. No place is kept."""
    monkeypatch.setenv("PHALANX_START_TIMEOUT_S", "0.1")
    joined = join({"CPU": 2.0})
    joined.error, joined.is_ready = GetTimeoutError("no result"), False
    room = "2 workers with 1 CPU each and 1 parameter server with 1 CPU each"
    with pytest.raises(
        StartupError, match=rf"after 0.1 s Ray had no place for {room}\. Free are 0.5 CPU\.[\s\S]*HINT: ray"
    ):
        cluster_of(ps=1)
    assert caplog.messages == [f"waiting for places for {room} in the Ray cluster. Free are 0.5 CPU."]
    joined.is_ready = True
    with pytest.raises(StartupError, match=rf"after 0.1 s Ray started no process at the places for {room}\. Free"):
        cluster_of(ps=1)
    joined.error = RayError("a stack\nModuleNotFoundError: No module named 'phalanx'\n")
    with pytest.raises(
        StartupError, match=r"imports Phalanx: ModuleNotFoundError: No module named 'phalanx'\nHINT: install"
    ):
        cluster_of()
    joined.error, joined.answer = None, "0.0.1"
    with pytest.raises(
        StartupError, match=r"its nodes have Phalanx 0\.0\.1, and this process has .*\nHINT: pip install"
    ):
        cluster_of()
    assert not joined.groups


@pytest.mark.parametrize(
    ("text", "is_tried_again"),
    [
        ("raylet exited unexpectedly", True),
        ("The current node timed out during startup. This could happen because ...", True),
        ("RuntimeError: Version mismatch", False),
    ],
)
def test_server_tries_again_on_a_busy_machine(text, is_tried_again):
    """Its Ray may start too late the first time. Other errors, and the last try, end it."""
    server = ray.Server({"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}, "worker", 0)
    chief = SimpleNamespace(is_open=lambda _: True)
    node = SimpleNamespace(poll=lambda: 1, stdout=SimpleNamespace(read=lambda: text))
    if is_tried_again:
        assert not server._stay(chief, node, is_last=False)
    with pytest.raises(StartupError, match=f"Ray ended after 0 s:\\n{text}"):
        server._stay(chief, node, is_last=is_tried_again)


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ([], r'resources=\[\]: must have the keys "worker" and "ps"'),
        ({"chief": {"CPU": 1}}, 'must have the keys "worker" and "ps"'),
        ({"worker": 4}, r'resources\["worker"\]=4: must name resources of Ray'),
        ({"worker": {}}, "must name resources of Ray"),
        ({"ps": {1: 1}}, r'resources\["ps"\]=\{1: 1\}: must name resources of Ray'),
        ({"ps": {"CPU": 0}}, r'resources\["ps"\]\["CPU"\]=0: must be a number above 0'),
        ({"ps": {"CPU": True}}, "must be a number above 0"),
        ({"ps": {"CPU": "2"}}, "must be a number above 0"),
        ({"ps": {"CPU": float("inf")}}, "must be a number above 0"),
    ],
)
def test_resources_that_are_refused(resources, why):
    """The error shows what can be written."""
    with pytest.raises(InvalidArgumentError, match=rf'{why}[\s\S]*HINT: resources=\{{"worker"'):
        ParameterServerStrategy(resources=resources)
