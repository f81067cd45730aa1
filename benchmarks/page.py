# SPDX-License-Identifier: Apache-2.0
"""Writes docs/benchmark_report.md from the last full run of each benchmark: `python -m benchmarks.page`.

docs/benchmark_report.json     what the runs have written, of which this page shows the tables
docs/images/bench_ratios.svg   speed relative to other libraries
docs/images/bench_ranks.svg    work of the first process of a cluster

A benchmark that has not run again keeps its older result.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.parent import ROOT
from benchmarks.report import RESULTS

Results = Mapping[str, Any]
"""The JSON of a report, or those of all by name."""

_COMPARED = ("models", "fit", "multi_worker", "tensorflow", "step")
_OF_RANK_0 = ("meet s", "rank 0 CPU s", "agree s", "death known s")
_PARTIAL = re.compile(r"--(quick|case)\b")
"""The options of runs that are not full."""
_VERDICT = re.compile(r"(met|MISSED) \(")
_PICTURES = {
    "bench_ratios": "Speed relative to other libraries: each point is the median of a row, 1 is equal speed",
    "bench_ranks": "The first process of a cluster whose other processes are simulated",
}


def merged(kept: Results, folder: Path) -> dict[str, Any]:
    """Returns the results that are kept, with those of a folder that are from full runs instead."""
    new = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    full = {
        name: result for name, result in new.items() if "command" in result and not _PARTIAL.search(result["command"])
    }
    return dict(sorted({**kept, **full}.items()))


def written(results: Results, pictures: Iterable[str]) -> str:
    """Returns the page.

    Args:
      results: of benchmarks, by name.
      pictures: the names of those that were drawn.
    """
    lines = [
        "# Benchmark report",
        "",
        "The last full run of each benchmark, written by `make bench-report`. [Benchmarks](benchmarks.md) explains the figures, and",
        "`docs/benchmark_report.json` has all numbers. Every row prints all of its rounds, or their median and middle half.",
        "",
        "## Summary",
        "",
        "| benchmark | targets met | missed | date | command |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        verdicts = [match[1] for row in result["rows"] for cell in row if (match := _VERDICT.match(cell))]
        counts = f"{verdicts.count('met')} | {verdicts.count('MISSED')}"
        lines.append(f"| [`{name}`](#{name.replace('_', '-')}) | {counts} | {result['date']} | `{result['command']}` |")
    for picture in pictures:
        lines += ["", f"![{_PICTURES[picture]}](images/{picture}.svg)"]
    for name, result in results.items():
        machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
        lines += [
            "",
            f"## {_title(name)}",
            "",
            f"{result['title']}.",
            "",
            f"{result['date']}, `{result['command']}`; {machine}.",
        ]
        lines += ["", _row(result["columns"]), "|" + "---|" * len(result["columns"])]
        lines += map(_row, result["rows"])
        if result["failures"]:
            lines += ["", f"Rows that failed: {len(result['failures'])}."]
    lines += [
        "",
        "## Where to go next",
        "",
        "[Measure and profile a script](speed.md) shows where your own steps spend their time.",
    ]
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def ratios_of(results: Results) -> list[tuple[str, float]]:
    """Returns the benchmark and the ratio of each row that compares Phalanx with another library."""
    compared = [(name, row) for name in _COMPARED if name in results for row in results[name]["measurements"]]
    # Lower is better for first steps. Several processes have one ratio per kind of loop.
    compared = [(name, row) for name, row in compared if not row.get("first_step")]
    ratios = [(name, row.get("ratio") or row.get("ratios", {}).get("loop")) for name, row in compared]
    return [(name, ratio) for name, ratio in ratios if ratio is not None]


def times_of_ranks(results: Results) -> dict[str, list[tuple[int, float]]]:
    """Returns numbers of processes and times in seconds, for each kind of work of the first process."""
    if "scale" not in results:
        return {}
    columns, rows = results["scale"]["columns"], results["scale"]["rows"]
    return {name: [(int(row[0]), float(row[columns.index(name)])) for row in rows] for name in _OF_RANK_0}


def draw(results: Results, folder: Path) -> list[str]:
    """Draws the pictures for which there are results, and returns their names."""
    from matplotlib.figure import Figure

    pictures = {}
    if points := ratios_of(results):
        pictures["bench_ratios"] = figure = Figure((8, 3), layout="tight")
        axes = figure.subplots()
        axes.scatter([ratio for _, ratio in points], [name for name, _ in points], alpha=0.6)
        axes.axvline(1.0, color="gray", linewidth=1)
        axes.set(xscale="log", xlabel="time of the other / time of Phalanx")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
    if lines := times_of_ranks(results):
        pictures["bench_ranks"] = figure = Figure((8, 3), layout="tight")
        axes = figure.subplots()
        for name, line in lines.items():
            axes.plot(*zip(*line, strict=True), "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="seconds")
        axes.legend()
    for name, figure in pictures.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return list(pictures)


def main() -> None:
    """Writes the page, its numbers and its pictures."""
    numbers = ROOT / "docs" / "benchmark_report.json"
    results = merged(json.loads(numbers.read_text()) if numbers.exists() else {}, RESULTS)
    numbers.write_text(json.dumps(results, indent=1) + "\n")
    pictures = draw(results, ROOT / "docs" / "images")
    (ROOT / "docs" / "benchmark_report.md").write_text(written(results, pictures))


if __name__ == "__main__":
    main()
