"""Processes that cannot start together, and what each of them says."""

import json
import os
import subprocess
import sys

import pytest

from phalanx.launch.plan import free_ports

MAKE = "import phalanx\nstrategy = phalanx.MultiWorkerMirroredStrategy()\nprint('started', strategy.num_replicas_in_sync)\n"
LATE = "import jax, jax.numpy as jnp\njnp.ones(1).block_until_ready()\n" + MAKE
DEADLINE_S = 60.0


class Script:
    """A process of a cluster that runs some lines."""

    def __init__(self, code, tf_config, timeout_s=3):
        environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PHALANX_CPU_DEVICES")}
        environment |= {"TF_CONFIG": tf_config, "PHALANX_START_TIMEOUT_S": str(timeout_s), "NPROC": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True
        )

    def end(self):
        """Waits for its end; returns the exit status, and the last lines that it printed."""
        try:
            out, err = self._process.communicate(timeout=DEADLINE_S)
        finally:
            self._process.kill()
        return self._process.returncode, (out + err)[-3000:]


@pytest.fixture
def config():
    """Returns TF_CONFIG of a worker of a cluster of two, or of another number."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]

    def of(index, workers=2):
        task = {"type": "worker", "index": index}
        return json.dumps({"cluster": {"worker": addresses[:workers]}, "task": task})

    return of


def test_two_that_start(config):
    """Nothing is in the way."""
    first, second = Script(MAKE, config(0), 30), Script(MAKE, config(1), 30)
    for status, text in (first.end(), second.end()):
        assert status == 0, text
        assert "started 2" in text


def test_rank_that_never_comes(config):
    """Those that are there name it and its address."""
    first, second = Script(MAKE, config(0, 3)), Script(MAKE, config(1, 3))
    for status, text in (first.end(), second.end()):
        assert status == 1, text
        assert "StartupError: a cluster of 3 processes: after 3 s rank 2 (127.0.0.1:" in text


def test_chief_that_never_comes(config):
    """The other one says whom it could not reach."""
    status, text = Script(MAKE, config(1)).end()
    assert status == 1, text
    assert "rank 1 could not reach it for 3 s" in text


def test_process_of_another_cluster_is_refused(config):
    """A process with another list of workers is refused by the first one, and both say so."""
    first, second = Script(MAKE, config(0), 30), Script(MAKE, config(1, 3), 30)
    for status, text in (first.end(), second.end()):
        assert status == 1, text
        assert "it was started for another cluster" in text


def test_strategy_that_is_made_late(config):
    """Once JAX has used its devices no process can join."""
    first, second = Script(LATE, config(0), 30), Script(LATE, config(1), 30)
    for status, text in (first.end(), second.end()):
        assert status == 1, text
        assert "HINT: create the strategy at the top of the script, before the first array" in text


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": {"worker": ["nowhere"]}}', '{"cluster": {"worker": ["a:1", "b:2"]}}']
)
def test_malformed_configuration_fails_before_waiting(text):
    """It is found out before anybody waits."""
    status, printed = Script(MAKE, text).end()
    assert status == 1, printed
    assert "phalanx.errors.Cluster" in printed
    assert "HINT: " in printed


def test_cluster_of_one_process_is_local(config):
    """A cluster of one is local, and so is no cluster."""
    for tf_config in (config(0, 1), "{}"):
        status, text = Script(MAKE, tf_config).end()
        assert status == 0, text
        assert "started 1" in text
