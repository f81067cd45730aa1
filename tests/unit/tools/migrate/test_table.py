"""The table of names: its targets exist, it is sorted, and it has every public name of eight modules of TensorFlow."""

import importlib
import inspect
import pathlib
import re

import pytest

from phalanx._src.tools.migrate.forms import FORMS
from phalanx._src.tools.migrate.imports import MODULES
from phalanx._src.tools.migrate.table import Argument, NameTable, Row, the_table

LINES = (pathlib.Path(inspect.getfile(NameTable)).parent / "names.tsv").read_text().splitlines()[1:]
ROWS = [Row.parse(line) for line in LINES]
PUBLIC = (pathlib.Path(__file__).parent / "tf_public_names.txt").read_text().split()


def found(target):
    """Returns what a dotted name stands for; raises AttributeError if it does not exist."""
    root, *parts = target.split(".")
    value = importlib.import_module(MODULES.get(root, "builtins"))
    if root not in MODULES:
        parts = [root, *parts]
    for part in parts:
        if inspect.ismodule(value) and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


def test_rows_are_sorted_and_unique():
    assert [row.name for row in ROWS] == sorted(row.name for row in ROWS)
    assert len(set(LINES)) == len(LINES)


def test_every_target_exists():
    """Names, and the names at the beginning of calls in templates."""
    targets = {row.target for row in ROWS if row.kind == "name" and not row.name.startswith(".")}
    for row in ROWS:
        if row.kind in {"template", "expression"}:
            targets |= set(re.findall(r"\b(?:jax|jnp|keras|phalanx)\.[\w.]+", row.target))
    missing = []
    for target in sorted(targets):
        try:
            found(target)
        except (AttributeError, ImportError):
            missing.append(target)
    assert missing == []


def test_arguments_exist_in_the_target():
    """A plain row passes only arguments that its target has, and positional ones in the same order."""
    wrong = []
    for row in ROWS:
        if row.kind != "name" or row.is_open or row.name.startswith(".") or row.name in FORMS:
            continue
        try:
            parameters = inspect.signature(found(row.target)).parameters
        except ValueError:
            continue  # Written in C.
        names = [name for name in parameters if name != "self"]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        for i, argument in enumerate(row.arguments):
            if argument.target and not argument.is_refused and not takes_all:
                is_there = argument.target in names and (i >= row.leading or names[i] == argument.target)
                wrong += [] if is_there else [f"{row.name}: {argument.name} -> {row.target}({', '.join(names)})"]
    assert wrong == []


def test_every_public_name_is_mapped_or_listed_as_missing():
    """Of tf.math, nn, linalg, random, keras, distribute, train and summary."""
    table = the_table()
    assert len(PUBLIC) > 2000
    assert [name for name in PUBLIC if not table.rows(name)] == []
    mapped = [name for name in PUBLIC if table.rows(name)[0].kind != "none"]
    assert len(mapped) > 1700


def test_every_missing_name_says_what_to_write():
    assert [row.name for row in ROWS if row.kind == "none" and not row.note] == []


def test_forms_are_in_the_table():
    assert [name for name in FORMS if not the_table().rows(name)] == []


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("x", Argument("x", "x")),
        ("input_tensor:x", Argument("input_tensor", "x")),
        ("name:", Argument("name", "")),
        ("conjugate:!", Argument("conjugate", "", is_refused=True)),
        ("transpose_b=True", Argument("transpose_b", "", "True")),
        ("x:x1+", Argument("x", "x1", is_required=True)),
        ("*inputs:operands", Argument("*inputs", "operands")),
    ],
)
def test_argument_is_parsed(text, argument):
    assert Argument.parse(text) == argument


def test_argument_that_cannot_be_parsed_is_refused():
    with pytest.raises(ValueError, match="does not describe an argument"):
        Argument.parse("a b")


def test_find_takes_attributes_of_classes_only():
    table = the_table()
    rows, rest = table.find("tf.distribute.ReduceOp.SUM")
    assert (rows[0].target, rest) == ("phalanx.ReduceOp", ".SUM")
    assert table.find("tf.keras.no_such_name") == ([], "")
    assert table.find("tf.data.Dataset.range")[0][0].kind == "keep"
