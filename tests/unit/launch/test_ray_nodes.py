"""Workers on the nodes of a Ray cluster: output, exit codes, signals, lost nodes and places. The nodes are on this machine."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from phalanx._src.cluster.spec import Task
from phalanx._src.launch.plan import ProcessSpec, Request
from phalanx._src.launch.ray_nodes import NodeHost, RayNodes

pytestmark = pytest.mark.slow
pytest.importorskip("ray")

DEADLINE_S = 300


def is_there(pid):
    """Whether a process runs. One that has ended may wait for its parent, which is this process if its own has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Each node has two cores. The second one is removed and made by what comes from the standard input.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "add\\n":
        node = cluster.add_node(num_cpus=2)
    else:
        cluster.remove_node(node, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


class RayCluster:
    """A Ray cluster of two nodes, in a process without JAX, because Ray forks."""

    def __init__(self):
        # Whoever has the token may run code on the nodes.
        self.access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**os.environ, **self.access, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["RAY_USAGE_STATS_ENABLED"] = "0"
        # Bounds on hangs: Ray's own are short for a busy machine.
        environment |= {
            "RAY_gcs_server_port_wait_time_s": f"{DEADLINE_S}",
            "RAY_agent_register_timeout_ms": f"{DEADLINE_S}000",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.address, text = "", "timed out during startup"
        # One of Ray's limits, 30 s for the start of a node, cannot be set.
        while not self.address:
            assert "timed out during startup" in text, text
            with tempfile.TemporaryFile("w+") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", CLUSTER], env=environment, text=True, stderr=errors, **pipes
                )
                self.address = self._process.stdout.readline().strip()
                if not self.address:
                    self.close()
                errors.seek(0)
                text = errors.read()

    def tell(self, word):
        """Adds a node, or removes the last one as if its power had failed."""
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self):
        self._process.communicate(timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def cluster():
    cluster = RayCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def phalanx_run(cluster, tmp_path, environment):
    """Starts `phalanx run --ray` with a script. Returns the process, whose output is in the file `output`."""
    processes = []

    def phalanx_run(script, *options, address=None, **variables):
        (tmp_path / "train.py").write_text(script)
        words = [sys.executable, "-m", "phalanx", "run", "--ray", address or cluster.address, *options, "train.py"]
        variables = {**environment, **cluster.access, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        with open(tmp_path / "output", "wb") as output:
            process = subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=output, stderr=subprocess.STDOUT)
        processes.append(process)
        return process

    yield phalanx_run
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def output(tmp_path):
    """Reads the output of the launch."""
    return lambda: (tmp_path / "output").read_text()


def wait_until(is_so, output):
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, output()
        time.sleep(0.05)


WAITS = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ["CODE"])))
print(os.getcwd(), flush=True)
print("error", file=sys.stderr, flush=True)
signal.pause()
"""


def test_process_on_its_node(monkeypatch, tmp_path):
    """It is Python of the node, in the folder of the launcher. Its output comes with its stream, and then its exit code."""
    monkeypatch.chdir(tmp_path.parent)
    host, texts = NodeHost(), {False: b"", True: b""}
    host.start(ProcessSpec(Task("worker", 0), ("/launcher/python", "-c", WAITS), {"CODE": "3"}), "mark", str(tmp_path))
    while not texts[True].endswith(b"\n"):
        for is_error, data in host.read():
            texts[is_error] += data
    assert texts == {False: f"{tmp_path}\n".encode(), True: b"error\n"}
    host.tell(signal.SIGTERM)
    assert host.read() == 3
    host._guard.release()


@pytest.mark.parametrize(
    ("platforms", "devices", "expected"), [("cpu", None, 0), ("cuda", None, 2), ("", 1, 1), ("cuda,cpu", 3, 3)]
)
def test_gpus_are_for_programs_that_use_them(platforms, devices, expected):
    """They are divided between the workers, unless the user says how many each has."""
    request = Request("train.py", workers=2, devices_per_worker=devices)
    assert RayNodes("auto", request, {"JAX_PLATFORMS": platforms})._gpus_per_worker(5) == expected


RANK = """
import json, os, re, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
"""


def test_output_exit_code_and_restarts(phalanx_run, output):
    """Lines are marked, the launcher has the code of the worker that failed first, and all start again with new ports."""
    script = RANK + (
        "restart = os.environ['PHALANX_RESTART']\n"
        "print(config['cluster']['worker'], os.environ['EPOCHS'], restart, flush=True)\n"
        # The other one would be ended before it has printed.
        "while rank and not re.search(rf'^\\[worker 0\\] .* 7 {restart}$', open('output').read(), re.M): time.sleep(0.05)\n"
        "sys.exit(3 * rank)"
    )
    process = phalanx_run(script, "--workers", "2", "--max-restarts", "1", EPOCHS="7")
    assert process.wait(DEADLINE_S) == 3, output()
    lines = [re.findall(rf"^\[worker {rank}\] (.*) 7 (\d)$", output(), re.M) for rank in range(2)]
    assert lines[0] == lines[1]
    assert [restart for _, restart in lines[0]] == ["0", "1"]
    assert lines[0][0] != lines[0][1]
    assert len(re.findall(r"^worker 1 failed first: it exited with code 3", output(), re.M)) == 2


@pytest.mark.exhaustive("test_output_exit_code_and_restarts")
def test_signals_reach_the_processes(phalanx_run, output, tmp_path):
    """SIGTERM to the launcher gives them time to save. `kill -9` of the launcher ends them too."""
    script = RANK + (
        "def save(*_):\n    print('saved', flush=True)\n    sys.exit(42)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('pid', os.getpid(), flush=True)\ntime.sleep(3600)"
    )
    pids = lambda: re.findall(r"\] pid (\d+)$", output(), re.M)  # noqa: E731
    process = phalanx_run(script, "--workers", "2", "--grace-seconds", "100")
    wait_until(lambda: len(pids()) == 2, output)
    process.terminate()
    assert process.wait(DEADLINE_S) == 143
    assert output().count("] saved\n") == 2
    process = phalanx_run(
        script.replace("sys.exit(42)", "time.sleep(3600)"), "--workers", "2", "--grace-seconds", "0.2"
    )
    wait_until(lambda: len(pids()) == 2, output)
    process.terminate()
    assert process.wait(DEADLINE_S) == 143
    assert not any(is_there(int(pid)) for pid in pids())
    process = phalanx_run(script, "--workers", "2")
    wait_until(lambda: len(pids()) == 2, output)
    process.kill()
    wait_until(lambda: not any(is_there(int(pid)) for pid in pids()), output)


@pytest.mark.exhaustive("test_output_exit_code_and_restarts")
def test_workers_find_each_other(phalanx_run, output):
    """All checks of the doctor pass, so a training would start."""
    process = phalanx_run(
        "import runpy\nrunpy.run_module('phalanx._src.tools.doctor', run_name='__main__')", "--workers", "2"
    )
    assert process.wait(DEADLINE_S) == 0, output()
    assert re.findall(r"^\[worker 0\] PASS (.*?):", output(), re.M)[-3:] == ["addresses", "versions", "clocks"]


def test_no_place_for_so_many_workers(phalanx_run, output):
    """The cluster may grow, so the launcher waits; then it says what is missing."""
    process = phalanx_run("", "--workers", "9", PHALANX_START_TIMEOUT_S="2")
    assert process.wait(DEADLINE_S) == 2, output()
    missing = "after 2 s Ray had no place for 9 workers with 1 CPU each. Free are "
    assert f"--workers 9: {missing}" in output()


def test_launcher_in_the_cluster_is_refused(phalanx_run, output):
    """One launcher starts all workers."""
    process = phalanx_run("", "--in-cluster", "--workers", "1:2")
    assert process.wait(DEADLINE_S) == 2
    assert "with --in-cluster: one launcher starts all workers on Ray's nodes." in output()


@pytest.mark.cover(["address"], {"127.0.0.1:1"})
@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "[Errno 111] Connection refused"), ("nowhere", "Invalid address format")]
)
def test_cluster_that_does_not_answer(phalanx_run, output, address, why):
    process = phalanx_run("", address=address, PHALANX_START_TIMEOUT_S="0.2")
    assert process.wait(DEADLINE_S) == 2
    assert f"phalanx: phalanx run --ray {address}: this cluster does not answer: {why}" in output()


PLACES = """
import os, sys, time
import ray
from phalanx._src.cluster.processes import places
from phalanx.errors import StartupError
ray.init(address=sys.argv[1], log_to_driver=False)
places._NOTE_S = 0.1
needs = iter([99, 99, 99])
made = places.Places(lambda: [("worker", {"CPU": next(needs, 1)})], subject="a test", hint="wait", timeout_s=300.0)
print(made.ask(lambda: os.getpid()) != [os.getpid()], next(needs, "none"), flush=True)
found = ""
while "started no process at the places" not in found:
    made._timeout_s = 2.0 * made._timeout_s if found else 0.5
    try:
        made.ask(lambda: time.sleep(3600))
    except StartupError as error:
        found = str(error)
