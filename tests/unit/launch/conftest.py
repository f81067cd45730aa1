"""A launcher in this process, workers that are small scripts, and police against processes that are left."""

import os
import secrets
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phalanx._src.launch.elastic import rendezvous
from phalanx._src.launch.outcome import Outcome
from phalanx._src.launch.output import Sink
from phalanx._src.launch.plan import Machine, Request, free_ports, plan
from phalanx._src.launch.supervise import run_group

# Of this process, whose pytest has set them for JAX.
_OF_THIS_PROCESS = ("NPROC", "PHALANX_CPU_DEVICES", "XLA_FLAGS", "TF_CONFIG", "CUDA_VISIBLE_DEVICES")
_DEADLINE_S = 600

_PRELUDE = """\
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
here = Path(__file__).parent
job, rank = json.loads(os.environ["TF_CONFIG"])["task"].values()
addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
restart = int(os.environ["PHALANX_RESTART"])
launcher = os.getppid()
def pause():
    while True:
        signal.pause()
def note(name, text=""):
    (here / f"{name}.{os.getpid()}").write_text(str(text))
    (here / f"{name}.{os.getpid()}").replace(here / name)
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
    return (here / name).read_text()
def wait_for_end_of(name):
    pid = wait_for(name)
    while Path("/proc", pid).exists():
        time.sleep(0.01)
"""


@dataclass
class Launched:
    """What a launch has printed and said, and how it ended."""

    output: bytes
    outcome: Outcome
    reports: list[str] = field(default_factory=list)

    def lines_of(self, rank: int, job: str = "worker") -> list[str]:
        """What one worker has printed, or the task of another job."""
        prefix = f"[{job} {rank}] "
        lines = self.output.decode().splitlines()
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


class Launch:
    """Launches scripts in this process."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def script(self, source: str) -> str:
        """Writes a script; it knows its `job`, `rank`, `restart`, `addresses`, and may `pause`, `note` and `wait_for` a file `here`."""
        path = self.folder / "script.py"
        path.write_text(_PRELUDE + source)
        return str(path)

    def __call__(
        self,
        source: str,
        *,
        workers: int = 2,
        evaluator: bool = False,
        sink: Sink | None = None,
        word_s: float = 0.0,
        grace_s: float = 60.0,
        **options: object,
    ) -> Launched:
        """Runs a script as so many workers, and an evaluator if asked. After its first report there is the file `said1`."""
        request, reports = Request(self.script(source), workers=workers, evaluator=evaluator), []

        def say(text: str) -> None:
            reports.append(text)
            (self.folder / f"said{len(reports)}").touch()

        with (self.folder / "output").open("wb+") as file:
            outcome = run_group(
                lambda n: plan(request, Machine(cores=2), self.environment, free_ports(workers), restart=n),
                sink=sink or Sink(file.fileno()),
                say=say,
                word_s=word_s,
                grace_s=grace_s,
                **options,
            )
            file.seek(0)
            return Launched(file.read(), outcome, reports)


@pytest.fixture
def processes_left():
    """A function that returns the processes, but for zombies, that have the variable LAUNCH_TEST of this test."""
    mark = secrets.token_hex(16)

    def left():
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace")
        return found

    left.mark = mark
    return left


@pytest.fixture
def environment(processes_left):
    """An environment for workers. After the test no process with it is left."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PROCESS}
    yield {**kept, "JAX_PLATFORMS": "cpu", "LAUNCH_TEST": processes_left.mark}
    left = processes_left()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"the test left processes: {left}"


@pytest.fixture
def launch(tmp_path, environment):
    """A function that launches the text of a script as some workers."""
    return Launch(tmp_path, environment)


@pytest.fixture(autouse=True)
def deadline():
    """No test may hang, and none changes what this process does at signals. It ignores none, whoever has started it."""

    def too_late(*_):
        raise TimeoutError(f"the test took more than {_DEADLINE_S} s")

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGALRM: too_late}
    handlers |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD), signal.SIG_DFL)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.alarm(_DEADLINE_S)
    yield
    signal.alarm(0)
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == handlers


class Service:
    """Takes the place of JAX's coordination services, which no process of these tests uses."""

    def __init__(self, environment, host):
        self.number = 0

    def start(self, machines):
        self.number += 1
        return f"service {self.number} for {len(machines)}"

    def end(self):
        pass


@pytest.fixture
def no_service(monkeypatch):
    monkeypatch.setattr(rendezvous, "Service", Service)


@pytest.fixture
def needs_proc():
    """Processes in sessions of their own are found by Linux's /proc."""
    if sys.platform != "linux":
        pytest.skip("only Linux shows the environments of processes")
