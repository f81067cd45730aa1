"""Programs of TensorFlow, migrated without a hand edit, train as they did in TensorFlow."""

import json
import runpy

import numpy as np
import pytest
from tests.migrate.record import FOLDER

from phalanx._src.tools.migrate.program import migrate
from phalanx._src.tools.migrate.table import the_table

RECORDED = json.loads((FOLDER / "programs.json").read_text())
CHEAP = {"checkpoints.py", "linear_regression.py", "second_order.py"}
NEEDS_TENSORFLOW = {name for name in RECORDED if "tf.data" in (FOLDER / "programs" / name).read_text()}


@pytest.mark.cover(("name",), CHEAP)
@pytest.mark.parametrize("name", sorted(set(RECORDED) - NEEDS_TENSORFLOW))
def test_migrated_program_has_the_losses_of_tensorflow(name, tmp_path):
    """The report names no line, the new program does not import TensorFlow, and it has the losses of 20 steps."""
    migration = migrate((FOLDER / "programs" / name).read_bytes(), name, the_table())
    assert migration.report.exit_code == 0, migration.report.lines()
    assert b"import tensorflow" not in migration.source
    path = tmp_path / name
    path.write_bytes(migration.source)
    losses = [float(loss) for loss in runpy.run_path(str(path))["losses"]]
    assert len(losses) == len(RECORDED[name]) == 20
    np.testing.assert_allclose(losses, RECORDED[name], rtol=1e-4, atol=1e-4)


def test_every_program_has_recorded_losses():
    assert set(RECORDED) == {path.name for path in (FOLDER / "programs").glob("*.py")}
