"""Notebooks: names of one cell in others, lines that are not Python, and bytes that do not change."""

import json

from phalanx._src.tools.migrate.notebooks import migrate_notebook
from phalanx._src.tools.migrate.table import the_table


def notebook(*cells):
    """Returns the bytes of a notebook with code cells."""
    made = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": text.splitlines(keepends=True)} for text in cells
    ]
    text = {"cell_type": "markdown", "metadata": {}, "source": ["tensorflow ä"]}
    return (json.dumps({"cells": [text, *made], "nbformat": 4}, indent=1, ensure_ascii=False) + "\n").encode()


def sources(source):
    return ["".join(cell["source"]) for cell in json.loads(source)["cells"][1:]]


def test_cells_are_migrated_together():
    before = notebook(
        "!pip install tensorflow\nimport tensorflow as tf", "%time x = tf.ones(1)\nx = tf.ones(1)", "%%bash\nls"
    )
    migration = migrate_notebook(before, "a.ipynb", the_table())
    assert migration.report.exit_code == 0
    assert sources(migration.source) == [
        "!pip install tensorflow\nimport phalanx\nimport keras",
        "%time x = keras.ops.ones(1)\nx = keras.ops.ones(1)",
        "%%bash\nls",
    ]
    assert "tensorflow ä".encode() in migration.source
    assert migrate_notebook(migration.source, "a.ipynb", the_table()).source == migration.source


def test_halves_of_characters_stay():
    """JSON may hold them, and a file may not."""
    before = notebook("import tensorflow as tf\nx = tf.ones(1)").replace("ä".encode(), b"\\ud800")
    migration = migrate_notebook(before, "a.ipynb", the_table())
    assert sources(migration.source) == ["import phalanx\nimport keras\nx = keras.ops.ones(1)"]
    assert json.loads(migration.source)["cells"][0] == json.loads(before)["cells"][0]


def test_source_that_is_no_text():
    """A dict has keys, which are not the source."""
    before = notebook("").replace(b'"source": []', b'"source": {"import tensorflow as tf": 1}')
    migration = migrate_notebook(before, "a.ipynb", the_table())
    assert (migration.source, migration.report.exit_code) == (before, 2)


def test_lines_that_are_not_python_are_told_from_those_that_are():
    """Continued commands, indented cells and lines that begin with an operator are what IPython takes them for."""
    before = notebook(
        "import tensorflow as tf",
        "!pip install \\\n  numpy\nx = tf.ones(1)",
        "  for i in a:\n    x = tf.ones(1)",
        "print('%s'\n      %tf.ones(1))",
        "%timeit -n 10 tf.ones(1)\nfiles = !ls\n%matplotlib inline",
    )
    migration = migrate_notebook(before, "a.ipynb", the_table())
    assert migration.report.exit_code == 0
    assert sources(migration.source)[1:] == [
        "!pip install \\\n  numpy\nx = keras.ops.ones(1)",
        "for i in a:\n  x = keras.ops.ones(1)",
        "print('%s'\n      %keras.ops.ones(1))",
        "%timeit -n 10 keras.ops.ones(1)\nfiles = !ls\n%matplotlib inline",
    ]


def test_names_of_the_migration_are_not_those_of_the_notebook():
    before = notebook(
        "import tensorflow as tf\n__phalanx_0_cell__(7)\n__phalanx_1_magic__(99)",
        "!ls\nx = tf.ones(1)\n__phalanx_0_cell__(0)",
    )
    migration = migrate_notebook(before, "a.ipynb", the_table())
    assert sources(migration.source) == [
        "import phalanx\nimport keras\n__phalanx_0_cell__(7)\n__phalanx_1_magic__(99)",
        "!ls\nx = keras.ops.ones(1)\n__phalanx_0_cell__(0)",
    ]


def test_half_a_surrogate_pair_is_reported():
    before = notebook("import tensorflow as tf\nx = tf.ones(1)\ny = 'z'").replace(b"'z'", b"'\\ud800'")
    assert migrate_notebook(before, "a.ipynb", the_table()).report.exit_code == 2


def test_report_names_cell_and_line():
    before = notebook("import tensorflow as tf", "x = 1\ntf.foo(x)", "tf.data.Dataset.range(3)")
    migration = migrate_notebook(before, "a.ipynb", the_table())
    assert any(line.startswith("  cell 2, line 2: tf.foo: ") for line in migration.report.lines())
    assert "stays: tf.data.Dataset.range (cell 3, line 1)" in migration.report.lines()[-1]


def test_notebook_without_tensorflow_stays_byte_for_byte():
    before = notebook("x  =  1").replace(b'"nbformat": 4', b'"nbformat":   4')
    assert migrate_notebook(before, "a.ipynb", the_table()).source == before


def test_file_that_is_not_a_notebook_is_reported():
    for source in (b"{}", b"[]", b"{", b"[" * 100_000, b"[" + b"[]," * 4_000_000 + b"1]"):
        migration = migrate_notebook(source, "a.ipynb", the_table())
        assert (migration.report.exit_code, migration.source) == (2, source)
