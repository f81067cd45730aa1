"""What unit tests of several rooms need."""

import gc
import os
import subprocess
import sys

import pytest

import phalanx


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def collect():
    """Collects what nothing refers to, whatever its age. Nothing is collected before."""
    gc.disable()
    yield gc.collect
    gc.enable()


@pytest.fixture
def run_python():
    """Runs code in a process of its own, with a deadline, and returns its output. `start` is `subprocess.run`, or one like it."""

    def run(code, start=subprocess.run, **environment):
        removed = {"XLA_FLAGS", "NPROC", "PHALANX_CPU_DEVICES", "KERAS_BACKEND"}
        env = {k: v for k, v in os.environ.items() if k not in removed} | {"JAX_PLATFORMS": "cpu"} | environment
        done = start([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)
        return done.stdout + done.stderr

    return run
