# SPDX-License-Identifier: Apache-2.0
"""All-reduces of one array between two processes of this machine, by its size.

Through Phalanx and by hand-written JAX it is a compiled program of one all-reduce, whose result is a new array; torch sums
in place. All three are gloo's. The bandwidth is the size of the array divided by the time.
"""

import sys
from contextlib import ExitStack

from benchmarks import peers, timing
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.workers import Program, Workers, interleaved, require_same

_WORKERS = 2
_SIZES = {"4 KB": 1 << 12, "64 KB": 1 << 16, "1 MB": 1 << 20, "4 MB": 1 << 22, "16 MB": 1 << 24, "64 MB": 1 << 26}
_OURS, _OTHERS = "Phalanx", ("hand-written JAX", "torch gloo, 1 thread")
_MODULES = {
    _OURS: "benchmarks.workers_phalanx",
    _OTHERS[0]: "benchmarks.workers_jax",
    _OTHERS[1]: "benchmarks.workers_torch",
}
_TURN_S = 0.2


def run(*, quick: bool) -> Report:
    """Measures each size, the processes of all alive and only those of one at work."""
    report = Report(
        "all_reduce",
        f"All-reduces between {_WORKERS} processes (other's time / Phalanx time)",
        ("array", "against", "its GB/s", "Phalanx GB/s", "ratio", "target", "middle half", "all rounds"),
    )
    pythons = [sys.executable, sys.executable, str(peers.interpreter("torch", peers.TORCH))]
    with ExitStack() as stack:
        workers = [stack.enter_context(Workers(_WORKERS, python)) for python in pythons]
        for size in ("4 KB", "1 MB", "64 MB") if quick else _SIZES:
            _add(report, dict(zip(_MODULES, workers, strict=True)), size, *((3, 1) if quick else (11, 3)))
    return report


def _add(report: Report, processes: dict[str, Workers], size: str, rounds: int, turns: int) -> None:
    size_bytes = _SIZES[size]
    programs = {
        name: Program(workers, _MODULES[name], "prepare_all_reduce", size, turn_s=_TURN_S, size_bytes=size_bytes)
        for name, workers in processes.items()
    }
    require_same(size, *(program.numbers for program in programs.values()))
    seconds = interleaved(programs, rounds, turns)
    for other in _OTHERS:
        pairs = list(zip(seconds[other], seconds[_OURS], strict=True))
        ratio = timing.median_ratio(pairs)
        speeds = [f"{size_bytes / s / 1e9:.3f}" for s in timing.medians(pairs)]
        row = [size, other, *speeds, ratio, verdict(ratio), timing.middle_half(pairs), all_rounds(pairs)]
        report.add(row, size_bytes=size_bytes, against=other, ratio=ratio, rounds=pairs)
