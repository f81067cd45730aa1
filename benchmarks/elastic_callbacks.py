# SPDX-License-Identifier: Apache-2.0
"""`fit` with callbacks in elastic groups of two and three, of which processes are killed at drawn moments: all must end alike.

A victim kills itself by SIGKILL after a batch, in the validation, when an epoch begins, or between two callbacks at the end of an epoch; or the
parent kills it at any moment. In the end, the weights, the learning rate and the callbacks of all processes must be equal to the last bit, and
equal those of a training that nothing disturbs, up to rounding.
"""

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.elastic import STALL_S, Training
from benchmarks.parent import ROOT
from benchmarks.report import Report

_SCRIPT = "elastic_callbacks_script"
_KILLS_PER_TRAINING = 5
_EPOCHS_PER_KILL = 20
_MOMENTS = ("batch", "test", "begin", "epoch", "epoch", "any")
_PAUSE_S = 0.02
_RTOL, _ATOL = 1e-5, 1e-6
_DEADLINE_S = 300.0


class Fit(Training):
    """A `fit` under `phalanx run`.

    Args:
      script: the module of `benchmarks` that trains.
      workers: the option `--workers`.
      *arguments: those of the script, before the folder.
      popen: starts a process, as `subprocess.Popen` does.
    """

    def __init__(self, script: str, workers: str, *arguments: object, **popen: Any) -> None:
        environment = {
            "PYTHONPATH": str(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
            "PHALANX_STALL_TIMEOUT_S": str(STALL_S),
            "PAUSE_S": str(_PAUSE_S),
        }
        launcher = [sys.executable, "-m", "phalanx", "run", "--workers", workers]
        command = [*launcher, "-m", f"benchmarks.{script}", *map(str, arguments)]
        super().__init__(command, int(workers.rpartition(":")[2]), environment, **popen)

    def kill_at(self, victim: int, moment: str) -> None:
        """Has a process end by SIGKILL at a moment, and waits until the others have finished a step without it.

        Raises:
          RuntimeError: they do not.
        """
        before = self.done()
        if moment == "any":
            os.kill(victim, signal.SIGKILL)
        else:
            (self.folder / f"{victim}.do").write_text(moment)
        generation = max(done.generation for done in before.values())

        def go_on() -> bool | None:
            now = self.done()
            others = [pid in now and now[pid].generation > generation for pid in before if pid != victim]
            return (victim not in now and all(others)) or None

        self._wait_for(go_on, f"the others do not go on after {victim} was killed at {moment}")

    def ends(self) -> list[dict[str, Any]]:
        """Returns what the processes had in the end, the chief first."""
        found = [json.loads(file.read_text()) for file in self.folder.glob("end*.json")]
        return sorted(found, key=lambda end: end["best"] is None)


@functools.cache
def undisturbed(epochs: int, **popen: Any) -> dict[str, Any]:
    """Returns what one process has in the end that nothing disturbs."""
    with Fit(_SCRIPT, "1", epochs, **popen) as fit:
        (fit.folder / "hurry").touch()
        fit.wait(_DEADLINE_S)
        (end,) = fit.ends()
        return end


def play(workers: int, kills: int, rng: random.Random, **popen: Any) -> tuple[list[str], list[str]]:
    """Kills processes of one training, and returns the moments, and what was not as it should be."""
    epochs, moments = _EPOCHS_PER_KILL * kills + 5, []
    with Fit(_SCRIPT, f"1:{workers}", epochs, **popen) as fit:
        try:
            for _ in range(kills):
                found = fit.wait_until_complete()
                time.sleep(rng.uniform(0.0, 0.3))
                victim = rng.choice(sorted(found, key=lambda pid: found[pid].worker))
                kind = rng.choice(_MOMENTS)
                moment = kind if kind == "any" else f"{kind} {rng.randrange(3)}"
                moments.append(f"{moment} of {found[victim].worker}")
                fit.kill_at(victim, moment)
            fit.wait_until_complete()
        except RuntimeError as e:
            return moments, [f"{e}"]
        (fit.folder / "hurry").touch()
        if code := fit.wait(_DEADLINE_S):
            return moments, [f"exit code {code}:\n{fit.output[-3000:]}"]
        ends = fit.ends()
    return moments, list(_faults(ends, undisturbed(epochs, **popen), workers))


def _faults(ends: list[dict[str, Any]], expected: dict[str, Any], workers: int) -> Iterator[str]:
    """Yields what was not as it should be."""
    if len(ends) != workers:
        yield f"{len(ends)} of {workers} processes came to the end"
        return
    for end in ends[1:]:
        for name in ("values", "numbers"):
            if end[name] != ends[0][name]:
                yield f"{name} differ between processes: {_difference(ends[0][name], end[name])}"
    for name in ("values", "numbers", "best"):
        if difference := _difference(expected[name], ends[0][name]):
            yield f"{name} are not those of an undisturbed training: {difference}"


def _difference(expected: Any, found: Any, place: str = "") -> str:
    """Returns where two results differ by more than rounding, or an empty text."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = [(name, expected[name], found[name]) for name in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(expected, found, strict=True))]
    elif isinstance(expected, float) and isinstance(found, float):
        return "" if np.isclose(found, expected, rtol=_RTOL, atol=_ATOL) else f"{place}: {found} instead of {expected}"
    else:
        return "" if expected == found else f"{place}: {found} instead of {expected}"[:300]
    return next(filter(None, (_difference(x, y, f"{place}/{name}") for name, x, y in pairs)), "")


def run(*, quick: bool, rounds: int = 50, seed: int = 0) -> Report:
    """Kills as many processes as there are rounds, in groups of two and three in turn.

    Raises:
      SystemExit: some trainings did not end as they should. It comes after the report.
    """
    report = Report(
        "elastic_callbacks",
        "SIGKILL in fit with ReduceLROnPlateau, EarlyStopping, ModelCheckpoint and a callback with a state: how it ends",
        ("seed", "workers", "kills", "moments", ""),
    )
    rounds, failed = 2 if quick else rounds, 0
    for number, first in enumerate(range(0, rounds, _KILLS_PER_TRAINING), seed):
        workers, kills = 2 + number % 2, min(_KILLS_PER_TRAINING, rounds - first)
        moments, faults = play(workers, kills, random.Random(number))
        failed += bool(faults)
        text = "; ".join(faults)[:1000] or "as it should be"
        report.add(
            [number, workers, kills, ", ".join(moments), text],
            seed=number,
            workers=workers,
            moments=moments,
            faults=faults,
        )
    if failed:
        report.show()
        raise SystemExit(f"{failed} of {len(report.rows)} trainings did not end as they should.")
    return report
