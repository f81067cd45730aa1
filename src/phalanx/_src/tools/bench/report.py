# SPDX-License-Identifier: Apache-2.0
"""Shows measurements: as a table in the terminal, as a picture, and as JSON."""

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx._src.tools import results
from phalanx._src.tools.bench.session import Measured, pairs
from phalanx._src.tools.bench.timeline import NAMES, Result
from phalanx.errors.printable import printable

_WIDTH = 120


def print_table(measured: Measured) -> None:
    """Prints the results, with a sentence below for each."""
    shown = table(f"{measured.script}: medians, and milliseconds of a step")
    for column in ("devices", "replicas", "steps/s", "rows/s", "efficiency", *NAMES, "all rounds"):
        shown.add_column(column, justify="left" if column in ("devices", "all rounds") else "right", overflow="fold")
    for one in measured.results:
        shown.add_row(*_cells(one, measured.results[0]))
    terminal = console()
    terminal.print(shown)
    for one in measured.results:
        terminal.print(f"{one.name}: {one.verdict}", soft_wrap=True)
    for note in measured.notes:
        terminal.print(note, soft_wrap=True)


def print_comparison(before: Measured, after: Measured) -> None:
    """Prints how two measurements differ."""
    shown = table(
        f"{before.script}\n{after.script}\nSteps per second before and after, and how much longer each part of a step takes, in ms"
    )
    for column in ("devices", "before", "after", "ratio", *NAMES, "rounds before", "rounds after"):
        is_text = column == "devices" or column.startswith("rounds")
        shown.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for old, new in pairs(before, after):
        cells = [f"{old.steps_per_s:.2f}", f"{new.steps_per_s:.2f}", f"{new.steps_per_s / old.steps_per_s:.2f}"]
        longer = [f"{1000 * (new.parts[name] - old.parts[name]):+.2f}" for name in NAMES]
        shown.add_row(printable(old.name), *cells, *longer, _rounds(old), _rounds(new))
    terminal = console()
    terminal.print(shown)
    then = before.machine
    if differ := [
        f"{name} {then.get(name)}, then {now}" for name, now in after.machine.items() if now != then.get(name)
    ]:
        terminal.print(printable(f"The machines or libraries differ: {'; '.join(differ)}."), soft_wrap=True)


def save(measured: Measured, path: Path) -> None:
    """Writes a measurement as JSON, or draws it, depending on the suffix of the path."""
    if path.suffix == ".json":
        runs = [one.as_json() for one in measured.results]
        report = {"script": measured.script, "machine": measured.machine, "results": runs, "notes": measured.notes}
        results.save(path, json.dumps(report, indent=2))
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, parts = figure.subplots(1, 2)
    names, places = [one.name for one in measured.results], range(len(measured.results))
    speed.bar(places, [one.rows_per_s or one.steps_per_s for one in measured.results])
    speed.set(title="Speed", ylabel="rows per second" if measured.results[0].rows_per_s else "steps per second")
    below = [0.0] * len(measured.results)
    for name in NAMES:
        heights = [1000 * one.parts[name] for one in measured.results]
        parts.bar(places, heights, bottom=below, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    parts.set(title="Parts of a step", ylabel="ms")
    parts.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (speed, parts):
        axes.set_xticks(places, names, rotation=20, ha="right")
    figure.suptitle(measured.script)
    results.save(path, figure)


def table(title: str) -> Table:
    """Returns a table without columns."""
    return Table(title=Text(printable(title)), box=box.SIMPLE, padding=(0, 1), title_justify="left")


def console() -> Console:
    """Returns a console that is wide enough for a table."""
    # Names of scripts may have brackets, which Rich would take for markup.
    terminal = Console(highlight=False, markup=False)
    # In a pipe, Rich assumes 80 columns and would fold the cells.
    terminal.width = max(terminal.width, _WIDTH)
    return terminal


def _cells(one: Result, first: Result) -> list[str]:
    efficiency = one.efficiency(first)
    return [
        one.name,
        f"{one.replicas}",
        f"{one.steps_per_s:.2f}",
        "" if one.rows_per_s is None else f"{one.rows_per_s:,.0f}",
        "" if efficiency is None else f"{efficiency:.0%}",
        *(f"{1000 * one.parts[name]:.2f}" for name in NAMES),
        _rounds(one),
    ]


def _rounds(one: Result) -> str:
    return " ".join(f"{x:.2f}" for x in one.rounds)
