"""Eight virtual CPU devices, strict JAX, and police against what tests leave behind."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=12")

import threading

import phalanx

phalanx.set_virtual_cpu_devices(8)

import jax
import keras
import pytest

from phalanx import context


def _environment():
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def clean_slate():
    """Every test starts from the same seed and leaves no scope, thread or environment variable behind."""
    keras.utils.set_random_seed(0)
    environment, threads = _environment(), set(threading.enumerate())
    yield
    assert context.depth() == 0, "the test left a scope open"
    assert _environment() == environment, "the test changed the environment"
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    assert not left, f"the test left threads running: {left}"


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of one module do not crowd the memory of the next."""
    yield
    jax.clear_caches()
