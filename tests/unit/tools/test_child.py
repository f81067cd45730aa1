"""Modules of `phalanx` commands, whose reader may stop early."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(module, folder, output=subprocess.PIPE):
    command = [sys.executable, "-m", "phalanx._src.tools.child", module, "a", "b"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}
    return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=500)


@pytest.mark.parametrize("code", ["print(sys.argv[1:])", "print('x' * 100_000, flush=True)", "print(1); sys.exit(3)"])
def test_reader_that_stopped_hears_nothing(tmp_path, code):
    """Neither of what was printed, nor of what Python would write at its end."""
    (tmp_path / "a_tool.py").write_text(f"import sys\n{code}\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = run("a_tool", tmp_path, writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_other_pipes_are_told(tmp_path):
    """A module that loses a connection of its own fails as before, and gets its arguments."""
    (tmp_path / "a_tool.py").write_text("import sys; print(sys.argv[1:]); raise BrokenPipeError('of its own')\n")
    done = run("a_tool", tmp_path)
    assert (done.returncode, done.stdout) == (1, "['a', 'b']\n")
    assert "BrokenPipeError: of its own" in done.stderr
