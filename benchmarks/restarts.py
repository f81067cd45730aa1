# SPDX-License-Identifier: Apache-2.0
"""Training under `phalanx run` in which one of the workers fails, round after round; then all start again and end it.

Each round is drawn from its number: how many workers, which rank fails before which step, and whether the others wait for it
in that step or have not begun it. How it fails, and whether Keras backs up by epochs or by batches, goes round.

After a backup at the end of an epoch, or none, the end must be that of a training that nothing disturbed, to the last bit.
After one in the middle of an epoch Keras begins that epoch again, with the weights that it has: so the end must be that of
an undisturbed one that starts from a copy of it.

Five seconds without progress are taken for a failure. On a busy machine compiling takes as long: PHALANX_STALL_TIMEOUT_S=20.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.parent import ROOT
from benchmarks.report import Report

EPOCHS, STEPS = 3, 16
MARK = "restarts: "
_REPORT_LIMIT_S = 60.0
_DEADLINE_S = 300.0
_BATCHES = 12  # Between two backups, if not by epochs.
_OF_THE_PARENT = ("NPROC", "PHALANX_CPU_DEVICES")
_DEFAULTS = {"PHALANX_STALL_TIMEOUT_S": "5"}
_SETTINGS = {"JAX_PLATFORMS": "cpu"}
_COLUMNS = ("round", "workers", "rank", "step", "how", "backup every", "pause s")


@dataclass(frozen=True)
class _Failure:
    """A way to fail.

    Args:
      code: what the process does.
      cause: a pattern of what the others say of it, after its rank and address.
      ending: how the launcher sees it end, where it is the first.
    """

    code: str
    cause: str
    ending: str | None = None


_DIED = r"exited without an error message \(killed or crashed\)"
_FAILURES = {
    "SIGKILL": _Failure("os.kill(os.getpid(), signal.SIGKILL)", _DIED, "was killed by SIGKILL"),
    "SIGSTOP": _Failure("os.kill(os.getpid(), signal.SIGSTOP)", r"has been silent for \S+ s, since step \d+:"),
    "exception": _Failure("raise ValueError('a bad row')", "failed with ValueError: a bad row", "exited with code 1"),
    "sys.exit": _Failure("sys.exit()", "finished its program after step {step}; rank "),
    "os._exit": _Failure("os._exit(0)", _DIED),
    "sleep": _Failure("time.sleep(3600)", "is stuck after step {step}; rank "),
}


@dataclass(frozen=True)
class _Round:
    """What happens in a round.

    Args:
      number: from which all of it is drawn.
      workers: how many there are.
      rank: which one fails.
      step: before which step, from 0 through all epochs.
      how: the name of the failure.
      save_freq: how often Keras backs up, as in its callback.
      pause_s: how long the others do nothing before that step; without a pause they wait in it for the one that fails.
    """

    number: int
    workers: int
    rank: int
    step: int
    how: str
    save_freq: str
    pause_s: int

    @classmethod
    def drawn(cls, number: int) -> Self:
        """Returns the round of this number."""
        rng, ways = random.Random(number), list(_FAILURES)
        workers = rng.choice((2, 3))
        # So that in turn each way meets both kinds of backup.
        by_batches = (number + number // len(ways)) % 2 == 1
        save_freq = str(_BATCHES) if by_batches else "epoch"
        rank, step, pause_s = rng.randrange(workers), rng.randrange(EPOCHS * STEPS), rng.choice((0, 1))
        return cls(number, workers, rank, step, ways[number % len(ways)], save_freq, pause_s)

    @property
    def failure(self) -> _Failure:
        """How it fails."""
        return _FAILURES[self.how]

    @property
    def loss_of_rank(self) -> str:
        """A pattern of what is said of the rank that fails."""
        return rf"rank {self.rank} \(127\.0\.0\.1:\d+\) {self.failure.cause.format(step=self.step)}"

    def play(self, folder: Path) -> "_Run":
        """Runs it."""
        fails = ("--rank", self.rank, "--step", self.step, "--code", self.failure.code, "--pause", self.pause_s)
        return _Run.of(self.workers, 1, folder, self.save_freq, *fails)


@dataclass(frozen=True)
class _Run:
    """A run of the launcher that is over.

    Args:
      code: what it ended with.
      output: what the workers printed.
      report: what the launcher said, each line after the time at which it came.
    """

    code: int
    output: str
    report: list[tuple[float, str]]

    @classmethod
    def of(cls, workers: int, restarts: int, folder: Path, save_freq: str, *arguments: Any) -> Self:
        """Runs the script; a launcher that is late is killed, and its workers with it."""
        launcher = ("run", "--workers", workers, "--max-restarts", restarts, "-m", "benchmarks.restarts_script")
        command = map(str, (*launcher, "--folder", folder, "--save-freq", save_freq, *arguments))
        with tempfile.TemporaryFile("w+", errors="replace") as output, _phalanx(command, output) as process:
            assert process.stderr
            killer = threading.Timer(_DEADLINE_S, process.kill)
            killer.start()
            try:
                report = [(time.time(), line) for line in process.stderr]
                code = process.wait()
            finally:
                killer.cancel()
                process.kill()
            output.seek(0)
            return cls(code, output.read(), report)

    @property
    def report_text(self) -> str:
        """What the launcher said."""
        return "".join(line for _, line in self.report)

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The loss of the last epoch, and a digest of all state, as each worker has them that came to the end."""
        return [facts for facts in self._facts if "loss" in facts]

    @property
    def seconds_to_report(self) -> float | None:
        """How long after the failure the launcher reported it; None where one of them did not happen."""
        failed = [facts["failed_at"] for facts in self._facts if "failed_at" in facts]
        reported = [
            at for at, line in self.report if re.search("failed first: |^The cluster could not continue: ", line)
        ]
        return reported[0] - failed[0] if failed and reported else None

    @property
    def processes(self) -> list[int]:
        """The numbers of all workers that were started."""
        return [facts["pid"] for facts in self._facts if "pid" in facts]

    def said_by(self, rank: int) -> str:
        """Returns what one worker printed."""
        return "".join(re.findall(rf"^\[worker {rank}\] (.*\n)", self.output, re.MULTILINE))

    @cached_property
    def _facts(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in re.findall(rf"^\[worker \d+\] {MARK}(.*)", self.output, re.MULTILINE)]


