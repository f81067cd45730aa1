# SPDX-License-Identifier: Apache-2.0
"""Keras `fit` on the replicas of a strategy, beside `fit` under Keras's own `DataParallel`.

Both read the same NumPy arrays in the same global batches, with the same optimizer, loss and metric, and neither has a
callback that looks at single steps. With several steps an execution Keras dispatches them one by one: it gets whichever
of 1 and 16 is faster for it. "auto" lets Phalanx choose, which an epoch of 1,024 steps is long enough for.
"""

import functools
import math
from typing import Any

from benchmarks import timing
from benchmarks.devices import at_most
from benchmarks.parent import Child, call_in_child
from benchmarks.report import Report, all_rounds, verdict

_REPLICAS, _STEPS, _AUTO = at_most(2), 16, "auto"
_EPOCH = {"small_mlp": 1024, "mlp": 64, "lstm": 64, "transformer": 64}
_TARGETS: dict[tuple[str, int | str], float | None] = {
    **{(case, steps): target for case in _EPOCH for steps, target in ((1, 1.0), (_STEPS, None))},
    ("small_mlp", 1): 1.1,
    ("small_mlp", _STEPS): 4.0,
    ("small_mlp", _AUTO): 4.0,
}
_FIRST_STEP_TARGET = 1.0
_CHILD = "benchmarks.fit_epochs"


def run(*, quick: bool) -> Report:
    """Measures each model: epochs, with both processes alive and only one at work, then first steps in fresh ones."""
    report = Report(
        "fit",
        f"Keras fit with Phalanx against keras.distribution.DataParallel, {_REPLICAS} replica{'s' * (_REPLICAS > 1)} (Keras time / Phalanx time);"
        " of first steps Phalanx time / Keras time",
        (
            "model",
            "steps an execution",
            "Keras's",
            "loss, accuracy differ by",
            "Keras",
            "Phalanx",
            "ratio",
            "target",
            "middle half",
            "all rounds",
        ),
    )
    epochs = [functools.partial(_add_epochs, report, case, steps, quick) for case, steps in _TARGETS]
    first_steps = [functools.partial(_add_first_step, report, case, quick) for case in _EPOCH]
    report.measure(epochs + first_steps)
    return report


def _add_epochs(report: Report, case: str, steps: int | str, quick: bool) -> None:
    theirs = 1 if steps == 1 else _best_of_keras(case)
    difference, rounds = rounds_of(case, theirs, steps, 3 if quick else 9)
    keras_s, phalanx_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    row = [
        case,
        steps,
        theirs,
        f"{difference:.0e}",
        f"{1 / keras_s:.1f} steps/s",
        f"{1 / phalanx_s:.1f} steps/s",
        ratio,
    ]
    row += [verdict(ratio, at_least=_TARGETS[case, steps]), timing.middle_half(rounds), all_rounds(rounds)]
    report.add(row, case=case, steps=steps, steps_of_keras=theirs, difference=difference, ratio=ratio, rounds=rounds)


def rounds_of(
    case: str, theirs: int, steps: int | str, rounds: int, tolerance: float = 1e-3
) -> tuple[float, list[timing.Pair]]:
    """Measures epochs of Keras's `DataParallel` and of Phalanx in turns, after it has compared losses and accuracies.

    Args:
      case: the name of the model.
      theirs: steps an execution of Keras.
      steps: of Phalanx.
      rounds: number of rounds.
      tolerance: by which part of its value a loss or an accuracy may differ.

    Returns:
      By which part of its value a loss or an accuracy differs most, and the rounds.
    """
    with Child(_REPLICAS) as peer, Child(_REPLICAS) as ours:
        found = _prepared(peer, "keras", case, theirs), _prepared(ours, "phalanx", case, steps)
        difference = _difference(*found, tolerance)
        return difference, timing.interleaved(lambda: _seconds(peer), lambda: _seconds(ours), rounds)


def _best_of_keras(case: str) -> int:
    """Returns with how many steps an execution Keras is faster."""
    with Child(_REPLICAS) as single, Child(_REPLICAS) as several:
        _difference(_prepared(single, "keras", case, 1), _prepared(several, "keras", case, _STEPS), 1e-3)
        rounds = timing.interleaved(lambda: _seconds(single), lambda: _seconds(several), 3)
    return _STEPS if timing.median_ratio(rounds) > 1 else 1


def _prepared(child: Child, library: str, case: str, steps: int | str) -> dict[str, list[float]]:
    options = {"library": library, "case": case, "steps": _EPOCH.get(case, _STEPS), "steps_per_execution": steps}
    return child.call(f"{_CHILD}:prepare", 300, **options)


def _seconds(child: Child) -> float:
    return child.call(f"{_CHILD}:seconds_a_step", 120, epochs=1)


def _difference(theirs: dict[str, list[float]], ours: dict[str, list[float]], tolerance: float) -> float:
    """Returns by which part of its value a loss or an accuracy differs most."""
    # An execution need not end where one of the other library does. Those of the whole epoch do.
    pairs: list[Any] = [
        pair for batch in theirs.keys() & ours.keys() for pair in zip(theirs[batch], ours[batch], strict=True)
    ]
    if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs):
        raise AssertionError(f"the two compute different losses or accuracies: {pairs}")
    return max(abs(a - b) / b for a, b in pairs)


def _add_first_step(report: Report, case: str, quick: bool) -> None:
    first_s = lambda library: call_in_child(  # noqa: E731
        f"{_CHILD}:first_step", 300, devices=_REPLICAS, library=library, case=case
    )
    rounds = timing.interleaved(lambda: first_s("phalanx"), lambda: first_s("keras"), 2 if quick else 5)
    phalanx_s, keras_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    row = [f"{case}, first step", 1, 1, "", f"{keras_s:.2f} s", f"{phalanx_s:.2f} s", ratio]
    row += [verdict(ratio, at_most=_FIRST_STEP_TARGET), timing.middle_half(rounds), all_rounds(rounds)]
    report.add(row, case=case, first_step=True, ratio=ratio, rounds=rounds)
