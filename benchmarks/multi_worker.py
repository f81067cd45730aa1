# SPDX-License-Identifier: Apache-2.0
"""The speed of a step on several processes of this machine, one device each, beside other libraries on as many.

All train the same MLP on the same batch, 64 rows a worker, with Adam in float32. The processes of all are alive at the
same time; those of one program work, and all others wait. JAX has the threads that `phalanx run` gives it; the other
libraries are measured with 1 and with 2 threads a process. All are started several times: how fast gloo is between two
processes, and so their ratio, differs by 5% from one start to the next.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import peers, timing
from benchmarks.models import MLP
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.workers import Program, Workers, interleaved, require_same

_TURN_S = 0.3
_LOOP = "loop"
_FITS = {"fit": 1, "fit, 16 an execution": 16}
_TARGETS = {"hand-written JAX": 0.97, "tf.distribute RING": 2.0, "torch DDP": 1.2}


@dataclass(frozen=True)
class _Library:
    """What the processes of a library run.

    Args:
      module: the module of this package.
      programs: of each program the function that prepares it, and its options.
      peer: the name and the packages of their environment; None is this one.
    """

    module: str
    programs: Mapping[str, tuple[str, dict[str, Any]]]
    peer: tuple[str, Sequence[str]] | None = None

    def prepared(self, stack: ExitStack, workers: int) -> dict[str, Program]:
        """Starts the processes, until `stack` closes, and prepares the programs there."""
        python = str(peers.interpreter(*self.peer)) if self.peer else sys.executable
        processes = stack.enter_context(Workers(workers, python))
        return {
            name: Program(processes, self.module, function, name, turn_s=_TURN_S, **options)
            for name, (function, options) in self.programs.items()
        }


_PHALANX = _Library(
    "benchmarks.workers_phalanx",
    {_LOOP: ("prepare_loop", {}), **{fit: ("prepare_fit", {"steps_per_execution": k}) for fit, k in _FITS.items()}},
)
_JAX = _Library("benchmarks.workers_jax", {"hand-written JAX": ("prepare_loop", {})})


def _others(threads: int) -> list[_Library]:
    """The libraries that are not on JAX, with so many threads a process."""
    options, title = {"threads": threads}, "1 thread" if threads == 1 else f"{threads} threads"
    with_tensorflow = {
        f"tf.distribute RING, {title}": ("prepare_loop", options),
        f"tf.distribute RING fit, {title}": ("prepare_fit", options),
    }
    with_torch = {f"torch DDP, {title}": ("prepare_loop", options)}
    return [
        _Library("benchmarks.workers_tensorflow", with_tensorflow, ("tensorflow", peers.TENSORFLOW)),
        _Library("benchmarks.workers_torch", with_torch, ("torch", peers.TORCH)),
    ]


def run(*, quick: bool) -> Report:
    """Measures beside all libraries on two processes, and beside hand-written JAX on other numbers of them."""
    report = Report(
        "multi_worker",
        "Steps of MultiWorkerMirroredStrategy (other's time / Phalanx time)",
        (
            "processes",
            "against",
            "its steps/s",
            "its rows/s",
            "Phalanx loop steps/s",
            "rows/s",
            "ratio",
            "target",
            *(f"ratio of {fit}" for fit in _FITS),
            "middle half",
            "all rounds of loop",
        ),
    )
    others = [library for threads in ((1,) if quick else (1, 2)) for library in _others(threads)]
    for workers in (2,) if quick else (1, 2, 4):
        libraries = [_PHALANX, _JAX, *(others if workers == 2 else [])]
        _add(report, workers, libraries, *((1, 3, 2) if quick else (5, 3, 4)))
    return report


def _add(report: Report, workers: int, libraries: Sequence[_Library], starts: int, rounds: int, turns: int) -> None:
    seconds: dict[str, list[float]] = {}
    for _ in range(starts):
        with ExitStack() as stack:
            programs = {name: p for library in libraries for name, p in library.prepared(stack, workers).items()}
            require_same("loss and weights", *(program.numbers for program in programs.values()))
            for name, of_start in interleaved(programs, rounds, turns).items():
                seconds.setdefault(name, []).extend(of_start)
    for name in seconds:
        if name not in _PHALANX.programs:
            _add_row(report, workers, name, seconds)


def _add_row(report: Report, workers: int, other: str, seconds: dict[str, list[float]]) -> None:
    pairs = {ours: list(zip(seconds[other], seconds[ours], strict=True)) for ours in _PHALANX.programs}
    rounds = pairs[_LOOP]
    ratios = {ours: timing.median_ratio(p) for ours, p in pairs.items()}
    speeds = [
        cell for s in timing.medians(rounds) for cell in (f"{1 / s:.1f}", f"{MLP.per_replica_batch * workers / s:.0f}")
    ]
    loop, *fits = ratios.values()
    target = _TARGETS.get(other.partition(",")[0])
    row = [workers, other, *speeds, loop, verdict(loop, at_least=target), *fits]
    row += [timing.middle_half(rounds), all_rounds(rounds)]
    report.add(row, processes=workers, against=other, ratios=ratios, rounds=pairs)
