# SPDX-License-Identifier: Apache-2.0
"""`fit` of every kind of data with its usual shuffling, in elastic groups whose processes are killed: each row counts once per epoch.

A victim kills itself by SIGKILL after a batch or when an epoch begins, or the parent kills it at any moment. Those that are left go on, and a
new process takes its place in the middle of the epoch.
"""

import json
import random
import time

from benchmarks.elastic_callbacks import Fit
from benchmarks.report import Report

ROWS, BATCH = 42, 6
KINDS = (
    "arrays",
    "arrays by batches",
    "batches",
    "batches of threads",
    "shuffled by NumPy",
    "shuffled by Python",
    "shuffled by itself",
    "Grain",
    "distributed arrays",
    "distributed batches",
    "distributed iterable",
    "distributed function",
)
"""The kinds of data. "batches" are a PyDataset."""

_MOMENTS = ("batch 0", "batch 1", "begin 0", "any")
_EPOCHS_PER_KILL = 20
_KILLS_PER_TRAINING = 3
_DEADLINE_S = 300.0


def play(kind: str, workers: int, kills: int, rng: random.Random, **popen: object) -> tuple[list[str], str]:
    """Kills processes of one training.

    Args:
      kind: the kind of the data.
      workers: the size of the group.
      kills: number of processes to kill.
      rng: draws which, and when.
      **popen: the argument `popen` of `Fit`, if there is one.

    Returns:
      The moments, and what was not as it should be; an empty text if all was.
    """
    epochs, moments = _EPOCHS_PER_KILL * kills + 5, list[str]()
    with Fit("elastic_data_script", f"1:{workers}", kind, epochs, **popen) as fit:
        try:
            for _ in range(kills):
                found = fit.wait_until_complete()
                time.sleep(rng.uniform(0.0, 0.3))
                victim = rng.choice(sorted(found, key=lambda pid: found[pid].worker))
                moment = rng.choice(_MOMENTS)
                moments.append(f"{moment} of {found[victim].worker}")
                fit.kill_at(victim, moment)
            fit.wait_until_complete()
        except RuntimeError as e:
            return moments, f"{e}\n{fit.output[-3000:]}"
        (fit.folder / "hurry").touch()
        if code := fit.wait(_DEADLINE_S):
            return moments, f"exit code {code}:\n{fit.output[-3000:]}"
        ends = [json.loads(file.read_text()) for file in fit.folder.glob("end*.json")]
    if len(ends) != workers:
        return moments, f"{len(ends)} of {workers} processes came to the end"
    wrong = {row: count for end in ends for row, count in enumerate(end) if count != epochs}
    return moments, f"not {epochs} times: {wrong}" if wrong else ""


def run(*, quick: bool, rounds: int = 36, seed: int = 0) -> Report:
    """Kills as many processes as there are rounds, in groups of two and three, with each kind of data in turn.

    Raises:
      SystemExit: some rows were left out or trained on too often. It comes after the report.
    """
    title = "SIGKILL in fit, for every kind of data with its usual shuffling: how often each row counts"
    report = Report("elastic_data", title, ("seed", "data", "workers", "moments", ""))
    rounds, failed = 2 if quick else rounds, 0
    for number, first in enumerate(range(0, rounds, _KILLS_PER_TRAINING), seed):
        workers, kind = 2 + number % 2, KINDS[number % len(KINDS)]
        kills = min(_KILLS_PER_TRAINING, rounds - first)
        moments, fault = play(kind, workers, kills, random.Random(number))
        failed += bool(fault)
        report.add(
            [number, kind, workers, ", ".join(moments), fault[:1000] or "once per epoch"],
            seed=number,
            kind=kind,
            workers=workers,
            moments=moments,
            fault=fault,
        )
    if failed:
        report.show()
        raise SystemExit(f"{failed} of {len(report.rows)} trainings did not count each row once per epoch.")
    return report
