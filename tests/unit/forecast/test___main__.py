"""`phalanx estimate`, as a process of its own."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MAIN = [sys.executable, "-c", "from phalanx.launch.cli import main; main(prog_name='phalanx')", "estimate"]
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
    """Predicts the text of a script."""

    def run(source, *arguments, after=()):
        (tmp_path / "train.py").write_text(source)
        command = [*MAIN, *arguments, "train.py", *after]
        environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PYTHONPATH")}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def test_step_of_a_script_is_predicted(estimate, tmp_path):
    """The table goes to standard output, the figures into a file, and the script gets its arguments."""
    done = estimate(
        SCRIPT, "--topology", "cpu:1,2", "--devices", "2", "--output", "found.json", after=("--topology", "x")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "arguments ['--topology', 'x']" in done.stdout
    assert "predicted, not run" in done.stdout
    assert "was not stopped" not in done.stdout
    one, two = json.loads((tmp_path / "found.json").read_text())["estimates"]
    assert (one["topology"], two["topology"]) == ("cpu:1", "cpu:2")
    assert (one["collectives"], two["collectives"][0]["kind"]) == ([], "all-reduce")
    # The script sees two devices, so each of its replicas has half of the batch.
    assert (one["rows_per_replica"], two["rows_per_replica"]) == (16, 16)


def test_unknown_topology_is_an_error(estimate):
    """One message without a traceback."""
    done = estimate(SCRIPT, "--topology", "v9:4")
    assert done.returncode == 2
    assert "phalanx: topology 'v9:4': the known kinds of devices are" in done.stderr
    assert "HINT: " in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_cannot_be_written(estimate):
    """The command ends before the script runs."""
    done = estimate(SCRIPT, "--topology", "cpu:1", "--output", "absent/found.json")
    assert done.returncode == 2
    assert "phalanx: path='absent/found.json': its folder does not exist." in done.stderr
    assert "arguments" not in done.stdout


def test_exception_of_a_script_is_shown(estimate):
    """Its traceback ends the command, with Python's exit code."""
    done = estimate("raise ZeroDivisionError('mine')", "--topology", "cpu:1")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: mine\n")


def test_script_without_a_step_is_an_error(estimate):
    """It ends before it has trained."""
    done = estimate("print('nothing')", "--topology", "cpu:1")
    assert done.returncode == 2
    assert "phalanx: phalanx.estimate of a function that runs no training step" in done.stderr


def test_script_that_is_missing():
    """One message without a traceback, before JAX is imported."""
    command = [*MAIN, "--topology", "cpu:1", "absent.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "absent.py" in done.stderr
    assert "Traceback" not in done.stderr