print(found, flush=True)
"""


@pytest.mark.exhaustive("test_no_place_for_so_many_workers")
def test_places_follow_what_is_needed(cluster):
    """While there is no room, another need is asked for. A place where no process starts is another error."""
    environment = {**os.environ, **cluster.access, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PLACES, cluster.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout.startswith("True none\na test: after "), done.stdout + done.stderr
    assert done.stderr.count("waiting for places for 1 worker with 99 CPU each in the Ray cluster.") == 1


MEETS = """
import os, time
from phalanx._src.cluster.watch import membership
own = membership.own()
own.meet(call=0, progress=[0])
print("met", flush=True)
while not os.path.exists("lost"):
    time.sleep(0.05)
print("size", own.meet(call=0, progress=[1]).size, flush=True)
"""


@pytest.mark.exhaustive("test_output_exit_code_and_restarts")
def test_elastic_group_loses_a_node(phalanx_run, output, cluster, tmp_path):
    """The others go on, and the group ends with them although no node has a place for the one that is started again."""
    cluster.tell("add")
    process = phalanx_run(MEETS, "--workers", "1:3")
    wait_until(lambda: output().count("] met\n") == 3, output)
    cluster.tell("remove")
    wait_until(lambda: "starts again" in output(), output)
    (tmp_path / "lost").touch()
    assert process.wait(DEADLINE_S) == 0, output()
    assert output().count("] size 2\n") == 2
    assert "Phalanx: Ray has no process for worker" in output()
