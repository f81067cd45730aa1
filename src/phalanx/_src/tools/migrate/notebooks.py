# SPDX-License-Identifier: Apache-2.0
"""Notebooks: their code cells are migrated together, because names of one cell are used in others."""

import ast
import itertools
import json
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import final

from phalanx._src.cluster.untrusted import parse_json
from phalanx._src.tools.migrate.program import Migration, migrate
from phalanx._src.tools.migrate.report import UNREADABLE, Finding, Report
from phalanx._src.tools.migrate.table import NameTable
from phalanx.typing import PyTree

_LINE = re.compile(r"^(?:.*\\\n)*.*$", re.MULTILINE)
"""A line with those that continue it."""
_IS_MAGIC = re.compile(r"^([ \t]*)((?:\w+\s*=\s*)?(?:%%?[A-Za-z]|!).*|\?.*|.*\w\?)$", re.DOTALL)
_HAS_CODE = re.compile(r"^([ \t]*)(%(?:time|timeit|prun)(?: +-\w+(?: *\d+)?)* +)(\w.*)$", re.DOTALL)
"""A magic before a statement of Python."""


def _is_python(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(source)
    # CPython raises the first two for deep expressions.
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return False
    return True


@final
class _Magics:
    """The lines of a notebook that are not Python. Calls stand for them.

    Args:
      name: that of the function that is called. Nothing in the notebook has it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[str] = []

    def hidden(self, source: str) -> str:
        """Returns the source of a cell with a call for each line that is not Python."""
        source = textwrap.dedent(source)  # As IPython does.
        # The cell first, and then its lines: one that begins with `%` may continue an expression.
        if _is_python(source):
            return source
        lines = source.split("\n")
        if lines[0].startswith("%%") and not lines[0].startswith(("%%time", "%%capture", "%%prun")):
            return self._call(source)  # The cell is of another language.
        return _LINE.sub(lambda match: self._line(match[0]), source)

    def _line(self, line: str) -> str:
        # The call and the statement stay on one line, so that the magic is found again before it.
        if match := _HAS_CODE.match(line):
            return f"{match[1]}{self._call(match[2])}; {match[3]}"
        match = _IS_MAGIC.match(line)
        return match[1] + self._call(match[2]) if match else line

    def _call(self, text: str) -> str:
        self._lines.append(text)
        return f"{self._name}({len(self._lines) - 1})"

    def shown(self, source: str) -> str:
        """Returns the source with the lines that were hidden."""
        return re.sub(rf"{self._name}\((\d+)\)(?:; )?", lambda match: self._lines[int(match[1])], source)


def migrate_notebook(source: bytes, path: str, table: NameTable) -> Migration:
    """Returns a notebook of TensorFlow as a notebook of Phalanx.

    Args:
      source: the notebook.
      path: its file, for the report.
      table: the table of names.
    """
    try:
        notebook = parse_json(source)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"][:]) for cell in cells]  # Only text and lists have slices.
    except (RecursionError, ValueError) as e:
        return Migration(source, Report(path, [Finding(1, UNREADABLE, f"this is not a notebook: {e}")]))
    except (KeyError, TypeError):
        return Migration(source, Report(path, [Finding(1, UNREADABLE, "this is JSON, but not a notebook of cells")]))
    begin, magic = _new_names(sources)
    magics = _Magics(magic)
    program = "".join(f"{begin}({i})\n{magics.hidden(text)}\n" for i, text in enumerate(sources))
    # JSON may hold halves of characters. Python refuses their bytes, and the report says so.
    migration = migrate(program.encode(errors="surrogatepass"), path, table)
    report = _by_cell(migration.report, program, begin)
    # The bytes stay, because json.dumps would format the file in another way.
    if migration.source == program.encode(errors="surrogatepass"):
        return Migration(source, report)
    parts = re.split(rf"^{begin}\((\d+)\)\n", migration.source.decode(), flags=re.MULTILINE)
    # New imports stand in the first cell that imports TensorFlow, so nothing stands before the first cell.
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        before = textwrap.dedent(sources[int(number)])
        _set_source(cells[int(number)], before, magics.shown(text.removesuffix("\n")))
    end = "\n" if source.endswith(b"\n") else ""
    text = json.dumps(notebook, indent=_indent(source), ensure_ascii=False) + end
    # JSON may hold halves of characters, which a file takes only in its words for them.
    return Migration(text.encode(errors="backslashreplace"), report)


def _new_names(sources: Sequence[str]) -> tuple[str, str]:
    """Returns names of two functions, which are in none of the sources: what begins a cell, and what stands for a magic."""
    text = "".join(sources)
    number = next(i for i in itertools.count() if f"__phalanx_{i}_" not in text)
    return f"__phalanx_{number}_cell__", f"__phalanx_{number}_magic__"


def _by_cell(report: Report, program: str, begin: str) -> Report:
    """Returns a report whose lines are those in a cell."""
    starts = [i for i, line in enumerate(program.split("\n"), 1) if line.startswith(f"{begin}(")]
    findings = []
    for finding in report.findings:
        cell = sum(start <= finding.line for start in starts)
        line = finding.line - starts[cell - 1] if cell else finding.line
        findings.append(Finding(finding.line, finding.kind, finding.text, f"cell {cell}, line {line}"))
    return Report(report.path, findings)


def _set_source(cell: dict[str, PyTree], before: str, after: str) -> None:
    if before != after:
        cell["source"] = after.splitlines(keepends=True) if isinstance(cell["source"], list) else after


def _indent(source: bytes) -> int | None:
    match = re.match(rb"\{\r?\n( +)", source)
    return len(match[1]) if match else None
