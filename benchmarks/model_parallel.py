# SPDX-License-Identifier: Apache-2.0
"""Replicas of several devices and variables in parts: the time of a step, beside sharded JAX written by hand, and bytes per device."""

import math
from typing import Any

from benchmarks import timing
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.workers import Program, Workers, interleaved, require_same

# Replicas, devices of each, and over which axis variables are divided.
_MESHES = ((8, 1, None), (4, 2, "model"), (2, 4, "model"), (1, 8, "model"), (8, 1, "replica"), (4, 1, "replica"))
_QUICK = ((2, 2, "model"), (4, 1, "replica"))
_TARGET, _BYTES_TARGET = 0.97, {4: 0.30, 8: 0.17}
_PROCESSES_TARGET = 0.95
_TURN_S = 0.2


def run(*, quick: bool) -> Report:
    """Measures each mesh in a process of its own, and a mesh of several processes."""
    report = Report(
        "model_parallel",
        "Speed of strategy.run on meshes against hand-written sharded JAX (hand-written time / Phalanx time); bytes of a device",
        (
            "mesh",
            "divided over",
            "hand-written ms",
            "Phalanx ms",
            "ratio",
            "target",
            "bytes / whole",
            "target",
            "all rounds",
        ),
    )
    for replicas, size, over in _QUICK if quick else _MESHES:
        options = {"rounds": 3, "turns": 2} if quick else {"rounds": 9, "turns": 3}
        mesh: dict[str, Any] = {"replicas": replicas, "size": size, "over": over}
        raw = call_in_child("benchmarks.model_parallel:measure", 600, devices=replicas * size, **mesh, **options)
        rounds = raw["rounds"]
        hand_s, phalanx_s = timing.medians(rounds)
        ratio, part = timing.median_ratio(rounds), raw["bytes"] / raw["whole_bytes"]
        at_most = _BYTES_TARGET[replicas] if over == "replica" else None
        row = [f"{replicas} x {size}", over or "-", f"{hand_s * 1e3:.1f}", f"{phalanx_s * 1e3:.1f}", ratio]
        row += [verdict(ratio, at_least=_TARGET), part, verdict(part, at_most=at_most), all_rounds(rounds)]
        report.add(row, **mesh, ratio=ratio, **raw)
    _add_processes(report, 2, *((1, 3, 2) if quick else (3, 3, 4)))
    return report


def _add_processes(report: Report, count: int, starts: int, rounds: int, turns: int) -> None:
    """Measures processes that each hold one shard. The programs of each start wait while the other one runs."""
    pairs: list[timing.Pair] = []
    for _ in range(starts):
        with Workers(count) as hand, Workers(count) as ours:
            programs = {
                name: Program(
                    workers, f"benchmarks.workers_{name}", "prepare_sharded", name, turn_s=_TURN_S, multiple=1
                )
                for name, workers in (("jax", hand), ("phalanx", ours))
            }
            require_same("loss", *(program.numbers for program in programs.values()), rel_tol=1e-4)
            pairs += zip(*interleaved(programs, rounds, turns).values(), strict=True)
    hand_s, phalanx_s = timing.medians(pairs)
    ratio = timing.median_ratio(pairs)
    row = [f"{count} processes", "replica", f"{hand_s * 1e3:.1f}", f"{phalanx_s * 1e3:.1f}", ratio]
    row += [verdict(ratio, at_least=_PROCESSES_TARGET), "-", "-", all_rounds(pairs)]
    report.add(row, processes=count, ratio=ratio, rounds=pairs)


def measure(replicas: int, size: int, over: str | None, rounds: int, turns: int) -> dict[str, Any]:
    """In a child: checks that both programs compute the same, then times them in turn."""
    import phalanx
    from benchmarks.sharded import HandSharded
    from benchmarks.sharded_phalanx import LAYOUTS, PhalanxSharded

    axis = ("model", size) if size > 1 else None
    hand = HandSharded(replicas, size, over)
    ours = PhalanxSharded(phalanx.MirroredStrategy(model_axis=axis, layout=LAYOUTS[over]))
    losses = [(hand.loss(), ours.loss()) for _ in range(5)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in losses):
        raise AssertionError(f"the two programs compute different losses: {losses}")
    wait = lambda result: result.block_until_ready()  # noqa: E731
    count = timing.steps_for(hand, wait, _TURN_S)
    results = timing.interleaved(
        lambda: timing.seconds_a_step(hand, wait, count),
        lambda: timing.seconds_a_step(ours, wait, count),
        rounds,
        turns,
    )
    held = {
        "bytes": ours.bytes_of_a_device(),
        "hand_bytes": hand.bytes_of_a_device(),
        "whole_bytes": ours.whole_bytes(),
    }
    return {"rounds": results, "steps_a_turn": count, "losses": losses, **held}
