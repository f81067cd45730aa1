# SPDX-License-Identifier: Apache-2.0
"""What summaries cost a training step: 5 scalars and 1 histogram every 100 steps, and none while recording is off.

Both steps train the same model on the same batch, in one process, in interleaved rounds.
"""

import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.models import CASES
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_EVERY = 100
_MODELS = ("small_mlp", "mlp")
_TITLES = {
    "every": (f"5 scalars and 1 histogram every {_EVERY} steps", 0.98),
    "traced": ("the same, with a condition that the program computes", None),
    "off": ("the same step, while recording is off", None),
}


def run(*, quick: bool) -> Report:
    """Measures each model and number of replicas in a process of its own."""
    report = Report(
        "summaries",
        "Speed of a step with summaries (time of the same step without them / its time)",
        (
            "model",
            "replicas",
            "with",
            "steps/s without",
            "steps/s with",
            "ratio",
            "target",
            "middle half",
            "all rounds",
        ),
    )
    for case in _MODELS:
        for replicas in (1, 2):
            rounds = {"rounds": 3, "steps": 100} if quick else {"rounds": 21, "steps": 400}
            raw = call_in_child("benchmarks.summaries:measure", 500, devices=replicas, case=case, **rounds)
            for key, (title, target) in _TITLES.items():
                _add(report, [case, replicas, title], raw[key], target)
            same = "the same text: met" if raw["same program"] else "another text: MISSED"
            report.add([case, replicas, "program while recording is off", "", "", "", same, "", ""], same=same)
    return report


def _add(report: Report, what: list[Any], rounds: list[timing.Pair], target: float | None) -> None:
    case, replicas, title = what
    without_s, with_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    met = verdict(ratio, at_least=target) if target else verdict(ratio)
    row = [*what, f"{1 / without_s:.1f}", f"{1 / with_s:.1f}", ratio, met, timing.middle_half(rounds)]
    report.add([*row, all_rounds(rounds)], case=case, replicas=replicas, what=title, ratio=ratio, rounds=rounds)


def measure(case: str, rounds: int, steps: int) -> dict[str, Any]:
    """In a child: pairs of seconds a step, by what was measured, and whether the programs without recording are equal."""
    import keras

    import phalanx
    from benchmarks.with_phalanx import train_step, wait

    strategy = phalanx.MirroredStrategy()
    batch = next(iter(strategy.experimental_distribute_dataset([CASES[case].batch(strategy.num_replicas_in_sync)])))
    bare = train_step(strategy, lambda: CASES[case].model(keras))

    def recorded(batch: Any) -> Any:
        loss = bare(batch)
        for name in ("a", "b", "c", "d", "e"):
            phalanx.summary.scalar(name, loss)
        phalanx.summary.histogram("inputs", batch[0])
        return loss

    def conditioned(batch: Any, number: Any) -> Any:
        with phalanx.summary.record_if(number % _EVERY == 0):
            return recorded(batch)

    def without() -> float:
        return timing.seconds_a_step(lambda: strategy.run(bare, args=(batch,)), wait, steps)

    def every() -> float:
        def one(number: int) -> Any:
            phalanx.summary.experimental.set_step(number)
            with phalanx.summary.record_if(number % _EVERY == 0):
                return strategy.run(recorded, args=(batch,))

        return _counted(one, wait, steps)

    def traced() -> float:
        def one(number: int) -> Any:
            phalanx.summary.experimental.set_step(number)
            return strategy.run(conditioned, args=(batch, number))

        return _counted(one, wait, steps)

    def off() -> float:
        return timing.seconds_a_step(lambda: strategy.run(recorded, args=(batch,)), wait, steps)

    with tempfile.TemporaryDirectory() as folder:
        writer = phalanx.summary.create_file_writer(folder)
        without()
        off()
        found: dict[str, Any] = {}
        for key, with_summaries in {"every": every, "traced": traced}.items():
            with writer.as_default(step=0):
                with_summaries()
            found[key] = timing.interleaved(without, _writing_to(writer, with_summaries), rounds)
        writer.close()
    found["off"] = timing.interleaved(without, off, rounds)
    texts = [_text(strategy, fn, batch) for fn in (bare, recorded)]
    found["same program"] = texts[0] == texts[1]
    return found


def _text(strategy: Any, fn: Callable[..., Any], batch: Any) -> str:
    """Returns the program of a step. Both are called by one function, whose name it contains."""
    import phalanx

    def step(batch: Any) -> Any:
        return strategy.run(fn, args=(batch,))

    text: str = phalanx.function(step).lower(batch).as_text()
    return text


def _counted(one: Callable[[int], Any], wait: Callable[[Any], Any], steps: int) -> float:
    numbers = iter(range(steps + 1))
    return timing.seconds_a_step(lambda: one(next(numbers)), wait, steps)


def _writing_to(writer: Any, measure: Callable[[], float]) -> Callable[[], float]:
    """Returns `measure` with a default writer. The time does not contain the flush at the end of the block."""

    def measured() -> float:
        with writer.as_default(step=0):
            return measure()

    return measured
