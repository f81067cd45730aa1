"""Coordinators, and servers from TF_CONFIG, as processes of their own."""

import json
import os
import re
import signal
import socket
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import HERE, errors_of, family_of, is_there, kill, listening, process, said, tell, wait_until

from phalanx._src.cluster.resolvers.simple import SimpleClusterResolver
from phalanx._src.cluster.spec import ClusterSpec
from phalanx._src.launch.plan import free_ports
from phalanx._src.parameter_server.processes.ray import Server
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx.errors import ClusterError, StartupError

TOKEN = "a" * 64


def test_a_lost_worker_is_one_line():
    """Ray's own paragraphs are left out. No other machine can reach the processes, and all end with `close`, also those of Ray."""
    with process("coordinating.py", 1, 1) as coordinator:
        report = said(coordinator)
        assert report["count"] == 20
        family = family_of(coordinator.pid)
        assert set(report["pids"]) <= set(family)
        assert len(report["pids"]) == 2
        assert listening(family) == {"127.0.0.1"}
        kill(report["pids"][0])
        tell(coordinator, "more")
        assert said(coordinator)["count"] >= 40
        family += family_of(coordinator.pid)
        tell(coordinator, "close")
        assert said(coordinator) == "closed"
        wait_until(lambda: not any(map(is_there, {*family} - {coordinator.pid})))
        output, _ = coordinator.communicate(timeout=300)
        assert output == ""
        lines = [line for line in errors_of(coordinator).splitlines() if "waiting for" not in line]
        assert lines == [
            "Phalanx: 1 worker and 1 parameter server",
            "worker:0 was lost. A new worker starts in its place and runs its steps again.",
        ]


def test_all_processes_end_with_a_killed_coordinator(tmp_path):
    """Ray's own agents included, and with them the files, which only this user could read.

    The current folder is no code: workers and servers import from the folders of the script, as the coordinator does.
    """
    for name in ("json", "phalanx", "keras", "cython"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the code of another user')")
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as root,
        process(HERE / "coordinating.py", 1, 1, cwd=tmp_path, RAY_TMPDIR=root) as coordinator,
    ):
        assert said(coordinator)["count"] == 20
        (folder,) = Path(root).iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.glob("ray/session_*"))
        family = family_of(coordinator.pid)
        assert len(family) > 8
        kill(coordinator.pid)
        wait_until(lambda: not any(map(is_there, family[1:])))
        wait_until(lambda: not folder.exists())


@pytest.mark.cover(["status"], {143})
@pytest.mark.parametrize(
    ("handler", "status"),
    [("", 128 + signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 3)],
    ids=["by default", "a handler that the script has set before"],
)
def test_sigterm_of_a_coordinator(handler, status):
    """Its `finally` blocks run, all processes end, and nothing is printed of Ray's or absl's."""
    code = (
        f"import json, signal, sys, coordinating\n{handler}\n"
        "try: coordinating.main({'workers': 1, 'ps': 1})\nfinally: print(json.dumps('finally'), flush=True)"
    )
    with process("-c", code) as coordinator:
        said(coordinator)
        family = family_of(coordinator.pid)
        os.kill(coordinator.pid, signal.SIGTERM)
        assert said(coordinator) == "finally"
        assert coordinator.wait(120) == status
        assert not any(map(is_there, family[1:]))
        assert "SIGTERM" not in errors_of(coordinator)


@pytest.mark.exhaustive("tests/unit/parameter_server: limits with a clock of the test")
def test_a_start_that_takes_too_long():
    """Ray's processes stand still the first time; they are ended, and it is started again."""
    code = (
        "import os, signal, threading, time, coordinating\n"
        "from processes import family_of\n"
        "def stop():\n"
        "    while True:\n"
        "        for pid in family_of(os.getpid()):\n"
        "            try: name = open(f'/proc/{pid}/comm').read().strip()\n"
        "            except OSError: continue\n"
        "            if name == 'raylet':\n"
        "                os.kill(pid, signal.SIGSTOP)\n"
        "                now = time.monotonic\n"
        "                time.monotonic = lambda: now() + 60\n"  # Ray waits for 30 s.
        "                return\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "coordinating.main({'workers': 1, 'ps': 1})\n"
    )
    with process("-c", code) as coordinator:
        assert said(coordinator)["count"] == 20
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in family_of(coordinator.pid)]
        assert names.count("raylet") == 1


