"""Processes that cannot start together, and what each of them says."""

import json
import re
from contextlib import ExitStack

import pytest
from launching import end_of, started

from phalanx._src.launch.plan import free_ports

MAKE = "import phalanx\nstrategy = phalanx.MultiWorkerMirroredStrategy()\nprint('started', strategy.num_replicas_in_sync)\n"
LATE = "import jax, jax.numpy as jnp\njnp.ones(1).block_until_ready()\n" + MAKE


COMPILES = """
import jax
hits = []
jax.monitoring.register_event_listener(lambda event, **_: event == "/jax/compilation_cache/cache_hits" and hits.append(event))
import keras, phalanx
strategy = phalanx.MultiWorkerMirroredStrategy()
strategy.run(lambda: keras.ops.sin(keras.ops.ones(3)))
print("hits", len(hits))
"""


@pytest.fixture
def make():
    """Starts a process of a cluster that runs some lines. Returns what waits for its end, for its exit code and its last lines."""
    with ExitStack() as stack:

        def start(code, tf_config, timeout_s=3):
            variables = {"TF_CONFIG": tf_config, "PHALANX_START_TIMEOUT_S": str(timeout_s), "NPROC": "1"}
            process = stack.enter_context(started("-c", code, **variables))

            def end():
                status, out, err = end_of(process)
                return status, (out + err)[-3000:]

            return end

        yield start


@pytest.fixture
def config():
    """Returns TF_CONFIG of a worker of a cluster of two, or of another number."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]

    def of(index, workers=2):
        task = {"type": "worker", "index": index}
        return json.dumps({"cluster": {"worker": addresses[:workers]}, "task": task})

    return of


def test_two_that_start(make, config):
    """Nothing is in the way."""
    first, second = make(MAKE, config(0), 300), make(MAKE, config(1), 300)
    for status, text in (first(), second()):
        assert status == 0, text
        assert "started 2" in text


def test_each_process_keeps_what_it_compiles(make, config, tmp_path, monkeypatch):
    """JAX lets the first one alone write into its cache, but what it writes for CPUs serves no other."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    for is_second in (False, True):
        ends = [make(COMPILES, config(index), timeout_s=300) for index in (0, 1)]
        for status, out in [end() for end in ends]:
            assert status == 0, out
            assert not is_second or int(re.search(r"hits (\d+)", out)[1]), out


def test_rank_that_never_comes(make, config):
    """Those that are there name it and its address."""
    first, second = make(MAKE, config(0, 3)), make(MAKE, config(1, 3))
    for status, text in (first(), second()):
        assert status == 1, text
        assert "StartupError: a cluster of 3 processes: after 3 s rank 2 (127.0.0.1:" in text


def test_chief_that_never_comes(make, config):
    """The other one says whom it could not reach."""
    status, text = make(MAKE, config(1))()
    assert status == 1, text
    assert "rank 1 could not reach it for 3 s" in text


def test_process_of_another_cluster_is_refused(make, config):
    """A process with another list of workers is refused by the first one, and both say so."""
    first, second = make(MAKE, config(0), 300), make(MAKE, config(1, 3), 300)
    for status, text in (first(), second()):
        assert status == 1, text
        assert "it was started for another cluster" in text


def test_strategy_that_is_made_late(make, config):
    """Once JAX has used its devices no process can join."""
    first, second = make(LATE, config(0), 300), make(LATE, config(1), 300)
    for status, text in (first(), second()):
        assert status == 1, text
        assert "HINT: create the strategy at the top of the script, before the first array" in text


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": {"worker": ["nowhere"]}}', '{"cluster": {"worker": ["a:1", "b:2"]}}']
)
def test_malformed_configuration_fails_before_waiting(make, text):
    """It is found out before anybody waits."""
    status, printed = make(MAKE, text)()
    assert status == 1, printed
    assert "phalanx.errors.Cluster" in printed
    assert "HINT: " in printed


def test_cluster_of_one_process_is_local(make, config):
    """A cluster of one is local, and so is no cluster."""
    for tf_config in (config(0, 1), "{}"):
        status, text = make(MAKE, tf_config)()
        assert status == 0, text
        assert "started 1" in text
