"""Strangers at every port of every kind of group, before, during and after its start; and the ports that each kind opens.

Another user of the machine, and another machine, do what they can. Needs root, for both: the machines are network namespaces.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import strangers
from launching import RUN, environment, script
from tests import forks
from tests.waiting import DEADLINE_S, wait_until

from phalanx.errors import StartupError
from phalanx.testing import VirtualNetwork

TOKEN = "a token of this cluster " * 2
HOSTS = VirtualNetwork.addresses
STRANGE, NEXT_TO = "198.51.100.9", "198.51.100.1"
MOST_GROWTH = 50 << 20
PAGE = Path(__file__).parents[2] / "docs" / "security.md"

WORKERS = """
import sys, time
from pathlib import Path
import keras, numpy as np
import phalanx
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = keras.Variable(0.0, aggregation="sum")
def add(is_over):
    total.assign_add(1.0)
    return is_over
@phalanx.function
def step(is_over):
    return strategy.reduce("SUM", strategy.run(add, args=(is_over,)), axis=None)
steps, over = 0, 0.0
while over < 2:
    found = np.float32(Path(sys.argv[1]).exists())
    over = float(step(strategy.experimental_distribute_values_from_function(lambda _: found)))
    steps += 1
    time.sleep(0.01)
    if steps == 20:
        print("trains", flush=True)
print("right" if float(total.value) == 2.0 * steps else f"wrong: {float(total.value)}, {steps}", flush=True)
"""

SERVERS = """
import sys
from pathlib import Path
import keras, numpy as np
import phalanx
strategy = phalanx.ParameterServerStrategy(**eval(sys.argv[2]))
coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = keras.Variable(0.0, aggregation="sum")
def step():
    total.assign_add(1.0)
steps = 0
while not Path(sys.argv[1]).exists():
    for _ in range(10):
        coordinator.schedule(step)
    coordinator.join()
    steps += 10
    if steps == 20:
        print("trains", flush=True)
print("right" if float(total.value) == steps else f"wrong: {float(total.value)}, {steps}", flush=True)
strategy.close()
"""
SERVER = "import sys, phalanx; phalanx.Server(eval(sys.argv[1]), sys.argv[2], 0).join()"

ESTIMATOR = """
import sys, time
from pathlib import Path
import keras, numpy as np
import phalanx
import phalanx.estimator as estimator
stop = Path(sys.argv[1])
def model_fn(features, labels, mode):
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    y = weight(features)
    loss = keras.ops.mean(y)
    return estimator.EstimatorSpec(mode, predictions=y, loss=loss, train_op=estimator.minimize(keras.optimizers.SGD(0.5), loss))
class Waits(estimator.SessionRunHook):
    def after_run(self, run_context, run_values):
        if run_context.session.step == 20:
            print("trains", flush=True)
            while not stop.exists():
                time.sleep(0.01)
config = estimator.RunConfig(stop.with_name("model"))
rows = lambda: iter([(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))] * 100)
estimator.train_and_evaluate(
    estimator.Estimator(model_fn, config=config),
    estimator.TrainSpec(rows, max_steps=40, hooks=[Waits()]),
    estimator.EvalSpec(rows, steps=1, start_delay_secs=0, throttle_secs=0),
)
if config.task_type != "evaluator":
    last = phalanx.train.load_checkpoint(stop.with_name("model") / "model.ckpt-40")
    (name,) = [each for each in last.get_variable_to_shape_map() if "kernel" in each and "optimizer" not in each]
    print("right" if np.allclose(last.get_tensor(name), -20.0) else f"wrong: {last.get_tensor(name)}", flush=True)
