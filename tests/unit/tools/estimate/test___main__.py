"""`phalanx estimate`, as a process of its own, and its module in this process."""

import json
import os
import sys

import pytest
from click.testing import CliRunner
from tests import forks

from phalanx._src.tools import cli
from phalanx._src.tools.estimate.__main__ import main

SCRIPT = """
import sys
import phalanx
import keras
import numpy as np

print("arguments", sys.argv[1:])
strategy = phalanx.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512), keras.layers.Dense(4)])
    model.compile("adam", "mse")
model.fit(np.ones((128, 64)), np.ones((128, 4)), batch_size=32, verbose=0)
print("was not stopped")
"""


@pytest.fixture
def estimate(tmp_path):
    """Predicts the text of a script in a process."""

    def run(source, *arguments):
        (tmp_path / "train.py").write_text(source)
        environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PYTHONPATH")}
        command = [sys.executable, "-m", "phalanx", "estimate", *arguments]
        return forks.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.slow
def test_step_of_a_script_is_predicted(estimate, tmp_path):
    """The table goes to standard output, the figures into a file, and the script gets its arguments."""
    options = ("--topology", "cpu:1,2", "--devices", "2", "--output", "found.json")
    done = estimate(SCRIPT, *options, "train.py", "--topology", "x")
    assert (done.returncode, done.stderr) == (0, "Phalanx: 2 replicas on cpu:0, cpu:1\n")
    assert "arguments ['--topology', 'x']" in done.stdout
    assert "predicted, not run" in done.stdout
    assert "was not stopped" not in done.stdout
    one, two = json.loads((tmp_path / "found.json").read_text())["estimates"]
    assert (one["topology"], two["topology"]) == ("cpu:1", "cpu:2")
    assert (one["collectives"], two["collectives"][0]["kind"]) == ([], "all-reduce")
    # The script sees two devices, so each of its replicas has half of the batch.
    assert (one["rows_per_replica"], two["rows_per_replica"]) == (16, 16)


@pytest.mark.exhaustive("tests/unit/errors/test_frames.py")
@pytest.mark.slow
def test_exception_of_a_script_is_shown(estimate):
    """Its traceback ends the command, with Python's exit code."""
    done = estimate("raise ZeroDivisionError('mine')", "--topology", "cpu:1", "train.py")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: mine\n")


@pytest.mark.parametrize(
    ("source", "topologies", "output", "message"),
    [
        pytest.param(SCRIPT, "v9:4", "", "topology 'v9:4': the known kinds of devices are", id="unknown topology"),
        pytest.param(
            SCRIPT, "cpu:1", "absent/found.json", "path='absent/found.json': its folder does not exist.", id="output"
        ),
        pytest.param("", "cpu:1", "", "phalanx.estimate of a function that runs no training step", id="no step"),
    ],
)
def test_errors_have_one_message(tmp_path, monkeypatch, capsys, source, topologies, output, message):
    """Without a traceback, and before the script runs if its arguments show that."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text(source)
    assert main(topologies, output, "script", str(tmp_path / "train.py")) == 2
    printed = capsys.readouterr()
    assert f"phalanx: {message}" in printed.err
    assert "HINT: " in printed.err
    assert "arguments" not in printed.out


def test_script_that_is_missing():
    done = CliRunner().invoke(cli.main, ["estimate", "--topology", "cpu:1", "absent.py"])
    assert done.exit_code == 2
    assert "absent.py" in done.output
    assert "Traceback" not in done.output
