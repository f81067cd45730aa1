"""Programs of TensorFlow, migrated without a hand edit, train as they did in TensorFlow, or the report names where they stop."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.migrate.record import FOLDER, losses_of

from phalanx._src.tools.migrate.program import migrate
from phalanx._src.tools.migrate.table import the_table

RECORDED = json.loads((FOLDER / "programs.json").read_text())
CHEAP = {"checkpoints.py", "linear_regression.py", "second_order.py"}
NEEDS_TENSORFLOW = {name for name in RECORDED if "tf.data" in (FOLDER / "programs" / name).read_text()}
"""They are tested in `tests/sources`."""
SIMILAR = {"dropout.py": 0.2, "estimator.py": 0.2, "mixed_precision.py": 0.01}
"""Programs with other random numbers, or with 16 bits, and how far the mean of their last five losses may be away."""
STOPS = {
    "autograph.py": {14: "while", 21: "if", 30: "if"},
    "dataset_in_function.py": {28: "for"},
    "module.py": {13: "tf.Module", 23: "tf.Module", 37: "tf.GradientTape", 43: "tf.saved_model.save"},
    "parameter_server.py": {19: "tf.compat.v1.ConfigProto"},
    "tensor_array.py": {16: "tf.TensorArray", 18: "for"},
}
"""Programs that need a hand, and the lines that the report names."""


def migrated(name, tmp_path):
    """Returns the report on a program, and the file of the migrated one."""
    migration = migrate((FOLDER / "programs" / name).read_bytes(), name, the_table())
    path = tmp_path / name
    path.write_bytes(migration.source)
    return migration.report, path


def require_losses_of_tensorflow(name, path):
    """Runs a migrated program, and compares its 20 losses with the recorded ones."""
    losses, recorded = losses_of(path), RECORDED[name]
    assert len(losses) == 20
    if name in SIMILAR:
        assert losses[-1] < losses[0]
        recorded = recorded or [None]
        if recorded[-1] is not None:  # TensorFlow 2.21 has no Estimators any more.
            assert abs(np.mean(losses[-5:]) - np.mean(recorded[-5:])) < SIMILAR[name]
    else:
        np.testing.assert_allclose(losses, recorded, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Of 64 bits, and those that the programs cause in TensorFlow too.
@pytest.mark.cover(("name",), CHEAP)
@pytest.mark.parametrize("name", sorted(set(RECORDED) - NEEDS_TENSORFLOW - set(STOPS)))
def test_migrated_program_has_the_losses_of_tensorflow(name, tmp_path):
    """The report names no line, and the new program does not import TensorFlow."""
    report, path = migrated(name, tmp_path)
    assert report.exit_code == 0, report.lines()
    assert "import tensorflow" not in path.read_text()
    require_losses_of_tensorflow(name, path)


@pytest.mark.parametrize("name", sorted(STOPS))
def test_report_names_the_lines_where_a_program_stops(name, tmp_path):
    report, path = migrated(name, tmp_path)
    looks = {finding.line: finding.text for finding in report.findings if finding.kind == "look"}
    assert report.exit_code == 1
    assert {line: text.split(": ")[0] for line, text in looks.items()} == STOPS[name]
    assert path.read_text().count("# phalanx: ") == len(looks)


@pytest.mark.exhaustive("test_report_names_the_lines_where_a_program_stops")
@pytest.mark.parametrize("name", sorted(set(STOPS) - NEEDS_TENSORFLOW))
def test_program_with_a_named_line_does_not_run(name, tmp_path):
    """It raises, so that nobody takes its numbers for those of TensorFlow."""
    _, path = migrated(name, tmp_path)
    with pytest.raises(Exception, match=r"(?s)."):
        runpy.run_path(str(path))


def test_program_of_the_docs_runs(tmp_path):
    """Its devices are virtual. Only the dataset of TensorFlow, which the report names, is replaced by hand."""
    page = (Path(__file__).parents[2] / "docs" / "side_by_side.md").read_text()
    program = re.search(r"```python tensorflow\n(.*?)```", page, re.DOTALL)
    migration = migrate(program[1].encode(), "train.py", the_table())
    assert [(x.kind, x.text) for x in migration.report.findings if x.kind != "changed"] == [
        ("stays", "tf.data.Dataset.from_tensor_slices")
    ]
    source = migration.source.decode().replace("import tensorflow as tf\n", "")
    arrays = source.replace("tf.data.Dataset.from_tensor_slices((x, y)).batch(96)", "(x, y)")
    path = tmp_path / "train.py"
    path.write_text(arrays.replace("distribute_dataset(batches)", "distribute_dataset(batches, batch_size=96)"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=500)
    printed = re.findall(r"```text\n(epoch 0.*?)```", page, re.DOTALL)
    assert (done.returncode, done.stdout) == (0, printed[0]), done.stderr


def test_every_program_has_recorded_losses():
    assert set(RECORDED) == {path.name for path in (FOLDER / "programs").glob("*.py")}
    assert len(RECORDED) >= 40
    assert all(losses is None or len(losses) == 20 for losses in RECORDED.values())
