# SPDX-License-Identifier: Apache-2.0
"""The time of one `strategy.run(train_step)`, beside the step an expert writes."""

import functools
import itertools
import math
from typing import Any

from benchmarks import timing
from benchmarks.devices import fitting
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_CASES = ("mlp", "mlp_50_layers", "lstm", "transformer")
_TARGET = 0.98
_TURN_S = 0.05


def run(*, quick: bool) -> Report:
    """Measures each model on each number of devices, in a process of its own."""
    report = Report(
        "step",
        "Speed of strategy.run against a hand-written jitted shard_map (hand-written time / Phalanx time)",
        (
            "model",
            "replicas",
            "hand-written steps/s",
            "Phalanx steps/s",
            "ratio",
            "target",
            "middle half",
            "all rounds",
        ),
    )
    rows = itertools.product(_CASES, fitting((1, 2) if quick else (1, 2, 4)))
    report.measure(functools.partial(_add, report, quick, *row) for row in rows)
    return report


def _add(report: Report, quick: bool, case: str, replicas: int) -> None:
    options = {"rounds": 3, "turns": 3} if quick else {"rounds": 11, "turns": 8}
    raw = call_in_child("benchmarks.step:measure", 300, devices=replicas, case=case, **options)
    rounds = raw["rounds"]
    hand_s, phalanx_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    speeds = [f"{1 / hand_s:.1f}", f"{1 / phalanx_s:.1f}"]
    row = [case, replicas, *speeds, ratio, verdict(ratio, at_least=_TARGET), timing.middle_half(rounds)]
    report.add([*row, all_rounds(rounds)], case=case, replicas=replicas, ratio=ratio, **raw)


def measure(case: str, rounds: int, turns: int) -> dict[str, Any]:
    """In a child: checks that both programs compute the same, then times them in turn."""
    from benchmarks.handwritten import HandWritten
    from benchmarks.with_phalanx import WithPhalanx, wait

    hand, ours = HandWritten(case), WithPhalanx(case)
    losses = [(sum(wait(hand())), sum(wait(ours()))) for _ in range(10)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in losses):
        raise AssertionError(f"the two programs compute different losses: {losses}")
    count = timing.steps_for(hand, wait, _TURN_S)
    results = timing.interleaved(
        lambda: timing.seconds_a_step(hand, wait, count),
        lambda: timing.seconds_a_step(ours, wait, count),
        rounds,
        turns,
    )
    return {"rounds": results, "steps_a_turn": count, "losses": losses}