@pytest.mark.exhaustive("tests/guide/test_parameter_server_guide.py: a cluster that starts as it should")
def test_an_address_that_is_taken():
    """The chief cannot listen there: a typed error, and not Ray's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = {"chief": [f"127.0.0.1:{taken.getsockname()[1]}"], "worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
        config = json.dumps({"cluster": spec, "task": {"type": "chief", "index": 0}})
        with process("-c", "import coordinating; coordinating.main({})", TF_CONFIG=config) as chief:
            assert chief.wait(300) == 1
            text = errors_of(chief)
    assert "StartupError: the chief at 127.0.0.1" in text
    assert "HINT: " in text


@pytest.mark.exhaustive("test_a_folder_named_ray_without_ray")
def test_a_folder_named_ray(tmp_path):
    """It does no harm where Ray is installed. No token of the user is made or needed."""
    (tmp_path / "ray").mkdir()
    code = "import phalanx; phalanx.ParameterServerStrategy(workers=1); print(7)"
    with process("-c", code, cwd=tmp_path, HOME=str(tmp_path)) as coordinator:
        output, _ = coordinator.communicate(timeout=300)
    assert output.split() == ["7"]
    assert not (tmp_path / ".ray").exists()


def test_a_folder_named_ray_without_ray(tmp_path):
    """The error says what to install, and what was found instead."""
    (tmp_path / "ray").mkdir()
    code = (
        "import sys, importlib.machinery as m\n"
        "class Finder(m.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return super().find_spec(name, ['.'] if name == 'ray' else path, target)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "import phalanx; phalanx.ParameterServerStrategy(workers=1)"
    )
    with process("-c", code, cwd=tmp_path) as coordinator:
        assert coordinator.wait(120) == 1
        text = errors_of(coordinator)
    assert (
        f"MissingDependencyError: parameter servers: their processes are Ray actors, and Ray is not installed: `import ray` finds {tmp_path}/ray"
        in text
    )
    assert 'HINT: pip install ".[ps]" in a clone of Phalanx' in text


def test_ray_was_imported_before():
    """Then it would let in everybody, and the error says what to set."""
    code = "import ray, phalanx; phalanx.ParameterServerStrategy()"
    with process("-c", code, RAY_AUTH_MODE=None) as coordinator:
        assert coordinator.wait(120) == 1
        assert 'HINT: os.environ["RAY_AUTH_MODE"] = "token" before `import ray`' in errors_of(coordinator)


@pytest.mark.exhaustive("test_a_lost_worker_is_one_line")
def test_ray_ends_what_needs_too_much_memory():
    """As its monitor does with everything at this threshold; the error is one of Phalanx."""
    code = "import phalanx; phalanx.ParameterServerStrategy(workers=1, ps=1)"
    settings = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    with process("-c", code, **settings) as coordinator:
        assert coordinator.wait(300) == 1
        text = errors_of(coordinator)
    assert "StartupError: the start of parameter server 0: it has died (Ray killed it because" in text


@contextmanager
def servers(spec, *tasks, token=TOKEN):
    """Processes of tasks of a cluster."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                process("-c", f"import phalanx; phalanx.Server({spec}, {job!r}, 0).join()", PHALANX_TOKEN=token)
            )
            for job in tasks
        ]


def chief_of(spec, script="coordinating.py", *arguments):
    config = json.dumps({"cluster": spec, "task": {"type": "chief", "index": 0}})
    return process(script, *arguments, TF_CONFIG=config, PHALANX_TOKEN=TOKEN)


@pytest.fixture
def spec():
    """A cluster on this machine."""
    return {job: [f"127.0.0.1:{port}"] for job, port in zip(("chief", "ps", "worker"), free_ports(3), strict=True)}


@pytest.mark.exhaustive("tests/guide/test_parameter_server_guide.py: the same by a cluster of TF_CONFIG")
def test_servers_from_tf_config(spec):
    """A worker and a server wait for the chief, work for it, and end with it; a task without its token is not let in."""
    with servers(spec, "worker", "ps") as tasks, chief_of(spec) as chief:
        assert said(chief)["count"] == 20
        family = [pid for one in (chief, *tasks) for pid in family_of(one.pid)]
        assert listening(family) == {"127.0.0.1"}
        with servers(spec, "worker", token="b" * 64) as (refused,):
            assert refused.wait(120) == 1
            text = errors_of(refused)
        assert "StartupError: PHALANX_TOKEN: the process that it connected to" in text
        assert "HINT: set the same PHALANX_TOKEN" in text
        tell(chief, "more")
        assert said(chief)["count"] == 40
        tell(chief, "close")
        assert said(chief) == "closed"
        for task in tasks:
            assert task.wait(120) == 0


