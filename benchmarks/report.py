# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, JSON in `benchmarks/results`.

`PHALANX_BENCHMARK_RESULTS` names another folder. With `PHALANX_BENCHMARK_ROWS=1`, the benchmarks of `make gpu` end after
one row, to see that they work.
"""

import datetime
import functools
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.parent import ROOT
from benchmarks.timing import Pair, ratios

RESULTS = Path(os.environ.get("PHALANX_BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results")
_ROWS = int(os.environ["PHALANX_BENCHMARK_ROWS"]) if "PHALANX_BENCHMARK_ROWS" in os.environ else None
_console = Console(width=150)


@dataclass
class Report:
    """The result of one benchmark.

    Args:
      name: of the benchmark, and of its file.
      title: what is measured, and what a ratio is the ratio of.
      columns: the names of the columns.
      rows: one list of texts and numbers a row.
      raw: every round, as JSON.
      failures: the errors of rows that could not be measured.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[list[Any]] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure(self, rows: Iterable[Callable[[], None]]) -> None:
        """Calls functions that each add one or more rows. If one fails, its error is kept, and the next one follows."""
        for add in itertools.islice(rows, _ROWS):
            try:
                add()
            except Exception:
                self.failures.append(traceback.format_exc())
                self.write()

    def add(self, row: list[Any], **raw: Any) -> None:
        """Adds a row and the numbers behind it, shows it and writes the file."""
        self.rows.append(row)
        self.raw.append(raw)
        _console.print("  ".join(map(text_of, row)), style="dim", highlight=False)
        self.write()

    def show(self) -> None:
        """Prints the table and the errors, and writes the file."""
        table = Table(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*map(text_of, row))
        _console.print(table)
        for failure in self.failures:
            _console.print(failure, style="red", highlight=False, markup=False)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "title": self.title,
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python -m benchmarks", self.name, *_options()]),
            "machine": _machine(),
            "columns": self.columns,
            "rows": [list(map(text_of, row)) for row in self.rows],
            "failures": self.failures,
            "measurements": self.raw,
        }
        new = RESULTS / f"{self.name}.json.new"
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(RESULTS / f"{self.name}.json")


def verdict(value: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """Says whether a figure meets its target."""
    if at_least is not None:
        return f"{'met' if value >= at_least else 'MISSED'} (>= {at_least})"
    if at_most is not None:
        return f"{'met' if value <= at_most else 'MISSED'} (<= {at_most})"
    return "no target"


def all_rounds(rounds: Sequence[Pair]) -> str:
    """Writes the ratios of all rounds."""
    return " ".join(f"{r:.2f}" for r in ratios(rounds))


def text_of(cell: Any) -> str:
    """Writes a cell of a table."""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _options() -> list[str]:
    """Returns the options of the command that runs. The names of benchmarks stand before them."""
    return list(itertools.dropwhile(lambda argument: not argument.startswith("-"), sys.argv[1:]))


@functools.cache
def _machine() -> dict[str, str]:
    """Returns facts of the machine and of the software."""
    # Here, because children that measure other libraries import this module too.
    from phalanx._src.tools.env.report import system, versions

    try:
        names = re.findall(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return {**system(), **({"processor": names[0]} if names else {}), **versions()}
