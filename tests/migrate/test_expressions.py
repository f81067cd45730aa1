"""Each row of the table that computes something computes the same as TensorFlow, for positional and for named arguments."""

import json

import numpy as np
import pytest
from tests.migrate.arguments import arguments
from tests.migrate.record import FOLDER, expressions, plain

from phalanx._src.tools.migrate.program import migrate
from phalanx._src.tools.migrate.table import the_table

RECORDED = json.loads((FOLDER / "expressions.json").read_text())


@pytest.fixture(scope="module")
def migrated():
    """The migrated expressions, as functions. All are in one program."""
    lines = [f"    {text!r}: lambda: {text},\n" for text in expressions()]
    source = "import tensorflow as tf\n\nfunctions = {\n" + "".join(lines) + "}\n"
    migration = migrate(source.encode(), "expressions.py", the_table())
    assert migration.report.lines()[0].endswith(" 0 lines to look at"), migration.report.lines()
    assert all(finding.kind != "stays" for finding in migration.report.findings)
    assert b"tensorflow" not in migration.source
    names = dict(arguments())
    exec(migration.source.decode(), names)
    return names["functions"]


@pytest.mark.parametrize("text", expressions())
def test_migrated_expression_equals_tensorflow(migrated, text):
    value, recorded = plain(migrated[text]()), RECORDED[text]
    assert value["shape"] == recorded["shape"]
    assert value["kind"] == recorded["kind"]
    np.testing.assert_allclose(value["numbers"], recorded["numbers"], rtol=2e-4, atol=2e-5)
