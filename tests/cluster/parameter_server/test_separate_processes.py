"""Coordinators, and servers from TF_CONFIG, as processes of their own."""

import json
import re
import signal
import socket
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import end, family_of, is_there, listening, process, said, tell, wait_until

from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import ClusterError, StartupError
from phalanx.launch.plan import free_ports
from phalanx.servers.ray import Server
from phalanx.strategies.parameter_server import ParameterServerStrategy

SERVE = "import phalanx; phalanx.Server({spec}, {job!r}, {index}).join(timeout_s=60)"


def test_all_processes_end_with_close():
    """Workers, servers, and those of Ray, which no other machine can reach."""
    with process("coordinating.py", 2, 1) as coordinator:
        report = said(coordinator)
        assert report["count"] == 20
        family = family_of(coordinator.pid)
        assert set(report["pids"]) <= set(family)
        assert len(report["pids"]) == 3
        assert listening(family) == {"127.0.0.1"}
        tell(coordinator, "close")
        assert said(coordinator) == "closed"
        wait_until(lambda: not any(map(is_there, family[1:])))


def test_all_processes_end_with_a_killed_coordinator():
    """Ray's own agents included, and with them the files, which only this user could read."""
    root = tempfile.mkdtemp(dir="/tmp")
    with process("coordinating.py", 1, 1, RAY_TMPDIR=root) as coordinator:
        said(coordinator)
        (folder,) = Path(root).iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.glob("ray/session_*"))
        family = family_of(coordinator.pid)
        assert len(family) > 8
        end(coordinator.pid)
        wait_until(lambda: not any(map(is_there, family[1:])), deadline_s=20.0)
        wait_until(lambda: not folder.exists())
        Path(root).rmdir()


def test_a_lost_worker_is_one_line():
    """That of the coordinator: Ray's own paragraphs, on its output, are left out."""
    with process("coordinating.py", 1, 1) as coordinator:
        end(said(coordinator)["pids"][0])
        tell(coordinator, "more")
        assert said(coordinator)["count"] >= 40
        tell(coordinator, "close")
        assert said(coordinator) == "closed"
        output, _ = coordinator.communicate(timeout=60)
        assert output == ""
        coordinator.log.seek(0)
        lines = [line for line in coordinator.log.read().splitlines() if "waiting for" not in line]
        assert lines == ["worker:0 was lost. A new worker starts in its place and runs its steps again."]


def test_sigterm_of_a_coordinator():
    """Its `finally` blocks run, all processes end, and nothing is printed of Ray's or absl's."""
    code = "import json, sys, coordinating\ntry: coordinating.main({'workers': 1, 'ps': 1})\nfinally: print(json.dumps('finally'), flush=True)"
    with process("-c", code) as coordinator:
        said(coordinator)
        family = family_of(coordinator.pid)
        end(coordinator.pid, signal.SIGTERM)
        assert said(coordinator) == "finally"
        assert coordinator.wait(60) == 128 + signal.SIGTERM
        assert not any(map(is_there, family[1:]))
        coordinator.log.seek(0)
        assert "SIGTERM" not in coordinator.log.read()


def test_a_handler_of_sigterm_stays():
    """What the script has set before the strategy is called."""
    code = (
        "import json, signal, sys, coordinating\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print(json.dumps('told'), flush=True), sys.exit(3)))\n"
        "coordinating.main({'workers': 1, 'ps': 1})"
    )
    with process("-c", code) as coordinator:
        said(coordinator)
        end(coordinator.pid, signal.SIGTERM)
        assert said(coordinator) == "told"
        assert coordinator.wait(60) == 3


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
        "            if name == 'raylet': return os.kill(pid, signal.SIGSTOP)\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "coordinating.main({'workers': 1, 'ps': 1})\n"
    )
    with process("-c", code) as coordinator:
        assert said(coordinator)["count"] == 20
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in family_of(coordinator.pid)]
        assert names.count("raylet") == 1


