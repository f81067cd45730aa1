"""A real Slurm with three nodes on this machine: a network namespace with an own host name for each. Needs root."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NODES = ("node1", "node2", "node3")
NETWORK = "10.77.0"
CORES = 8
"""Of each node, whatever this machine has: nobody is bound to them."""
DEADLINE_S = 600
# KillWait and SlurmdTimeout are shorter than usual, and a requeued job starts again once its credential is old.
CONF = """\
ClusterName=phalanx
SlurmctldHost=controller({network}.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=20
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Slurm:
    """The controller, a munge daemon, and one slurmd per node.

    Args:
      folder: holds the configuration, the state and the logs.
    """

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        self.environment = {
            **os.environ,
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_PLATFORMS": "cpu",
            "PHALANX_START_TIMEOUT_S": "60",
        }
        self.environment.pop("PHALANX_TOKEN", None)

    def start(self):
        nodes = [
            f"NodeName={node} NodeAddr={NETWORK}.1{i} CPUs={CORES} CoresPerSocket={CORES}"
            for i, node in enumerate(NODES, start=1)
        ]
        (self.folder / "slurm.conf").write_text(
            CONF.format(folder=self.folder, network=NETWORK, nodes="\n".join(nodes))
        )
        hosts = [f"{NETWORK}.1{i} {node}" for i, node in enumerate(NODES, start=1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{NETWORK}.1 controller", *hosts, ""]))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        self._join_namespaces()
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        wait_until((self.folder / "munge.socket").exists)
        self._daemon(*self._as_host("controller", "slurmctld -D"))
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def _join_namespaces(self):
        run("ip", "link", "add", "phalanxslurm", "type", "bridge")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "phalanxslurm")
        run("ip", "link", "set", "phalanxslurm", "up")
        for i, node in enumerate(NODES, start=1):
            run("ip", "netns", "add", f"slurm-{node}")
            run("ip", "link", "add", f"slurm{i}", "type", "veth", "peer", "eth0", "netns", f"slurm-{node}")
            run("ip", "link", "set", f"slurm{i}", "master", "phalanxslurm", "up")
            run("ip", "-n", f"slurm-{node}", "addr", "add", f"{NETWORK}.1{i}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                run("ip", "-n", f"slurm-{node}", "link", "set", interface, "up")

    def _as_host(self, name, command):
        """Returns a command that runs another one on a machine of this name, with the hosts of the cluster."""
        script = f"mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec {command}"
        return ["unshare", "--mount", "--uts", "sh", "-c", script]

    def _daemon(self, *words):
        with open(self.folder / "daemons.log", "ab") as log:
            process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.daemons.append(process)

    def start_node(self, node):
        """Starts the slurmd of a node."""
        # Not `ip netns exec`, which hides /sys/fs/cgroup.
        network = ["nsenter", f"--net=/run/netns/slurm-{node}"]
        self._daemon(*network, *self._as_host(node, f"slurmd -D -N {node}"))

    @contextmanager
    def without(self, node):
        """Kills all processes of a node at once, and starts its slurmd again at the end."""
        self._kill(node)
        try:
            yield
        finally:
            self.start_node(node)

    def _kill(self, node):
        for pid in run("ip", "netns", "pids", f"slurm-{node}").split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def wait_for_nodes(self):
        """Waits until all nodes are there and have nothing to do."""
        wait_until(lambda: self("sinfo", "--noheader", "--format=%D %t") == f"{len(NODES)} idle")

    def stop(self):
        for node in NODES:
            with suppress(subprocess.CalledProcessError):
                self._kill(node)
                run("ip", "netns", "del", f"slurm-{node}")
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", "phalanxslurm")

    def __call__(self, *words, folder=None, script=None, **variables):
        """Runs a command of Slurm, and returns its output."""
        environment = {**self.environment, **variables}
        return run(*words, env=environment, cwd=folder or self.folder, input=script)


class Job:
    """A job that was submitted.

    Args:
      slurm: the cluster.
      number: the number of the job.
      output: the file with its output.
    """

    def __init__(self, slurm, number, output):
        self.slurm, self.number, self.output = slurm, number, output

    @property
    def text(self):
        """What it has written by now."""
        return self.output.read_text() if self.output.exists() else ""

    def show(self, name):
        """Returns a field of the job, such as JobState."""
        found = re.search(rf"\b{name}=(\S*)", self.slurm("scontrol", "show", "job", self.number))
        return found.group(1)

    def wait_for_text(self, pattern, count=1):
        self._wait(lambda: len(re.findall(pattern, self.text)) >= count, pattern)

    def wait_for_state(self, *states):
        self._wait(lambda: self.show("JobState") in states, " or ".join(states))
        return self.show("JobState")

    def _wait(self, is_so, what):
        try:
            wait_until(is_so)
        except TimeoutError:
            pytest.fail(f"no {what}: {self.slurm('scontrol', 'show', 'job', self.number)}\n{self.text}")


def run(*words, **options):
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **options).stdout.strip()


def wait_until(is_so):
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.2)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if not os.environ.get("PHALANX_TEST_SLURM"):
        pytest.skip("make test-slurm")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits the script that `phalanx run --print slurm` writes, with options of sbatch and variables. It is cancelled at the end."""
    jobs = []

    def submit(source, run_options, sbatch_options=(), **variables):
        (tmp_path / "train.py").write_text(source)
        script = slurm("phalanx", "run", *run_options, "--print", "slurm", "train.py", folder=tmp_path)
        output = tmp_path / f"output{len(jobs)}"
        words = ["sbatch", "--parsable", f"--output={output}", *sbatch_options]
        number = slurm(*words, folder=tmp_path, script=script + "\n", **variables)
        jobs.append(Job(slurm, number, output))
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm("scancel", job.number)
    slurm.wait_for_nodes()
