# SPDX-License-Identifier: Apache-2.0
"""Time of a step of `fit` of a model that computes nothing, so that what is left is the input, beside Keras's own `fit`.

Both run in one process in turn, on the same data. Keras uses one device: it copies nothing that is aligned or on a device, and reads
the caller's arrays while the caller may write to them.
"""

import functools
from typing import NamedTuple

from benchmarks import timing
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict


class _Case(NamedTuple):
    """What `fit` reads, and how much more time than Keras a step may take."""

    kind: str
    megabytes: float
    target: float | None
    replicas: int = 1
    steps_per_execution: int = 1
    shuffle: bool = False


_CASES = [
    *(_Case(kind, 77, 1.1) for kind in ("NumPy", "generator", "PyDataset", "JAX")),
    _Case("NumPy", 77, 0.8, shuffle=True),
    *(_Case(kind, 77, 1.2, replicas=2) for kind in ("NumPy", "JAX")),
    *(_Case(kind, 8, 1.2, steps_per_execution=16) for kind in ("NumPy", "generator", "JAX")),
    *(_Case(kind, 8, None, replicas=2, steps_per_execution=16) for kind in ("NumPy", "JAX")),
    *(_Case(kind, 0.05, 1.2) for kind in ("NumPy", "generator", "PyDataset", "JAX")),
]


def run(*, quick: bool) -> Report:
    """Measures each kind of data."""
    report = Report(
        "fit_input",
        "Keras fit of a model that computes nothing (Phalanx time / Keras time)",
        (
            "data",
            "MB a step",
            "replicas",
            "steps an execution",
            "Keras ms",
            "Phalanx ms",
            "ratio",
            "target",
            "all rounds",
        ),
    )
    report.measure(functools.partial(_add, report, case, 3 if quick else 11) for case in _CASES)
    return report


def _add(report: Report, case: _Case, rounds: int) -> None:
    options = case._asdict()
    target = options.pop("target")
    results = call_in_child("benchmarks.fit_input_epochs:measure", 600, devices=case.replicas, rounds=rounds, **options)
    ours_s, keras_s = timing.medians(results)
    ratio = timing.median_ratio(results)
    name = f"{case.kind}{', shuffled' * case.shuffle}"
    row = [name, case.megabytes, case.replicas, case.steps_per_execution, keras_s * 1e3, ours_s * 1e3, ratio]
    row += [verdict(ratio, at_most=target), all_rounds(results)]
    report.add(row, **options, ratio=ratio, rounds=results)
