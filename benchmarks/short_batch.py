# SPDX-License-Identifier: Apache-2.0
"""A step on a short batch, whose replicas have different numbers of rows, against a step on a full batch."""

import functools
import time
from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.devices import fitting
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_CASES = ("mlp", "lstm", "transformer", "cnn")
_AT_MOST = {"first call": 2.5, "step": 1.1}


def run(*, quick: bool) -> Report:
    """Measures each model: first calls in fresh processes, then steps in turns."""
    report = Report(
        "short_batch",
        "A step of 2 replicas on a batch that lacks one row against a full batch (short / full)",
        ("model", "what", "full ms", "short ms", "ratio", "target", "all rounds"),
    )
    cases = [case for case in (_CASES[:1] if quick else _CASES) for _ in fitting((2,))]
    rows = [functools.partial(_add, report, case, what, quick) for case in cases for what in ("first call", "step")]
    report.measure(rows)
    return report


def _add(report: Report, case: str, what: str, quick: bool) -> None:
    if what == "step":
        rounds = call_in_child("benchmarks.short_batch:measure", 300, devices=2, case=case, rounds=3 if quick else 15)
    else:
        first_calls = [functools.partial(_first_call, case, missing) for missing in (1, 0)]
        rounds = timing.interleaved(*first_calls, 2 if quick else 5)
    short_s, full_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    row = [case, what, full_s * 1e3, short_s * 1e3, ratio, verdict(ratio, at_most=_AT_MOST[what]), all_rounds(rounds)]
    report.add(row, case=case, what=what, ratio=ratio, rounds=rounds)


def _first_call(case: str, missing: int) -> float:
    return call_in_child("benchmarks.short_batch:first_call", 300, devices=2, case=case, missing=missing)


def first_call(case: str, missing: int) -> float:
    """In a child: the time of the first step, which traces and compiles. Another program has warmed up JAX."""
    from benchmarks.with_phalanx import wait

    for each in ("small_mlp", case):
        (step,) = _steps(each, [missing])
        start = time.perf_counter()
        wait(step())
    return time.perf_counter() - start


def measure(case: str, rounds: int) -> list[timing.Pair]:
    """In a child: times steps on a short batch and on a full one in turns."""
    from benchmarks.with_phalanx import wait

    steps = _steps(case, [1, 0])
    count = max(timing.steps_for(step, wait, 0.3) for step in steps)
    timers = [functools.partial(timing.seconds_a_step, step, wait, count) for step in steps]
    return timing.interleaved(*timers, rounds)


def _steps(case: str, missing: list[int]) -> list[Callable[[], Any]]:
    """Returns training steps of one model, on batches that lack some rows."""
    import keras

    import phalanx
    from benchmarks.models import CASES
    from benchmarks.with_phalanx import train_step

    strategy = phalanx.MirroredStrategy()
    step = train_step(strategy, lambda: CASES[case].model(keras))
    x, y = CASES[case].batch(strategy.num_replicas_in_sync)
    batches = [(x[: len(x) - rows], y[: len(y) - rows]) for rows in missing]
    distributed = [next(iter(strategy.experimental_distribute_dataset([batch]))) for batch in batches]
    return [functools.partial(strategy.run, step, args=(batch,)) for batch in distributed]
