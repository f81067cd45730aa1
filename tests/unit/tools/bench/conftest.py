"""Two machines with a slow cable between them."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from tests import forks

from phalanx._src.tools import child, cli
from phalanx._src.tools.bench.__main__ import main
from phalanx.errors import StartupError
from phalanx.testing import VirtualNetwork

DEADLINE_S = 600


@pytest.fixture
def forked(monkeypatch):
    """Forks the processes that are measured, instead of starting new interpreters."""
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs `phalanx bench` in this process and a folder of its own. The runs that it measures are processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "run", lambda module, arguments: main(*arguments))
    return lambda *arguments: CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.fixture
def on_slow_link(tmp_path):
    """Runs a module of Python on two machines with a cable of 100 Mbit/s. Skips if this machine cannot be two."""
    try:
        network = VirtualNetwork(megabits_per_second=100).__enter__()
    except StartupError as e:
        pytest.skip(f"{e}")
    processes = []

    def run(*module):
        tasks = [f"{address}:12345" for address in network.addresses]
        for rank in range(2):
            cluster = {"cluster": {"worker": tasks}, "task": {"type": "worker", "index": rank}}
            environment = os.environ | {"TF_CONFIG": json.dumps(cluster), "PHALANX_TOKEN": "of this test only"}
            command = network.command(rank, [sys.executable, "-m", *module])
            processes.append(subprocess.Popen(command, env=environment, cwd=tmp_path))
        assert [process.wait(DEADLINE_S) for process in processes] == [0, 0]

    yield run
    for process in processes:
        process.kill()
        process.wait()
    network.__exit__()
