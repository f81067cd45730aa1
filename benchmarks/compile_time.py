# SPDX-License-Identifier: Apache-2.0
"""The time of the first call, which traces and compiles, at 8 replicas beside 1."""

import time

from benchmarks import timing
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_CASES = ("mlp", "transformer")
_TARGET = 1.2
_PROGRAMS = {"Phalanx": "phalanx", "hand-written": "handwritten"}


def run(*, quick: bool) -> Report:
    """Measures each model, each time in a fresh process."""
    report = Report(
        "compile",
        "Trace and compile time at 8 replicas against 1 (8 replicas / 1 replica)",
        ("model", "program", "1 replica s", "8 replicas s", "ratio", "target", "all rounds"),
    )
    for case in _CASES[:1] if quick else _CASES:
        for title, program in _PROGRAMS.items():
            rounds = timing.interleaved(
                lambda: _first_call(8, case, program),  # noqa: B023
                lambda: _first_call(1, case, program),  # noqa: B023
                2 if quick else 5,
            )
            eight_s, one_s = timing.medians(rounds)
            ratio = timing.median_ratio(rounds)
            target = verdict(ratio, at_most=_TARGET) if program == "phalanx" else verdict(ratio)
            report.add(
                [case, title, one_s, eight_s, ratio, target, all_rounds(rounds)],
                case=case,
                program=program,
                ratio=ratio,
                rounds=rounds,
            )
    return report


def _first_call(devices: int, case: str, program: str) -> float:
    return call_in_child("benchmarks.compile_time:measure", 300, devices=devices, case=case, program=program)


def measure(case: str, program: str) -> float:
    """In a child: the time of the first step less that of a later one."""
    from benchmarks.handwritten import HandWritten
    from benchmarks.with_phalanx import WithPhalanx, wait

    step = WithPhalanx(case) if program == "phalanx" else HandWritten(case)
    start = time.perf_counter()
    wait(step())
    first_s = time.perf_counter() - start
    return first_s - min(timing.seconds_a_step(step, wait, 1) for _ in range(5))
