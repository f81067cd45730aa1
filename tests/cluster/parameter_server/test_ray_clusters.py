"""Parameter servers in a Ray cluster of the user: places on its nodes, what is left of them, and errors. The nodes are on this machine."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager

import pytest
from processes import HERE, errors_of, family_of, is_there, kill, process, said, tell, wait_until

from phalanx._src.cluster.connections.ports import HeldPort
from phalanx._src.parameter_server.processes.session import RAY_START

CORES = 3


class RayNodes:
    """Nodes of a Ray cluster at addresses of the loopback interface. Only clients with their token get in."""

    def __init__(self, root):
        self._root, self._nodes = root, []
        with HeldPort("127.0.0.2") as held:
            self.address = held.address
        self.access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def add(self):
        """Starts one more node."""
        number = len(self._nodes)
        port = self.address.rpartition(":")[2]
        words = (f"--address={self.address}",) if number else ("--head", f"--port={port}", "--include-dashboard=false")
        folder = f"{self._root}/{number}"
        with open(f"{self._root}/output{number}", "w") as output:
            node = subprocess.Popen(
                [
                    *(*RAY_START, *words, f"--node-ip-address=127.0.0.{number + 2}", f"--num-cpus={CORES}"),
                    *(f"--temp-dir={folder}", "--block", "--disable-usage-stats"),
                ],
                env={**os.environ, **self.access, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._nodes.append(node)
        wait_until(lambda: "Ray runtime started" in self.output(number) or node.poll() is not None)
        assert node.poll() is None, self.output(number)

    def output(self, number):
        with open(f"{self._root}/output{number}") as file:
            return file.read()

    def lose(self):
        """Ends the last node, and all of its processes, without a word."""
        node = self._nodes.pop()
        for pid in reversed(family_of(node.pid)):
            kill(pid)
        node.wait()

    def close(self):
        for node in reversed(self._nodes):
            family = family_of(node.pid)
            node.send_signal(signal.SIGTERM)
            node.wait()
            wait_until(lambda: not any(map(is_there, family)))  # noqa: B023


@pytest.fixture(scope="module")
def nodes():
    """Two nodes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        nodes = RayNodes(root)
        try:
            nodes.add()
            nodes.add()
            yield nodes
        finally:
            nodes.close()


@pytest.fixture
def coordinator(nodes, tmp_path):
    """Starts `attaching.py`, or another program, in the cluster."""

    def coordinator(*command, **options):
        variables = options.pop("variables", {"RAY_ADDRESS": nodes.address})
        command = command or (HERE / "attaching.py", json.dumps(options), tmp_path / "checkpoints")
        return process(*command, **nodes.access, **variables)

    return coordinator


def test_no_ray_cluster():
    """RAY_ADDRESS names one that is not there: the error says so, and how to go on without it."""
    for address, why in (("127.0.0.1:1", "Connection refused"), ("http://a:1", "Invalid Ray address")):
        settings = {"RAY_ADDRESS": address, "PHALANX_START_TIMEOUT_S": "0.2"}
        with process("-c", "import phalanx; phalanx.ParameterServerStrategy()", **settings) as coordinator:
            assert coordinator.wait(300) == 1
            text = errors_of(coordinator)
        assert f"StartupError: RAY_ADDRESS={address}: this Ray cluster does not answer: " in text
        assert why in text
        assert "HINT: RAY_ADDRESS=auto on a node of the cluster" in text


@pytest.mark.exhaustive("tests/unit/parameter_server/processes/test_ray.py")
def test_places_on_the_nodes(coordinator):
    """They are spread, Ray counts them, each process has the threads of its own place, and `close` gives back all of them."""
    with coordinator(workers=2, ps=2, resources={"worker": {"CPU": 2}}) as one:
        assert said(one) == {"count": 10, "alive": 2}
        places = sorted(said(one)["places"])
        assert places == [[f"127.0.0.{i}", f"{cores}", {"CPU": cores}] for i in (2, 3) for cores in (1, 2)]
        tell(one, "close")
        assert said(one) == "closed"
        assert one.wait(300) == 0
    # By default each has an equal share of all cores.
    with coordinator(workers=1, ps=1) as one:
        said(one)
        assert sorted(said(one)["places"]) == [[f"127.0.0.{i}", str(CORES), {"CPU": CORES}] for i in (2, 3)]
        # As `ray job stop` ends it.
        os.kill(one.pid, signal.SIGTERM)
        assert one.wait(300) == 128 + signal.SIGTERM
        assert "SIGTERM" not in errors_of(one)


