"""The recorded values of expressions and the list of names are those of the TensorFlow that is installed."""

import functools
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from tests.migrate.arguments import arguments
from tests.migrate.record import FOLDER, expressions, losses_of, plain
from tests.migrate.test_programs import NEEDS_TENSORFLOW, STOPS, migrated, require_losses_of_tensorflow

from phalanx._src.tools.migrate.table import Row

tf = pytest.importorskip("tensorflow")

RECORDED = json.loads((FOLDER / "expressions.json").read_text())
OF_KERAS = [text for text in expressions() if "tf.keras" in text]


@pytest.mark.parametrize("text", [text for text in expressions() if text not in OF_KERAS])
def test_recorded_value_is_that_of_tensorflow(text):
    """Keras runs on JAX in this process, so its expressions are compared elsewhere."""
    value, recorded = plain(eval(text, {"tf": tf, **arguments()})), RECORDED[text]
    assert (value["shape"], value["kind"]) == (recorded["shape"], recorded["kind"])
    np.testing.assert_allclose(value["numbers"], recorded["numbers"], rtol=1e-4, atol=1e-5)


def test_rows_have_the_arguments_of_tensorflow_in_their_order():
    """Else a positional argument would be passed as another one."""
    wrong, compared = [], 0
    lines = (Path(inspect.getfile(Row)).parent / "names.tsv").read_text().splitlines()
    for row in (Row.parse(line) for line in lines if not line.startswith("#")):
        if row.is_open or row.name.startswith(".") or row.kind in {"keep", "drop"}:
            continue
        try:
            function = functools.reduce(getattr, row.name.split(".")[1:], tf)
            parameters = inspect.signature(function).parameters.values()
        except (AttributeError, TypeError, ValueError):
            continue  # Of an older TensorFlow, or written in C.
        if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in parameters):
            continue
        names = [p.name for p in parameters if p.name != "self"]
        compared += 1
        if names[: len(row.arguments)] != [argument.name for argument in row.arguments]:
            wrong.append(f"{row.name}({', '.join(names)})")
    assert wrong == []
    assert compared > 400


@pytest.mark.parametrize("name", sorted(NEEDS_TENSORFLOW - set(STOPS)))
def test_program_with_a_dataset_has_the_losses_of_tensorflow(name, tmp_path):
    """TensorFlow stays for the dataset, and everything else is new."""
    report, path = migrated(name, tmp_path)
    assert report.exit_code == 0, report.lines()
    assert any(finding.kind == "stays" for finding in report.findings)
    require_losses_of_tensorflow(name, path)


@pytest.mark.parametrize("name", sorted(STOPS))
def test_program_with_a_named_line_does_not_run_beside_tensorflow(name, tmp_path):
    """With TensorFlow here, its import does not stop the program; a named line does."""
    _, path = migrated(name, tmp_path)
    with pytest.raises(Exception, match=r"(?s).+") as raised:
        losses_of(path)
    lines = {entry.lineno for entry in raised.traceback if str(entry.path) == str(path)}
    assert lines, "the program has not begun"
