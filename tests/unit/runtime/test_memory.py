"""Freed memory of programs on CPUs, in processes of their own."""

import subprocess
import sys

import pytest

from phalanx._src.runtime import memory

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
import phalanx

strategy = phalanx.OneDeviceStrategy("cpu:0")
x = jnp.ones((512, 1024))

def step(x):
    # Sorts need a copy each, of 2 MB.
    return jnp.sort(jnp.sort(x, axis=0) + 1, axis=1).sum()

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        strategy.run(step, args=(x,)).block_until_ready()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps

# The first steps of each thread of XLA get pages for an arena of its own.
fewest = float("inf")
for _ in range(int(sys.argv[1])):
    fewest = min(fewest, faults(3))
    if fewest < 100:
        break
print(fewest)
"""


def page_faults(rounds, **environment):
    """Returns how many pages a step gets from the system, in the quietest of some rounds, or in the first quiet one."""
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", PROGRAM, str(rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    return float(done.stdout)


@pytest.mark.exhaustive("python -m benchmarks soak")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_steps_get_no_new_pages():
    """The memory of a step is that of the one before, unless the user has set the thresholds of the allocator."""
    assert page_faults(30) < 100
    assert page_faults(3, MALLOC_TRIM_THRESHOLD_="131072") > 400


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_settings_of_the_user_stay(monkeypatch, name):
    """Nothing changes if the environment chooses an allocator, or its options."""
    monkeypatch.setenv(name, "")
    assert not memory.keep_freed_memory.__wrapped__()


def test_other_systems_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_freed_memory.__wrapped__()
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed_memory.__wrapped__()
