# SPDX-License-Identifier: Apache-2.0
"""Rows a second through the distributed iterator, beside `jax.device_put`, Keras's data path in `fit`, and torch.

Beside `device_put` both hand out the same slices of the same arrays, in one process, and the same compiled program uses
them. "copied" are arrays as NumPy allocates them; "shared" begin at a multiple of 64 bytes, so that on the CPU
`device_put` copies nothing, and a change of the array changes the batch. Phalanx copies them, so they have no target.
"""

import math
from typing import Any

from benchmarks import batches, peers, timing
from benchmarks.parent import Child, call_in_child
from benchmarks.report import Report, all_rounds, verdict

_SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "4 MB": 1 << 22, "16 MB": 1 << 24}
_USES = ("is waited for", "is summed", "trains")
_TARGET, _TARGET_BYTES = 0.95, 1 << 20
_TURN_S = 0.1
_LOADERS = [("rows collated", 0, False), ("rows collated", 2, False), ("batches sliced", 0, True)]
_OURS = "benchmarks.input_passes"


def run(*, quick: bool) -> Report:
    """Measures each size of a batch against each peer."""
    report = Report(
        "input",
        "Rows/s of the distributed iterator (other's time / Phalanx time); beside device_put target 0.95 from 1 MB on",
        (
            "against",
            "a batch",
            "replicas",
            "batch",
            "other's rows/s",
            "Phalanx rows/s",
            "ratio",
            "target",
            "middle half",
            "all rounds",
        ),
    )
    _against_device_put(report, quick)
    _against_fit(report, quick)
    _against_torch(report, quick)
    return report


def _against_device_put(report: Report, quick: bool) -> None:
    options = {"rounds": 3, "turns": 1} if quick else {"rounds": 7, "turns": 1}
    for replicas in (2,) if quick else (2, 1, 4):
        for aligned in (False, True):
            for use in _USES:
                for size in ("1 MB", "16 MB") if quick or replicas != 2 else _SIZES:
                    case = {"batch_bytes": _SIZES[size], "use": use, "aligned": aligned}
                    raw = call_in_child(f"{_OURS}:measure", 300, devices=replicas, **case, **options)
                    target = _TARGET if _SIZES[size] >= _TARGET_BYTES and not aligned else None
                    against = f"device_put, {'shared' if aligned else 'copied'}"
                    _add(report, [against, use, replicas, size], raw["rounds"], target)


def _against_fit(report: Report, quick: bool) -> None:
    for replicas in (1, 2):
        for size in ("1 MB",) if quick else _SIZES:
            with Child(replicas) as peer, Child(replicas) as ours:
                case = {"batch_bytes": _SIZES[size]}
                sums = [
                    peer.call("benchmarks.keras_fit:prepare", 120, devices=replicas, **case),
                    ours.call(f"{_OURS}:prepare", 120, in_step=True, **case),
                ]
                rounds = _rounds((peer, "benchmarks.keras_fit"), (ours, _OURS), sums, quick)
            _add(report, ["Keras fit", "is summed", replicas, size], rounds)


def _against_torch(report: Report, quick: bool) -> None:
    python = str(peers.interpreter("torch", peers.TORCH))
    for title, workers, slices in _LOADERS:
        for size in ("1 MB",) if quick else _SIZES:
            with Child(python=python) as peer, Child(1) as ours:
                case = {"batch_bytes": _SIZES[size]}
                sums = [
                    peer.call("benchmarks.torch_peer:prepare", 120, workers=workers, slices=slices, **case),
                    ours.call(f"{_OURS}:prepare", 120, in_step=False, **case),
                ]
                rounds = _rounds((peer, "benchmarks.torch_peer"), (ours, _OURS), sums, quick)
            _add(report, [f"torch, {title}, {workers} workers", "is waited for", 1, size], rounds)


def _rounds(peer: Any, ours: Any, sums: list[float], quick: bool) -> list[timing.Pair]:
    if not math.isclose(*sums, rel_tol=1e-3):
        raise AssertionError(f"the two read different rows: {sums}")
    calls = [_timer(*peer), _timer(*ours)]
    return timing.interleaved(*calls, *((3, 1) if quick else (7, 1)))


def _timer(child: Child, module: str) -> Any:
    seconds = lambda passes: child.call(f"{module}:seconds_a_pass", 120, passes=passes)  # noqa: E731
    passes = max(1, math.ceil(_TURN_S / seconds(1)))
    return lambda: seconds(passes)


def _add(report: Report, case: list[Any], rounds: list[timing.Pair], target: float | None = None) -> None:
    against, use, replicas, size = case
    rows = batches.count_of(_SIZES[size]) * batches.rows_of(_SIZES[size])
    other_s, phalanx_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    speeds = [f"{rows / other_s:.0f}", f"{rows / phalanx_s:.0f}"]
    row = [*case, *speeds, ratio, verdict(ratio, at_least=target), timing.middle_half(rounds), all_rounds(rounds)]
    raw = {"against": against, "use": use, "replicas": replicas, "batch_bytes": _SIZES[size], "rows": rows}
    report.add(row, **raw, ratio=ratio, rounds=rounds)
