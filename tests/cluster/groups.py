"""Groups of every kind on two machines, as a user starts them, and the ports of their processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from launching import RUN, environment, script
from tests import forks
from tests.waiting import DEADLINE_S

from phalanx.testing import VirtualNetwork

HOSTS = VirtualNetwork.addresses
BETWEEN = ("machines", "elastic machines", "tasks")
"""The kinds whose processes are on two machines."""
OF_RAY = ("servers", "tasks")

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
    is_over = np.float32(Path(sys.argv[1]).exists())
    over = float(step(strategy.experimental_distribute_values_from_function(lambda _: is_over)))
    steps += 1
    time.sleep(0.01)
    if steps == 20:
        print("trains", flush=True)
print("right" if float(total.value) == 2.0 * steps else f"wrong: {float(total.value)}, {steps}", flush=True)
"""

SERVERS = """
import sys
from pathlib import Path
import keras
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
    y = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(features)
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


class Command(NamedTuple):
    """What a user starts on a machine."""

    machine: int
    words: list
    variables: dict


def commands(kind, train, stop):
    """The commands of a group, whose training ends when the file `stop` exists."""
    elastic = ["-m", "phalanx", "run", "--in-cluster", "--workers", "2:2"]
    workers = {"worker": [f"{host}:7001" for host in HOSTS]}
    servers = {"chief": [f"{HOSTS[0]}:7001"], "ps": [f"{HOSTS[0]}:7002"], "worker": [f"{HOSTS[1]}:7001"]}
    match kind:
        case "fixed":
            return [Command(0, [*RUN, "2", train, stop], {})]
        case "elastic":
            return [Command(0, [*RUN, "2:2", train, stop], {})]
        case "estimator":
            return [Command(0, [*RUN, "2", "--evaluator", train, stop], {})]
        case "machines":
            return [Command(index, [train, stop], task(workers, "worker", index)) for index in (0, 1)]
        case "elastic machines":
            return [Command(index, [*elastic, train, stop], task(workers, "worker", index)) for index in (0, 1)]
        case "servers":
            return [Command(0, [train, stop, "{'workers': 1, 'ps': 1}"], {})]
        case "tasks":
            chief = Command(0, [train, stop, "{}"], task(servers, "chief", 0))
            serve = ["-c", SERVER, repr(servers)]
            return [chief, Command(0, [*serve, "ps"], {}), Command(1, [*serve, "worker"], {})]


def task(cluster, kind, index):
    """The environment of one task of a cluster."""
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


class Program:
    """A process, and what it has printed. It is killed at the end, with all that descend from it."""

    def __init__(self, command, **options):
        self.out = ""
        self.process = forks.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.out += line

    def end(self):
        """Waits for the end, and returns the exit code."""
        self.process.wait(DEADLINE_S)
        self._reader.join()
        return self.process.returncode

    def family(self):
        """The processes that run: it, and all that descend from it."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            return [first.pid, *(each.pid for each in first.children(recursive=True))]
        return []


class Group:
    """A group of a kind.

    Args:
      stack: ends it.
      machines: the machines.
      kind: the kind.
      folder: an empty folder.
    """

    def __init__(self, stack, machines, kind, folder):
        self.kind, self.machines, self.stop = kind, machines, folder / "stop"
        self.trainers = 1 if kind in OF_RAY else 2
        train = script(folder, SERVERS if kind in OF_RAY else ESTIMATOR if kind == "estimator" else WORKERS)
        secret = {"PHALANX_TOKEN": "a token of this cluster " * 2, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._programs = []
        for machine, words, variables in commands(kind, train, self.stop):
            command = machines.command(machine, [sys.executable, *map(str, words)])
            program = Program(command, env=environment(**secret, **variables), cwd=folder)
            self._programs.append(stack.enter_context(program))

    @property
    def out(self):
        """What all processes have printed."""
        return "".join(program.out for program in self._programs)

    def trains(self):
        """Waits until all train. Returns whether they do: a process may end before that."""
        until_s = time.monotonic() + DEADLINE_S
        while self.out.count("trains") < self.trainers:
            if any(program.process.poll() is not None for program in self._programs):
                return False
            assert time.monotonic() < until_s, self.out
            time.sleep(0.02)
        return True

    def ends_well(self):
        """Lets the training end. Returns whether the weights are right and all codes 0."""
        self.stop.touch()
        return {program.end() for program in self._programs} == {0} and self.out.count("right") == self.trainers

    def peaks(self):
        """The most memory that a process of each role has had, in bytes."""
        peaks = {}
        for pid, role in self._roles():
            with suppress(OSError, TypeError):  # It may end.
                peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
                peaks[role] = max(peak, peaks.get(role, 0))
        return peaks

    def listeners(self):
        """The role of a process, the address and the port of each socket that listens."""
        sockets = {inode: (host, port) for host, port, inode in self.machines.listening()}
        for pid, role in self._roles():
            for inode in _inodes(pid) & {*sockets}:
                yield role, *sockets[inode]

    def _roles(self):
        for program in self._programs:
            for pid in program.family():
                with suppress(OSError):
                    yield pid, self._role(Path(f"/proc/{pid}/cmdline").read_bytes())

    def _role(self, line):
        if self.kind in OF_RAY:
            return "Ray"
        return "service" if b"runtime.coordination" in line else "launcher" if b"phalanx\0run" in line else "worker"


def _inodes(pid):
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes |= {int(inode) for inode in re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry))}
    return inodes
