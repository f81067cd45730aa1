# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, JSON in `benchmarks/results`."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.parent import ROOT
from benchmarks.timing import Pair, ratios

RESULTS = ROOT / "benchmarks" / "results"
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
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[list[Any]] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: list[Any], **raw: Any) -> None:
        """Adds a row and the numbers behind it, and shows it at once."""
        self.rows.append(row)
        self.raw.append(raw)
        _console.print("  ".join(map(_text, row)), style="dim", highlight=False)

    def show(self) -> None:
        """Prints the table and writes the file."""
        table = Table(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*map(_text, row))
        _console.print(table)
        RESULTS.mkdir(exist_ok=True)
        content = {"name": self.name, "title": self.title, "machine": _machine(), "measurements": self.raw}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")


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


def _text(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
