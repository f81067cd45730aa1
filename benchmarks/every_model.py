# SPDX-License-Identifier: Apache-2.0
"""`fit` of ten models on two replicas, beside tf.distribute and Keras's own `DataParallel` on JAX.

All train with Adam in global batches of 64 rows, from the same weights on the same batches. Losses are compared before anything is
timed. Beside Keras, both also compute an accuracy.
"""

import statistics

from benchmarks import against_tensorflow, fit, peers, timing
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.zoo import ZOO

_LEAST = {"tf.distribute 2.21": 1.5, "Keras DataParallel": 1.0}
_MEDIAN = 3.0
_TOLERANCE = 0.05
"""Phalanx normalizes the batch of a replica, as tf.distribute does, and Keras's DataParallel the global batch."""


def run(*, quick: bool) -> Report:
    """Measures each model, both processes alive and only one at work."""
    report = Report(
        "models",
        "Speed of fit, two replicas, global batch 64, Adam (time of the other / time of Phalanx)",
        ("model", "beside", "its steps/s", "Phalanx steps/s", "ratio", "target", "middle half", "all rounds"),
    )
    python = peers.interpreter("tensorflow", peers.TENSORFLOW)
    theirs, ours = against_tensorflow.PEERS["fit"], against_tensorflow.OURS["fit", "Phalanx"]
    found = []
    for case in list(ZOO)[:1] if quick else ZOO:
        rounds = against_tensorflow.rounds_of(python, case, theirs, ours, 2, *((3, 1) if quick else (9, 3)))
        found.append(_add(report, case, "tf.distribute 2.21", rounds))
        _, rounds = fit.rounds_of(case, 1, 1, 3 if quick else 9, _TOLERANCE)
        _add(report, case, "Keras DataParallel", rounds)
    median = statistics.median(found)
    target = verdict(median, at_least=_MEDIAN)
    report.add(["median", "tf.distribute 2.21", "", "", median, target, "", ""], case="median", ratio=median)
    return report


def _add(report: Report, case: str, beside: str, rounds: list[timing.Pair]) -> float:
    theirs_s, ours_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    row = [case, beside, f"{1 / theirs_s:.1f}", f"{1 / ours_s:.1f}", ratio, verdict(ratio, at_least=_LEAST[beside])]
    report.add(
        [*row, timing.middle_half(rounds), all_rounds(rounds)], case=case, beside=beside, ratio=ratio, rounds=rounds
    )
    return ratio
