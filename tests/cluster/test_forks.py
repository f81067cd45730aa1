"""Forks behave as new interpreters do: the same programs, answers and ends, whichever starts them."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
from tests import forks

from phalanx.errors import StartupError
from phalanx.testing import VirtualNetwork


@pytest.fixture(autouse=True)
def heard_interrupts():
    """This process hears SIGINT, even if it was started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


KINDS = pytest.mark.parametrize("popen", [subprocess.Popen, forks.Popen], ids=["interpreter", "fork"])
ABOUT = """
import json, os, sys, signal
import phalanx
import jax, numpy as np
json.dump({
    "name": __name__, "arguments": sys.argv[1:], "first": os.path.basename(sys.path[0]), "folder": os.getcwd(), "X": os.environ.get("X"),
    "y": "Y" in os.environ, "x64": jax.config.jax_enable_x64, "devices": len(jax.devices()), "leads": os.getsid(0) == os.getpid(),
    "parent": os.getppid(), "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "stdin": sys.stdin.read(),
    "pipe": os.write(int(sys.argv[1]), b"through the pipe"),
}, sys.stdout)
"""


@KINDS
def test_program_gets_what_it_was_given(popen, tmp_path, monkeypatch):
    """Its arguments, its folder, its environment with what JAX reads of it, a pipe, a session, and this process as its parent."""
    monkeypatch.setenv("Y", "not passed on")
    script = tmp_path / "about.py"
    script.write_text(ABOUT)
    reader, writer = os.pipe()
    environment = {k: v for k, v in os.environ.items() if k not in ("Y", "NPROC", "JAX_NUM_CPU_DEVICES")}
    variables = {"X": "1", "JAX_ENABLE_X64": "1", "PHALANX_CPU_DEVICES": "3", "JAX_PLATFORMS": "cpu"}
    process = popen(
        [sys.executable, str(script), str(writer), "two words"],
        env=environment | variables,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[writer],
        start_new_session=True,
        text=True,
    )
    os.close(writer)
    out, _ = process.communicate("through the input", timeout=300)
    assert json.loads(out) == {
        "name": "__main__",
        "arguments": [str(writer), "two words"],
        "first": tmp_path.name,
        "folder": str(tmp_path),
        "X": "1",
        "y": False,
        "x64": True,
        "devices": 3,
        "leads": True,
        "parent": os.getpid(),
        "int": True,
        "stdin": "through the input",
        "pipe": 16,
    }
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "through the pipe"


@KINDS
@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import os; os._exit(3)", 3, ""),
        ("raise ValueError('a bad row')", 1, "ValueError: a bad row"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'at the end', flush=True)", 0, "at the end"),
        ("import threading; threading.Timer(0.1, lambda: print('a thread', __name__)).start()", 0, "a thread __main__"),
    ],
    ids=["exit", "_exit", "exception", "signal", "atexit", "thread"],
)
def test_program_ends_as_it_does_elsewhere(popen, source, code, said):
    """The exit code is that of the program, after its threads and what it has registered for its end."""
    process = popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code
    assert said in out


def test_forks_draw_their_own_numbers():
    """As new interpreters do. A fork would otherwise go on with the random numbers of its template."""
    source = "import random, keras, numpy as np; print(random.random(), np.random.rand(), keras.random.uniform([]))"
    runs = [forks.run([sys.executable, "-c", source], capture_output=True, text=True) for _ in range(2)]
    first, second = (done.stdout.split() for done in runs)
    assert len(first) == 3
    assert all(a != b for a, b in zip(first, second, strict=True))


@KINDS
def test_program_runs_in_its_network(popen):
    """As it does after `ip netns exec`."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(VirtualNetwork())
        except StartupError as e:
            pytest.skip(f"{e}")
        source = "import os; print(os.stat('/proc/self/ns/net').st_ino)"
        process = popen(network.command(1, [sys.executable, "-c", source]), stdout=subprocess.PIPE, text=True)
        expected = subprocess.check_output(
            network.command(1, ["stat", "-L", "-c", "%i", "/proc/self/ns/net"]), text=True
        )
        assert process.communicate(timeout=300)[0] == expected


def test_all_tests_start_new_interpreters(monkeypatch):
    """With PHALANX_TEST_ALL; and a command with an option of Python is never forked, but for -P: the path is without the folder."""
    monkeypatch.delenv("PHALANX_TEST_ALL", raising=False)
    shows = "open('/proc/self/cmdline').read().count('forks' + chr(46) + 'py')"
    apart = f"import sys; print({shows} - 2 * ('' in sys.path))"
    commands = {"-c": ("-c", f"print({shows})"), "-P": ("-P", "-c", apart), "-I": ("-I", "-c", f"print({shows})")}
    found = {name: forks.run([sys.executable, *words], capture_output=True).stdout for name, words in commands.items()}
    assert found == {"-c": b"1\n", "-P": b"1\n", "-I": b"0\n"}
    monkeypatch.setenv("PHALANX_TEST_ALL", "1")
    assert forks.run([sys.executable, *commands["-c"]], capture_output=True).stdout == b"0\n"
