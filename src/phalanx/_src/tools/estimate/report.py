# SPDX-License-Identifier: Apache-2.0
"""Shows predictions: as a table in the terminal, and as a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx._src.tools.estimate.prediction import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = ("topology", "replicas", "rows", "memory", "full", "FLOP", "exchanged", "step", "efficiency", "bound by")
_WIDTH = 110


def print_table(name: str, estimates: Sequence[Estimate]) -> None:
    """Prints predictions as a table, and the collectives and the advice below it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    # In a pipe, Rich assumes 80 columns and would fold the cells.
    console.width = max(console.width, _WIDTH)
    table = Table(title=f"One step of {name}: predicted, not run", box=box.SIMPLE, padding=(0, 1), title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("topology", "bound by") else "right", overflow="fold")
    for estimate in estimates:
        table.add_row(*_cells(estimate))
    console.print(table)
    for estimate in estimates:
        for line in _notes(estimate):
            console.print(line, markup=False, soft_wrap=True)


def picture(name: str, estimates: Sequence[Estimate]) -> "Figure":
    """Draws the memory per device and the speed of all devices. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    names = [e.topology for e in estimates]
    places = range(len(names))
    persistent_gb = [(e.memory.peak - e.memory.temporary) / 1e9 for e in estimates]
    memory.bar(places, persistent_gb, label="variables and batch")
    memory.bar(places, [e.memory.temporary / 1e9 for e in estimates], bottom=persistent_gb, label="temporary")
    # Matplotlib draws nothing for None, which stands for CPUs.
    memory.plot(places, [(e.available or 0) / 1e9 or None for e in estimates], "k_", markersize=24, label="of the chip")
    memory.set_xticks(places, names, rotation=30, ha="right")
    memory.set(title="Memory of one device", ylabel="GB")
    memory.legend()
    timed = [e for e in estimates if e.time is not None]
    counts = [e.num_devices for e in timed]
    speed.plot(counts, [e.efficiency for e in timed], "o")
    for one in timed:
        speed.annotate(one.topology, (one.num_devices, one.efficiency), textcoords="offset points", xytext=(4, 4))
    speed.set(
        title="Predicted efficiency", xlabel="devices", ylabel="speed per device, 1 = one device alone", ylim=(0, 1.1)
    )
    if counts:
        speed.set_xscale("log", base=2)
    figure.suptitle(f"One step of {name}: predicted, not run")
    return figure


def _cells(estimate: Estimate) -> list[str]:
    time, rows = estimate.time, estimate.rows_per_replica
    return [
        estimate.topology,
        f"{estimate.num_replicas:,}",
        "" if rows is None else f"{rows:,}",
        amount(estimate.memory.peak, "B"),
        "" if estimate.available is None else f"{estimate.memory.peak / estimate.available:.0%}",
        amount(estimate.flops, ""),
        # The compiler reports nothing else about a program that does not fit.
        amount(estimate.communicated, "B") if estimate.fits or estimate.collectives else "",
        "" if time is None else duration(time.step),
        "" if estimate.efficiency is None else f"{estimate.efficiency:.0%}",
        "does not fit" if not estimate.fits else "" if time is None else time.bound,
    ]


def _notes(estimate: Estimate) -> list[str]:
    lines = []
    if not estimate.fits:
        assert estimate.available is not None
        lines.append(
            f"{estimate.topology} does not fit: a device needs {amount(estimate.memory.peak, 'B')} and has "
            f"{amount(estimate.available, 'B')}."
        )
        lines.append(f"HINT: {estimate.advice or _LAST_RESORT}")
    if estimate.collectives:
        lines.append(f"{estimate.topology}: {', '.join(_kinds(estimate))}")
    if estimate.transfers:
        lines.append(f"{estimate.topology}: {estimate.transfers} transfers between device and host in a step")
    return lines


_LAST_RESORT = (
    'more devices per replica: model_axis=("model", 8) with a layout; or less to keep for the backward pass: '
    "keras.remat(function) around a block of layers, as in examples/large_lm.py"
)


def _kinds(estimate: Estimate) -> list[str]:
    """Returns one phrase per kind of collective and place."""
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for c in estimate.collectives:
        where = "between slices" if c.is_between_slices else f"over {len(c.group):,} devices"
        sizes.setdefault((c.kind, c.dtype, where), []).append(c.num_bytes)
    return [
        f"{len(n)} {kind}s of {amount(sum(n), 'B')} {dtype} in total, {where}"
        if len(n) > 1
        else f"1 {kind} of {amount(n[0], 'B')} {dtype} {where}"
        for (kind, dtype, where), n in sizes.items()
    ]


def amount(number: float, unit: str) -> str:
    """Returns a number with a prefix of the SI.

    Example:
      >>> amount(16_000_000_000, "B")
      '16.0 GB'
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Returns a time.

    Example:
      >>> duration(0.0123)
      '12.3 ms'
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
