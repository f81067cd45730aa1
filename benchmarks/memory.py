# SPDX-License-Identifier: Apache-2.0
"""Peak bytes on a device and floating-point operations, as XLA's analysis of the compiled step gives them."""

import functools
import itertools
import math
from typing import Any

from benchmarks.devices import fitting
from benchmarks.parent import call_in_child
from benchmarks.report import Report, verdict

_CASES = ("mlp", "mlp_50_layers", "lstm", "transformer")
_TARGET = 1.05


def run(*, quick: bool) -> Report:
    """Measures each model on each number of devices, in a process of its own."""
    report = Report(
        "memory",
        "Peak bytes on one device, and flops (Phalanx / hand-written)",
        ("model", "replicas", "hand-written kB", "Phalanx kB", "ratio", "target", "flops ratio"),
    )
    rows = itertools.product(_CASES, fitting((1, 2) if quick else (1, 2, 4)))
    report.measure(functools.partial(_add, report, *row) for row in rows)
    return report


def _add(report: Report, case: str, replicas: int) -> None:
    raw = call_in_child("benchmarks.memory:measure", 300, devices=replicas, case=case)
    hand, ours = (_peak_bytes(raw[p]) for p in ("handwritten", "phalanx"))
    row = [case, replicas, f"{hand / 1e3:.0f}", f"{ours / 1e3:.0f}", ours / hand]
    flops = raw["phalanx"]["flops"] / raw["handwritten"]["flops"]
    report.add([*row, verdict(ours / hand, at_most=_TARGET), flops], case=case, replicas=replicas, **raw)


def measure(case: str) -> dict[str, dict[str, float]]:
    """In a child: compiles both programs and returns what XLA says of them."""
    from benchmarks.handwritten import HandWritten
    from benchmarks.with_phalanx import WithPhalanx

    hand, ours = HandWritten(case), WithPhalanx(case)
    return {
        "handwritten": _analysis(hand.step.lower(hand.state, *hand.batch)),
        "phalanx": _analysis(ours.lowered()),
    }


def _analysis(lowered: Any) -> dict[str, float]:
    compiled = lowered.compile()
    found = compiled.memory_analysis()
    names = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
    return {name: getattr(found, name) for name in names} | {"flops": compiled.cost_analysis().get("flops", math.nan)}


def _peak_bytes(analysis: dict[str, float]) -> float:
    own_output = analysis["output_size_in_bytes"] - analysis["alias_size_in_bytes"]
    return analysis["argument_size_in_bytes"] + own_output + analysis["temp_size_in_bytes"]
