"""Scripts in processes of their own, most of them under `phalanx run`."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from tests import forks
from tests.waiting import DEADLINE_S

RUN = ("-m", "phalanx", "run", "--workers")


def environment(**variables):
    """The environment of this process, without what was chosen for its own JAX, and with further variables."""
    hidden = ("NPROC", "PHALANX_CPU_DEVICES", "TF_CONFIG", "no_proxy", "NO_PROXY", "no_grpc_proxy")
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "timeout" not in flag)
    return (
        {k: v for k, v in os.environ.items() if k not in hidden}
        # Nobody answers there, so that no process of a cluster may use it.
        | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "http_proxy": "http://127.0.0.1:9"}
        | variables
    )


@contextmanager
def started(*words, merged=False, folder=None, **variables):
    """A Python process in a folder, which is killed at the end. `merged`: its errors go to its output."""
    process = forks.Popen(
        [sys.executable, *map(str, words)],
        env=environment(**variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end_of(process):
    """Waits for the end of a process; returns its exit code, its output and its errors."""
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it does not end:\n{process.communicate()}")
    return process.returncode, out, err


def run(*words, **options):
    """Runs a Python process to its end; returns its exit code, its output and its errors."""
    with started(*words, **options) as process:
        return end_of(process)


def script(folder, source):
    """Writes a script, and returns its path."""
    path = folder / "train.py"
    path.write_text(source)
    return path
