"""Each row of the table that computes something computes the same as TensorFlow, for positional and for named arguments."""

import json
import os

import jax
import numpy as np
import pytest
from tests.migrate.arguments import arguments
from tests.migrate.record import FOLDER, expressions, plain

from phalanx._src.tools.migrate.program import migrate
from phalanx._src.tools.migrate.table import the_table

RECORDED = json.loads((FOLDER / "expressions.json").read_text())
BY_VALUES = {
    "tf.boolean_mask(x, b)",
    "tf.boolean_mask(v, v > 0)",
    "tf.math.bincount(j)",
    "tf.math.bincount(j, minlength=6)",
    "tf.math.segment_sum(x, [0, 0, 1])",
}
"""Expressions whose results have shapes that depend on values, which no program can have."""


@pytest.fixture(scope="module")
def values():
    """What the migrated expressions compute. `make test` compiles one program for almost all of them, and `make test-all` one for each operation."""
    lines = [f"    {text!r}: lambda: {text},\n" for text in expressions()]
    source = "import tensorflow as tf\n\nfunctions = {\n" + "".join(lines) + "}\n"
    migration = migrate(source.encode(), "expressions.py", the_table())
    assert migration.report.lines()[0].endswith(" 0 lines to look at"), migration.report.lines()
    assert all(finding.kind != "stays" for finding in migration.report.findings)
    assert b"tensorflow" not in migration.source
    names = dict(arguments())
    exec(migration.source.decode(), names)
    alone = BY_VALUES if not os.environ.get("PHALANX_TEST_ALL") else {*expressions()}

    def together(given):
        names.update(given)
        return {text: function() for text, function in names["functions"].items() if text not in alone}

    found = jax.jit(together)(arguments())
    names.update(arguments())
    return found | {text: names["functions"][text]() for text in alone}


@pytest.mark.parametrize("text", expressions())
def test_migrated_expression_equals_tensorflow(values, text):
    value, recorded = plain(values[text]), RECORDED[text]
    assert value["shape"] == recorded["shape"]
    assert value["kind"] == recorded["kind"]
    np.testing.assert_allclose(value["numbers"], recorded["numbers"], rtol=2e-4, atol=2e-5)