def _phalanx(arguments: Iterable[str], output: IO[str]) -> subprocess.Popen[str]:
    """Starts the launcher; what it says itself can be read while it runs."""
    inherited = {k: v for k, v in os.environ.items() if k not in _OF_THE_PARENT}
    return subprocess.Popen(
        [sys.executable, "-c", "from phalanx._src.tools.cli import main; main()", *arguments],
        cwd=ROOT,
        env={**_DEFAULTS, **inherited, **_SETTINGS},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


class _Undisturbed:
    """The ends of trainings that nothing disturbs, from the start or from a backup; each is trained once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], dict[str, Any]] = {}

    def end(self, workers: int, save_freq: str, backup: Path | None) -> dict[str, Any]:
        """Returns the end of the training that starts from a copy of `backup`, which is left as it is."""
        key = workers, _place(backup)
        if key not in self._known:
            self._known[key] = self._train(workers, save_freq, backup)
        return self._known[key]

    def _train(self, workers: int, save_freq: str, backup: Path | None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            if backup:
                shutil.copytree(backup, Path(name, "backup"))
            run = _Run.of(workers, 0, Path(name), save_freq)
        if run.code or len(run.results) != workers:
            raise SystemExit(f"An undisturbed training of {workers} workers failed.\n{run.output}\n{run.report_text}")
        return run.results[0]


def run(*, quick: bool, rounds: int = 50, seed: int = 0) -> Report:
    """Plays some rounds, the first of which has the number `seed`.

    Raises:
      SystemExit: some of them failed. It comes after the report.
    """
    report = Report(
        "restarts",
        "One worker fails, and all go on from the last backup: from the failure to the launcher's report, and the end",
        (*_COLUMNS, "seconds", "goes on from", "loss", "undisturbed", ""),
    )
    undisturbed, failed = _Undisturbed(), []
    for number in range(seed, seed + (len(_FAILURES) if quick else rounds)):
        if not _add(report, _Round.drawn(number), undisturbed):
            failed.append(number)
    if failed:
        report.show()
        numbers = ", ".join(map(str, failed))
        rounds_failed = f"{len(failed)} of {len(report.rows)} rounds failed: {numbers}"
        raise SystemExit(f"{rounds_failed}. One again: python -m benchmarks restarts --seed {failed[0]} --rounds 1")
    return report


def _add(report: Report, played: _Round, undisturbed: _Undisturbed) -> bool:
    """Plays a round, and returns whether all was as it should be."""
    with tempfile.TemporaryDirectory() as name:
        run = played.play(Path(name))
        found = Path(name, "found")
        backup = found if found.exists() else None
        # What an epoch ends with does not depend on where it was interrupted; only its middle does.
        start = None if played.save_freq == "epoch" else backup
        expected, place = undisturbed.end(played.workers, played.save_freq, start), _place(backup)
    faults = list(_faults(played, run, expected))
    loss = run.results[0]["loss"] if run.results else None
    seconds = run.seconds_to_report
    report.add(
        [*asdict(played).values(), seconds, place, loss, expected["loss"], "; ".join(faults) or "as it should be"],
        **asdict(played),
        seconds=seconds,
        backup=place,
        results=run.results,
        undisturbed=expected,
        faults=faults,
    )
    if faults:
        print(f"Round {played.number}. {'; '.join(faults)}\n{run.output}\n{run.report_text}", flush=True)
    return not faults


def _faults(played: _Round, run: _Run, expected: dict[str, Any]) -> Iterator[str]:
    """Yields what was not as it should be."""
    if run.code:
        yield f"the launcher ended with {run.code}"
    if not re.search(_told(played), run.report_text):
        yield "the report does not say which rank failed, and how"
    for rank in set(range(played.workers)) - {played.rank}:
        if not re.search(played.loss_of_rank, run.said_by(rank)):
            yield f"worker {rank} does not say which rank failed, and how"
    seconds = run.seconds_to_report
    if seconds is None or seconds > _REPORT_LIMIT_S:
        yield f"no report within {_REPORT_LIMIT_S} s"
    if len(run.processes) != 2 * played.workers:
        yield f"{len(run.processes)} processes were started"
    if left := [pid for pid in run.processes if _is_alive(pid)]:
        yield f"processes are left: {left}"
    if run.results != [expected] * played.workers:
        yield "the end is another than that of an undisturbed training"


def _told(played: _Round) -> str:
    """Returns a pattern of what the launcher is to say."""
    if played.failure.ending is None:
        return played.loss_of_rank
    # The one that is at fault may end after the others, which then say who it is.
    return f"worker {played.rank} failed first: it {played.failure.ending}|could not continue: {played.loss_of_rank}"


def _place(backup: Path | None) -> str:
    """Returns where in the training a backup was written."""
    if backup is None:
        return "the start"
    at = json.loads((backup / "training_metadata.json").read_text())
    return f"epoch {at['epoch']}" + (f" batch {at['batch']}" if at["batch"] else "")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # Gone; or one of somebody else's has its number.
        return False
    return True