@pytest.mark.exhaustive("tests/unit/cluster/connections/test_door.py: a chief that is killed says nothing")
def test_a_chief_that_is_killed(spec):
    """Its tasks fail, so that whoever started them starts them again."""
    with servers(spec, "worker", "ps") as tasks, chief_of(spec) as chief:
        said(chief)
        kill(chief.pid)
        for task in tasks:
            assert task.wait(120) == 1
            assert "PeerLostError: Server(" in (text := errors_of(task))
            assert "HINT: start this task again" in text


@pytest.mark.exhaustive("tests/guide/test_parameter_server_guide.py: a cluster that starts as it should")
def test_tasks_that_are_missing(spec):
    """The chief names them, with their addresses."""
    code = "import phalanx._src.strategies.parameter_server as p; p._START_S = 0.5; import coordinating; coordinating.main({})"
    with chief_of(spec, "-c", code) as chief:
        assert chief.wait(120) == 1
        missing = f"worker:0 ({spec['worker'][0]}), ps:0 ({spec['ps'][0]})"
        assert re.search(rf"these tasks have not joined within \d+ s: {re.escape(missing)}", errors_of(chief))


@pytest.mark.exhaustive("tests/guide/test_parameter_server_guide.py: a cluster that starts as it should")
def test_two_processes_with_one_index(spec):
    """The chief says which task has come twice."""
    with servers(spec, "worker", "worker"), chief_of(spec) as chief:
        assert chief.wait(300) != 0
        text = errors_of(chief)
    assert "two processes have joined as worker:0" in text
    assert "HINT: phalanx.Server(cluster_spec, job_name, task_index) with another task_index" in text


@pytest.mark.parametrize(
    ("jobs", "task", "why"),
    [
        ({"worker": ["a:1"], "ps": ["a:2"]}, "chief", "at least one chief.*HINT: .*chief"),
        ({"chief": ["a:1"], "worker": ["a:2"]}, "chief", "at least one parameter server.*HINT: .*chief"),
        ({"chief": ["a:1"], "ps": ["a:2"]}, "chief", "at least one worker.*HINT: .*chief"),
        (
            {"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"], "trainer": ["a:4"]},
            "chief",
            "not .'trainer'..*HINT: .*chief",
        ),
        (
            {"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]},
            "worker",
            r'task worker:0.*HINT: phalanx.Server\(cluster_spec, "worker", 0\)',
        ),
    ],
    ids=["no chief", "no ps", "no worker", "unknown job", "a worker"],
)
def test_clusters_that_are_no_clusters_of_parameter_servers(jobs, task, why):
    """They are refused before anything is started, and a worker does not coordinate: its script is told what to call."""
    with pytest.raises(ClusterError, match=rf"(?s){why}"):
        ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(jobs), task_type=task, task_id=0))


@pytest.mark.parametrize(
    ("jobs", "job", "index", "why"),
    [
        ({"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]}, "chief", 0, "job_name='chief'"),
        ({"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]}, "trainer", 0, "job_name='trainer'"),
        ({"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]}, "worker", 1, "1"),
        ({"ps": ["a:2"], "worker": ["a:3"]}, "worker", 0, "no chief"),
    ],
    ids=["chief", "unknown job", "no such task", "no chief"],
)
def test_servers_that_are_none(jobs, job, index, why):
    """A server is a worker or a parameter server of a cluster with a chief."""
    with pytest.raises(ClusterError, match=rf"(?s){why}.*HINT"):
        Server(jobs, job, index)


def test_server_names_the_address_where_nobody_listens(spec):
    """A server that waits in vain says for whom."""
    (chief,) = spec["chief"]
    server = Server(spec, "worker", 0)
    assert server.target == f"ray://{chief}"
    with pytest.raises(StartupError, match=rf"(?s)no process listens at the address of the chief, {chief}.*HINT"):
        server.join(timeout_s=0.1)