"""

SPEC = {"chief": [f"{HOSTS[0]}:7001"], "ps": [f"{HOSTS[0]}:7002"], "worker": [f"{HOSTS[1]}:7001"]}


def task(index):
    """The environment of one of two workers on two machines."""
    cluster = {"worker": [f"{host}:7001" for host in HOSTS]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}


def commands(kind, stop, folder):
    """Yields the machine, the arguments and the environment of each process that a user starts."""
    train = script(folder, {"servers": SERVERS, "tasks": SERVERS, "estimator": ESTIMATOR}.get(kind, WORKERS))
    match kind:
        case "fixed":
            yield 0, [*RUN, "2", train, stop], {}
        case "elastic":
            yield 0, [*RUN, "2:2", train, stop], {}
        case "estimator":
            yield 0, [*RUN, "2", "--evaluator", train, stop], {}
        case "machines":
            for index in (0, 1):
                yield index, [train, stop], task(index)
        case "elastic machines":
            for index in (0, 1):
                yield index, ["-m", "phalanx", "run", "--in-cluster", "--workers", "2:2", train, stop], task(index)
        case "servers":
            yield 0, [train, stop, "{'workers': 1, 'ps': 1}"], {}
        case "tasks":
            chief = {"TF_CONFIG": json.dumps({"cluster": SPEC, "task": {"type": "chief", "index": 0}})}
            yield 0, [train, stop, "{}"], chief
            for machine, job in ((0, "ps"), (1, "worker")):
                yield machine, ["-c", SERVER, repr(SPEC), job], {}


HANDSHAKE, SERVICE, APART, GLOO, RENDEZVOUS, RENDEZVOUS_APART = (
    "Phalanx's handshake in worker 0",
    "JAX's coordination service in worker 0",
    "JAX's coordination service in a separate process",
    "gloo, on CPUs",
    "the rendezvous in `phalanx run`",
    "the rendezvous in `phalanx run` on the first machine",
)
"""Who listens, as docs/security.md says it."""
HERE, FIRST, SECOND, ALL = "127.0.0.1", *HOSTS, "0.0.0.0"

LISTENS = {
    "fixed": {(GLOO, HERE): 2},
    "estimator": {(GLOO, HERE): 2},
    "elastic": {(GLOO, HERE): 2, (RENDEZVOUS, HERE): 1},
    "machines": {(GLOO, FIRST): 1, (GLOO, SECOND): 1, (SERVICE, FIRST): 1},
    "elastic machines": {(GLOO, FIRST): 1, (GLOO, SECOND): 1, (APART, FIRST): 1, (RENDEZVOUS_APART, FIRST): 1},
    "servers": {("Ray", HERE): None},
    "tasks": {("Ray", ALL): None, ("Ray", HERE): None, ("Ray", FIRST): None, ("Ray", SECOND): None},
}
"""Who listens where in a group that trains: how often, or any number of times."""
KINDS = tuple(LISTENS)
BETWEEN = ("machines", "elastic machines", "tasks")


class Job:
    """A group whose processes run on two machines, and what they print."""

    def __init__(self, stack, network, kind, folder):
        self.kind, self.folder, self.stop, self.out = kind, folder, folder / "stop", ""
        self.processes = []
        for machine, words, variables in commands(kind, self.stop, folder):
            given = environment(PHALANX_TOKEN=TOKEN, PYTHONPATH=os.pathsep.join(sys.path), **variables)
            process = forks.Popen(
                network.command(machine, [sys.executable, *map(str, words)]),
                env=given,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            stack.callback(self._end, process)
            self.processes.append(process)
        self._readers = [threading.Thread(target=self._read, args=(p,), daemon=True) for p in self.processes]
        for reader in self._readers:
            reader.start()
        self.trainers = 1 if kind in ("servers", "tasks") else 2

    def _read(self, process):
        with process.stdout:
            for line in process.stdout:
                self.out += line

    def _end(self, process):
        for pid in self.family([process]):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()

    def family(self, processes=None):
        """The processes that run, and all that descend from them."""
        found = []
        for process in processes or self.processes:
            with suppress(psutil.NoSuchProcess):
                found += [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        return found

    def trains(self):
        """Waits until all train. Returns whether they do: a process may end before that."""
        until_s = time.monotonic() + DEADLINE_S
        while self.out.count("trains") < self.trainers:
            if self.has_ended:
                return False
            assert time.monotonic() < until_s, self.out
            time.sleep(0.02)
        return True

    @property
    def has_ended(self):
        return any(process.poll() for process in self.processes) or self.processes[0].poll() is not None

    def end(self):
        """Lets the training end. Returns the exit codes of what trains or launches."""
        self.stop.touch()
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.wait(DEADLINE_S)
            reader.join()
        return {process.returncode for process in self.processes}

    def peaks(self):
        """The most memory that a process of each role has had, in bytes."""
        peaks = {}
        for pid in self.family():
            with suppress(OSError, TypeError):
                status = Path(f"/proc/{pid}/status").read_text()
                peak, role = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]), self.role(pid)
                peaks[role] = max(peak, peaks.get(role, 0))
        return peaks

    def role(self, pid):
        """What a process is, by its command line."""
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if self.kind in ("servers", "tasks"):
            return "Ray"
        if "runtime.coordination" in line:
            return "service"
        return "launcher" if "phalanx run" in line else "worker"

    def listeners(self):
        """Who listens where, in the words of the page, and the ports."""
        found, ports = Counter(), set()
        for pid in self.family():
            with suppress(OSError):
                role = self.role(pid)
                for host, port in strangers.ports_of(pid):
                    ports.add(port)
                    rendezvous = RENDEZVOUS if self.kind == "elastic" else RENDEZVOUS_APART
                    who = {"Ray": "Ray", "service": APART, "launcher": rendezvous}.get(role)
                    found[who or (SERVICE if port == 7001 else GLOO), host] += 1
        return found, ports


@pytest.fixture(scope="module")
def network():
    """Two machines, and a third one, from which both can be reached."""
    if sys.platform != "linux" or os.getuid() or not shutil.which("setpriv"):
        pytest.skip("needs root, to be another user and another machine")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(VirtualNetwork())
        except StartupError as e:
            pytest.skip(f"{e}")
        third = f"phalanx{os.getpid()}c"
        subprocess.run(["ip", "netns", "add", third], check=True)
        stack.callback(subprocess.run, ["ip", "netns", "del", third], check=False)
        first, second = (network.command(machine, [])[3] for machine in (0, 1))
        for words in (
            f"ip link add third netns {first} type veth peer name third netns {third}",
            f"ip -n {first} addr add {NEXT_TO}/24 dev third",
            f"ip -n {third} addr add {STRANGE}/24 dev third",
            f"ip -n {first} link set third up",
            f"ip -n {third} link set third up",
            f"ip -n {third} route add 192.0.2.0/24 via {NEXT_TO}",
            f"ip -n {second} route add 198.51.100.0/24 via {HOSTS[0]}",
            f"ip netns exec {first} sysctl -qw net.ipv4.ip_forward=1",
        ):
            subprocess.run(words.split(" "), check=True)
        network.third = third
        yield network


class Stranger:
    """A process of a stranger: it does a deed at each port that it sees, on the machines of the group."""

    def __init__(self, stack, network, who, deed, machine):
        source = Path(strangers.__file__).read_text()
        # It sees the ports as a user of the machine does; what they are is known to another machine too, which scans them.
        holder = stack.enter_context(subprocess.Popen(network.command(machine, ["sleep", "1000"])))
        stack.callback(holder.kill)
        wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        program = ["/usr/bin/env", "python3", "-c", source, deed, f"/proc/{holder.pid}/net"]
        user = ["setpriv", "--reuid=65534", "--clear-groups", *program, ""]
        words = (
            network.command(machine, user)
            if who == "user"
            else ["ip", "netns", "exec", network.third, *program, HOSTS[machine]]
        )
        self.process = forks.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.out = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stdout:
            for line in self.process.stdout:
                self.out += line

    @property
    def been_at(self):
        return {int(port) for port in re.findall(r"been at (\d+)", self.out)}


@pytest.fixture(scope="module")
def quiet(network, tmp_path_factory):
    """A function that returns the listeners of a kind of group without strangers, and the memory of its processes. Each runs once."""
    known = {}

    def run(kind):
        if kind not in known:
            with ExitStack() as stack:
                job = Job(stack, network, kind, tmp_path_factory.mktemp(kind.replace(" ", "_")))
                assert job.trains(), job.out
                time.sleep(1.0)
                known[kind] = job.listeners()[0], job.peaks()
                codes = job.end()
                assert codes == {0}, job.out
                assert job.out.count("right") == job.trainers, job.out
        return known[kind]

    return run


@pytest.mark.cover(["kind"], {"elastic"})
@pytest.mark.parametrize("kind", KINDS)
def test_ports_are_those_of_the_page(quiet, kind):
    """No other process listens, none at another address, and docs/security.md has a row for each."""
    found, _ = quiet(kind)
    expected = LISTENS[kind]
    assert set(found) <= set(expected), found
    assert {who: found[who] for who, count in expected.items() if count} == {w: c for w, c in expected.items() if c}
    page = PAGE.read_text()
    for who, _ in found:
        assert f"| {who} |" in page or (who == "Ray" and "## Parameter servers" in page)


def test_page_has_no_other_ports():
    """Each row of its table of ports is one of a kind of group that this file starts."""
    section = PAGE.read_text().partition("## Several workers")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    known = {HANDSHAKE, *(who for kind in LISTENS.values() for who, _ in kind)}
    assert {row for row in rows if row.strip("-| ")} <= known


CELLS = [("user", kind) for kind in KINDS] + [("machine", kind) for kind in BETWEEN]


@pytest.mark.cover(["who", "kind", "deed"], {("machine", "machines", "ranks")})
@pytest.mark.parametrize("deed", strangers.DEEDS)
@pytest.mark.parametrize(("who", "kind"), CELLS)
def test_strangers_have_no_effect(network, quiet, tmp_path, who, kind, deed):
    """The training ends with the right weights and code 0, in as much memory. What the page lists may end its start, with an error that names them."""
    _, usual = quiet(kind)
    machines = (0, 1) if kind in BETWEEN else (0,)
    for from_before in (True, False):
        folder = tmp_path / f"{from_before}"
        folder.mkdir()
        with ExitStack() as stack:
            for machine in machines if from_before else ():
                Stranger(stack, network, who, deed, machine)
            job = Job(stack, network, kind, folder)
            if from_before and not job.trains():
                # Users of the machines may be at gloo's ports before the workers.
                assert who == "user", job.out
                assert "StartupError" in job.out, job.out
                assert "strangers had connected to its port before the other processes, from " in job.out, job.out
                continue
            assert job.trains(), job.out
            after = [Stranger(stack, network, who, deed, machine) for machine in machines]
            _, ports = job.listeners()
            wait_until(lambda: set.union(*(each.been_at for each in after)) >= ports or who == "machine")
            if who == "machine":
                wait_until(lambda: all(each.been_at for each in after))
            # The processes look at their connections once per second.
            time.sleep(3.0)
            peaks = job.peaks()
            codes = job.end()
        assert codes == {0}, job.out
        assert job.out.count("right") == job.trainers, job.out
        assert {role for role, peak in peaks.items() if peak > usual[role] + MOST_GROWTH} == set(), (peaks, usual)
        if who == "user" and deed in ("stay", "half", "crowd") and kind not in ("servers", "tasks"):
            assert "Strangers have connected to " in job.out, job.out
        return