def test_an_address_that_is_taken():
    """The chief cannot listen there: a typed error, and not Ray's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = {"chief": [f"127.0.0.1:{taken.getsockname()[1]}"], "worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
        config = json.dumps({"cluster": spec, "task": {"type": "chief", "index": 0}})
        with process("-c", "import coordinating; coordinating.main({})", TF_CONFIG=config) as chief:
            assert chief.wait(120) == 1
            chief.log.seek(0)
            text = chief.log.read()
    assert "StartupError: starting Ray at 127.0.0.1" in text
    assert "HINT: " in text


def test_a_folder_named_ray(tmp_path):
    """It does no harm where Ray is installed."""
    (tmp_path / "ray").mkdir()
    code = (
        "import sys, phalanx\nstrategy = phalanx.ParameterServerStrategy(workers=1)\n"
        "coordinator = phalanx.coordinator.ClusterCoordinator(strategy)\n"
        "print(coordinator.schedule(lambda: 7).fetch())"
    )
    with process("-c", code, cwd=tmp_path) as coordinator:
        output, _ = coordinator.communicate(timeout=120)
    assert output.split() == ["7"]


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
        assert coordinator.wait(60) == 1
        coordinator.log.seek(0)
        text = coordinator.log.read()
    assert (
        f"MissingDependencyError: parameter servers: their processes are Ray actors, and Ray is not installed: `import ray` finds {tmp_path}/ray"
        in text
    )
    assert 'HINT: pip install ".[ps]" in a clone of Phalanx' in text


def test_a_token_that_others_could_read(tmp_path):
    """The file that Ray makes for everybody is closed; one that is missing is made so."""
    for path in (tmp_path / "old", tmp_path / "new"):
        path.mkdir()
    (tmp_path / "old" / ".ray").mkdir()
    token = tmp_path / "old" / ".ray" / "auth_token"
    token.write_text("c" * 64)
    token.chmod(0o644)
    code = "import phalanx; phalanx.ParameterServerStrategy(workers=1)"
    for home in ("old", "new"):
        with process("-c", code, HOME=str(tmp_path / home)) as coordinator:
            assert coordinator.wait(120) == 0
        assert (tmp_path / home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert token.read_text() == "c" * 64


@contextmanager
def servers(spec, tokens, tasks=None):
    """Processes of the tasks of a cluster but for the chief, or of some; `tokens` of each."""
    tasks = tasks or [(job, i) for job in ("worker", "ps") for i in range(len(spec[job]))]
    with tempfile.TemporaryDirectory() as home:
        started = {}
        with ExitStack() as stack:
            for task, token in zip(tasks, tokens, strict=True):
                code = SERVE.format(spec=spec, job=task[0], index=task[1])
                started[task] = stack.enter_context(process("-c", code, RAY_AUTH_TOKEN=token, HOME=home))
            yield started


def cluster(workers):
    """A cluster on this machine, and the TF_CONFIG of its chief."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers + 2)]
    spec = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    return spec, json.dumps({"cluster": spec, "task": {"type": "chief", "index": 0}})


def test_servers_from_tf_config():
    """Two workers and a server wait for the chief, work for it, and end with it; a task without its token is not let in."""
    spec, chief_config = cluster(2)
    token = "a" * 64
    with (
        servers(spec, [token] * 3) as tasks,
        process("coordinating.py", TF_CONFIG=chief_config, RAY_AUTH_TOKEN=token) as chief,
    ):
        assert said(chief)["count"] == 20
        with servers(spec, ["b" * 64], tasks=[("worker", 0)]) as others:
            refused = others["worker", 0]
            assert refused.wait(90) == 1
            refused.log.seek(0)
            text = refused.log.read()
        assert "StartupError: Server(worker:0).join()" in text
        assert "HINT: the same RAY_AUTH_TOKEN" in text
        tell(chief, "more")
        assert said(chief)["count"] == 40
        tell(chief, "close")
        assert said(chief) == "closed"
        for task in tasks.values():
            assert task.wait(60) == 0