@pytest.mark.exhaustive("tests/unit/parameter_server/processes/test_ray.py")
def test_a_killed_coordinator_leaves_nothing(coordinator):
    """The next start gets all cores of the cluster again, and continues from the checkpoint."""
    with coordinator(workers=1, ps=1) as one:
        assert said(one)["count"] == 10
        said(one)
        tell(one, "more")
        assert said(one)["count"] == 20
        kill(one.pid)
    with coordinator(workers=1, ps=1) as one:
        assert said(one)["count"] == 30
        said(one)
        tell(one, "close")
        assert said(one) == "closed"


@pytest.mark.exhaustive("tests/unit/parameter_server/processes/test_ray.py")
def test_a_cluster_without_room(nodes, coordinator):
    """The cluster may grow, so the strategy waits; then it says what is missing, and what to write."""
    code = "import phalanx; phalanx.ParameterServerStrategy(workers=20, ps=1)"
    with coordinator("-c", code, variables={"PHALANX_START_TIMEOUT_S": "2", "RAY_ADDRESS": nodes.address}) as one:
        assert one.wait(300) == 1
        text = errors_of(one)
    assert (
        "ParameterServerStrategy(workers=20, ps=1) in a Ray cluster: after 2 s Ray had no place for 20 workers" in text
    )
    assert " with 1 CPU each and 1 parameter server with 1 CPU each. Free are " in text
    assert 'HINT: ray status    shows who has them; ParameterServerStrategy(resources={"worker"' in text


@contextmanager
def module_elsewhere():
    """A folder with a module of the user that is on no path of the nodes."""
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/rows_of_the_user.py", "w") as file:
            file.write("import numpy as np\ndef rows():\n    while True:\n        yield np.ones(1, 'int32')\n")
        yield folder


@pytest.mark.exhaustive("tests/unit/parameter_server/processes/test_ray.py")
@pytest.mark.parametrize("is_sent", [False, True], ids=["not sent", "sent"])
@pytest.mark.parametrize("is_job", [False, True], ids=["ray.init", "ray job submit"])
def test_modules_of_the_user(nodes, coordinator, tmp_path, *, is_sent, is_job):
    """Ray's working_dir brings them to the workers. Without it, the error says which line to write."""
    with ExitStack() as stack:
        folder = stack.enter_context(module_elsewhere())
        runtime_env = {"working_dir": folder} if is_sent else {}
        variables = {"RAY_ADDRESS": nodes.address}
        # As Ray's supervisor of jobs sets it.
        if is_job:
            variables["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": runtime_env, "metadata": {}})
        join = "" if is_job else f"import ray; ray.init(log_to_driver=False, runtime_env={runtime_env})\n"
        code = (
            f"import sys, phalanx, attaching\n{join}sys.path.insert(0, {folder!r})\nimport rows_of_the_user\n"
            f"attaching.main(dict(workers=1, ps=1), {str(tmp_path)!r}, rows_of_the_user.rows)"
        )
        one = stack.enter_context(coordinator("-c", code, variables=variables))
        if is_sent:
            assert said(one)["count"] == 10
        else:
            assert one.wait(300) == 1
            text = errors_of(one)
            assert "worker 0 cannot load it: ModuleNotFoundError: No module named 'rows_of_the_user'" in text
            assert 'HINT: define it in the script itself, or ray.init(runtime_env={"working_dir": "."})' in text


@pytest.mark.exhaustive("tests/unit/parameter_server/processes/test_ray.py")
def test_a_lost_node(nodes, coordinator):
    """Its worker starts again on another node that has room, and no step is lost."""
    nodes.add()
    on_head = {"ps": {"CPU": 1, "node:__internal_head__": 0.001}}
    with coordinator(workers=3, ps=1, resources=on_head) as one:
        assert said(one) == {"count": 10, "alive": 3}
        assert "127.0.0.4" in [ip for ip, *_ in said(one)["places"]]
        nodes.lose()
        reports = [{"alive": 0, "count": 0}]
        while reports[-1]["alive"] < 3:
            tell(one, "more")
            # Ray prints a line about the node.
            while not (line := one.stdout.readline()).startswith("{"):
                assert line, errors_of(one)
            reports.append(json.loads(line))
        # A step of the lost worker may count twice.
        assert reports[-1]["count"] >= 10 * len(reports)
