# SPDX-License-Identifier: Apache-2.0
"""The report of `make gpu`: Markdown, and the same as JSON beside it."""

import dataclasses
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parent import ROOT

MEMORY = "memory of a process"
"""The section of the machine whose keys are the names of the devices."""

OUTCOMES = "PHALANX_OUTCOMES"
"""The environment variable that names the file of the outcomes of tests: one JSON object per line."""

_LOG_CHARACTERS = 20_000


@dataclass
class Part:
    """One process of `make gpu`, and what it left.

    Args:
      name: as in the report.
      result: passed, failed, skipped (no row fits), left out or not run.
      why: the reason of a result; empty if it has none.
      seconds: how long the part took.
      outcomes: of each test: its name, its outcome, its row of the table of strategies, the reason or error.
      table: the JSON of a benchmark.
      log: all that the process has printed.
    """

    name: str
    result: str = "not run"
    why: str = ""
    seconds: float = 0.0
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    table: dict[str, Any] | None = None
    log: str = ""

    def add_outcomes(self, lines: Iterable[dict[str, Any]]) -> None:
        """Adds the outcomes of tests. A test without one was running when the process ended."""
        for line in lines:
            if self.outcomes and self.outcomes[-1]["outcome"] == "started":
                self.outcomes.pop()
            self.outcomes.append(line)
        if self.outcomes and self.outcomes[-1]["outcome"] == "started":
            self.outcomes[-1] |= {"outcome": "failed", "row": None, "text": f"was running; {self.why}"}
        if self.result == "passed" and not self.count("passed"):
            self.result, self.why = "skipped", "no row fits"

    def count(self, outcome: str) -> int:
        """Returns how many tests had this outcome."""
        return sum(each["outcome"] == outcome for each in self.outcomes)

    def errors(self) -> list[tuple[str, str]]:
        """Returns titles and texts of all errors. The log is one if it is the only witness of a failure."""
        found = [(each["test"], each["text"]) for each in self.outcomes if each["outcome"] == "failed"]
        found += [(self.name, text) for text in (self.table or {}).get("failures", ())]
        if self.result == "failed" and not (found and self.why == "exit status 1"):
            found.append((f"{self.name}: log", self.log[-_LOG_CHARACTERS:]))
        return found


@dataclass
class Report:
    """All parts, and the machine.

    Args:
      out: the file of the report.
      parts: in the order in which they run.
      python: its version.
      is_quick: whether the parts run in their quick forms.
      machine: facts by section; None if they are unknown.
    """

    out: Path
    parts: list[Part]
    python: str
    is_quick: bool
    machine: dict[str, dict[str, str]] | None = None

    def write(self) -> None:
        """Writes both files. An interruption leaves the files of the previous part."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"python": self.python, "is_quick": self.is_quick, "machine": self.machine}
        content["parts"] = [dataclasses.asdict(part) for part in self.parts]
        _replace(self.out.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
        _replace(self.out, self.markdown())

    def markdown(self) -> str:
        """Returns the report as Markdown."""
        sections = [self._summary(), self._machine(), self._parts(), self._rows()]
        sections += [_benchmark(part.name, part.table) for part in self.parts if part.table]
        return "\n\n".join([*sections, self._errors()]) + "\n"

    def _summary(self) -> str:
        results = Counter(part.result for part in self.parts)
        lines = [
            "# Report of `make gpu`",
            "Parts: " + ", ".join(f"{n} {result}" for result, n in results.items()) + ".",
        ]
        if self.is_quick:
            lines.append("`--quick`: one test and one row per benchmark. The figures mean nothing.")
        if self.machine and all(name.startswith("cpu:") for name in self.machine[MEMORY]):
            lines.append("**JAX found no GPU.** All parts ran on CPU devices.")
        if self.machine:
            lines.append(f"Rows that need more replicas than {len(self.machine[MEMORY])} were not measured.")
        return "\n\n".join(lines)

    def _machine(self) -> str:
        if self.machine is None:
            return f"## Machine\n\nUnknown; Python {self.python}."
        promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
        rows = [(section, name, value) for section, facts in self.machine.items() for name, value in facts.items()]
        table = _table(("", "", ""), rows)
        return f"## Machine\n\nPhalanx supports {', '.join(promised)}.\n\n{table}"

    def _parts(self) -> str:
        rows = [
            (part.name, part.result, f"{part.seconds:.0f}", *map(part.count, ("passed", "failed", "skipped")), part.why)
            for part in self.parts
        ]
        return "## Parts\n\n" + _table(("part", "result", "s", "tests passed", "failed", "skipped", "why"), rows)

    def _rows(self) -> str:
        outcomes = [each for part in self.parts for each in part.outcomes]
        if not outcomes:
            return "## Contract rows\n\nNo test ran."
        rows = []
        for name in dict.fromkeys(each["row"] for each in outcomes):
            own = [each for each in outcomes if each["row"] == name]
            counts = Counter(each["outcome"] for each in own)
            reasons = dict.fromkeys(each["text"].strip() for each in own if each["outcome"] == "skipped")
            title = name or "tests that take no row"
            rows.append((title, *(counts[o] for o in ("passed", "failed", "skipped")), "; ".join(reasons)))
        return "## Contract rows\n\n" + _table(("row", "passed", "failed", "skipped", "why skipped"), rows)

    def _errors(self) -> str:
        errors = [error for part in self.parts for error in part.errors()]
        blocks = [f"### {title}\n\n~~~~\n{text.rstrip()}\n~~~~" for title, text in errors]
        return "\n\n".join(["## Errors", *(blocks or ["None."])])


def _benchmark(name: str, table: dict[str, Any]) -> str:
    return f"## {name.capitalize()}\n\n{table['title']}\n\n{_table(table['columns'], table['rows'])}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