def test_tasks_that_are_missing():
    """The chief names them, with their addresses."""
    spec, chief_config = cluster(1)
    code = (
        "import phalanx.strategies.parameter_server as p; p._START_S = 0.5; import coordinating; coordinating.main({})"
    )
    with process("-c", code, TF_CONFIG=chief_config, RAY_AUTH_TOKEN="a" * 64) as chief:
        assert chief.wait(90) == 1
        chief.log.seek(0)
        missing = f"worker:0 ({spec['worker'][0]}), ps:0 ({spec['ps'][0]})"
        assert re.search(rf"these tasks have not joined within \d+ s: {re.escape(missing)}", chief.log.read())


def test_ray_was_imported_before(monkeypatch):
    """Then it would let in everybody, and the error says what to set."""
    monkeypatch.delenv("RAY_AUTH_MODE")
    with process("-c", "import ray, phalanx; phalanx.ParameterServerStrategy()") as coordinator:
        assert coordinator.wait(90) == 1
        coordinator.log.seek(0)
        assert 'HINT: os.environ["RAY_AUTH_MODE"] = "token" before `import ray`' in coordinator.log.read()


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ({"worker": ["a:1"], "ps": ["a:2"]}, "at least one chief"),
        ({"chief": ["a:1"], "worker": ["a:2"]}, "at least one parameter server"),
        ({"chief": ["a:1"], "ps": ["a:2"]}, "at least one worker"),
        ({"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"], "trainer": ["a:4"]}, "not .'trainer'."),
    ],
    ids=["no chief", "no ps", "no worker", "unknown job"],
)
def test_clusters_that_are_no_clusters_of_parameter_servers(jobs, why):
    """They are refused before anything is started."""
    with pytest.raises(ClusterError, match=rf"(?s){why}.*HINT: .*chief"):
        ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(jobs), task_type="chief", task_id=0))


def test_two_processes_with_one_index():
    """The chief says which task has come twice."""
    spec, chief_config = cluster(2)
    with (
        servers(spec, ["a" * 64] * 3, tasks=[("worker", 0), ("worker", 0), ("ps", 0)]),
        process("coordinating.py", TF_CONFIG=chief_config, RAY_AUTH_TOKEN="a" * 64) as chief,
    ):
        assert chief.wait(180) != 0
        chief.log.seek(0)
        text = chief.log.read()
        assert "two processes have joined as worker:0" in text
        assert "HINT: phalanx.Server(cluster_spec, job_name, task_index) with another task_index" in text


def test_a_worker_does_not_coordinate():
    """A worker's script is told what to call."""
    spec = ClusterSpec({"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]})
    with pytest.raises(ClusterError, match=r'(?s)task worker:0.*HINT: phalanx.Server\(cluster_spec, "worker", 0\)'):
        ParameterServerStrategy(SimpleClusterResolver(spec, task_type="worker", task_id=0))


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


def test_server_names_the_address_where_nobody_listens():
    """A server that waits in vain says for whom."""
    chief, own, ps = (f"127.0.0.1:{port}" for port in free_ports(3))
    server = Server({"chief": [chief], "worker": [own], "ps": [ps]}, "worker", 0)
    assert server.target == f"ray://{chief}"
    with pytest.raises(StartupError, match=rf"(?s)no process listens at the address of the chief, {chief}.*HINT"):
        server.join(timeout_s=0.5)


def test_ray_ends_what_needs_too_much_memory():
    """As its monitor does with everything at this threshold; the error is one of Phalanx."""
    code = "import phalanx; phalanx.ParameterServerStrategy(workers=1, ps=1)"
    settings = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    with process("-c", code, **settings) as coordinator:
        assert coordinator.wait(240) == 1
        coordinator.log.seek(0)
        text = coordinator.log.read()
    assert "StartupError: the start of parameter server 0: it has died (Ray killed it because" in text
