# SPDX-License-Identifier: Apache-2.0
"""Processes of one training are lost, again and again: how soon the others finish the next step, and whether the result is right.

The seconds go from the loss, or for a stopped process from the time limit of the watch, to the first finished step of each process that
is left. Another process then takes the place of the lost one, before the next round.
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from benchmarks import processes
from benchmarks.elastic_job import RECORD
from benchmarks.parent import ROOT
from benchmarks.report import Report

T = TypeVar("T")

STALL_S = 10.0
"""Time limit of the watch."""
KINDS = ("kill", "stop", "raise", "exit", "two", "term")
"""How processes are lost: SIGKILL, SIGSTOP, an exception, `os._exit`, SIGKILL of two at once, and SIGTERM."""

WIDTHS = (768, 768)
"""Widths of the hidden layers of a training with shards: two and three processes can divide them."""
SHARDS = {False: "hidden layers of 768, whole", True: "hidden layers of 768, fully sharded"}

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "two": signal.SIGKILL,
    "again": signal.SIGKILL,
    "term": signal.SIGTERM,
}
_INTO_RECOVERY_S = 0.15
_OF_THE_PARENT = ("NPROC", "PHALANX_CPU_DEVICES", "PYTHONPATH", "XLA_FLAGS", "TF_CONFIG")
_DEADLINE_S = 240.0
_END_S = 10.0
_RECENT_S = 5.0
_POLL_S = 0.02


class Done(NamedTuple):
    """What a process has written down last.

    Args:
      worker: number of its place.
      generation: the generation in which it made its last step. 0 before the first.
      step: number of steps.
      at_s: when it finished the last one.
    """

    worker: int
    generation: int
    step: int
    at_s: float


class Recovery(NamedTuple):
    """The cost of losing a process.

    Args:
      seconds: from the loss to the next finished step.
      repeated: number of steps that the script had finished before, and did again.
    """

    seconds: float
    repeated: int


class Training:
    """Processes that train together, and write down their steps in a folder. A context manager, which ends them.

    Args:
      command: what starts the processes. The folder is added as its last argument.
      size: the highest number of processes.
      environment: further environment variables.
      popen: starts a process, as `subprocess.Popen` does.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        environment: Mapping[str, str],
        popen: type[subprocess.Popen] = subprocess.Popen,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-elastic-")
        self.folder, self.size = Path(self._folder.name), size
        self._log = (self.folder / "log").open("w+")
        inherited = {k: v for k, v in os.environ.items() if k not in _OF_THE_PARENT}
        self._process = popen(
            [*command, str(self.folder)],
            cwd=ROOT,
            env=inherited | dict(environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        started = processes.descendants(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _wait_for_end(started)
        self._log.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """The number of the process that was started."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What the launcher and the processes have printed."""
        return (self.folder / "log").read_text()

    def done(self) -> dict[int, Done]:
        """Returns what each running process has written down, by process id."""
        found = {}
        for file in self.folder.iterdir():
            if not file.name.isdigit() or not processes.is_alive(int(file.name)):
                continue
            if len(written := file.read_bytes()) == RECORD.size:
                found[int(file.name)] = Done(*RECORD.unpack(written))
        return found

    def wait_until_complete(self) -> dict[int, Done]:
        """Waits until as many processes as possible train in one generation, and returns what they have done.

        Raises:
          RuntimeError: they do not, or the training has ended.
        """

        def complete() -> dict[int, Done] | None:
            found, now_s = self.done(), time.monotonic()
            is_recent = all(done.generation and now_s - done.at_s < _RECENT_S for done in found.values())
            is_one = len({done.generation for done in found.values()}) == 1
            return found if len(found) == self.size and is_recent and is_one else None

        return self._wait_for(complete, "the group is not complete")

    def _wait_for(self, find: Callable[[], T | None], otherwise: str) -> T:
        """Waits until a function finds something while the training runs, and returns it.

        Raises:
          RuntimeError: it does not; the message begins with `otherwise`.
        """
        deadline_s = time.monotonic() + _DEADLINE_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            if (found := find()) is not None:
                return found
            time.sleep(_POLL_S)
        raise RuntimeError(f"{otherwise}:\n{self.output[-3000:]}")

    def kill(self, victim: int, members: int) -> Recovery:
        """Sends SIGKILL to a process, and waits until processes have finished a step of a later generation.

        Args:
          victim: the process.
          members: how many processes must have finished that step.

        Raises:
          RuntimeError: they do not.
        """
        before = self.done().values()
        generation, reached = max(done.generation for done in before), max(done.step for done in before)
        began_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)

        def recovery() -> Recovery | None:
            later = [done for done in self.done().values() if done.generation > generation]
            if len(later) < members:
                return None
            repeated = max(0, reached + 1 - min(done.step for done in later))
            return Recovery(max(done.at_s for done in later) - began_s, repeated)

        return self._wait_for(recovery, f"no step follows the kill of {victim}")

    def wait(self, deadline_s: float) -> int:
        """Waits for the end, and returns the exit code."""
        return self._process.wait(deadline_s)


class Job(Training):
    """A training under `phalanx run`.

    Args:
      how: "fit" or "loop".
      workers: the option `--workers`.
      epochs: number of epochs.
      donate: see `phalanx.elastic.ElasticOptions`.
      is_sharded: whether the variables are fully sharded.
      pause_s: first pause after a step in seconds. Pauses grow, and end when `hurry` is called.
      pause_growth: the power of the number of steps with which pauses grow.
      widths: widths of the hidden layers. None for those of the benchmark.
      popen: starts a process, as `subprocess.Popen` does.
      stall_s: the limit of the watch in seconds.
      module: the training. It gets `how`, the number of epochs and the folder.
      options: further options of `phalanx run`.
    """

    def __init__(
        self,
        how: str,
        workers: str,
        epochs: int,
        *,
        donate: bool = True,
        is_sharded: bool = False,
        pause_s: float = 0.0,
        pause_growth: int = 1,
        widths: Sequence[int] | None = None,
        popen: type[subprocess.Popen] = subprocess.Popen,
        stall_s: float = STALL_S,
        module: str = "benchmarks.elastic_script",
        options: Sequence[str] = (),
    ) -> None:
        environment = {
            "PYTHONPATH": str(ROOT / "src"),  # Phalanx need not be installed.
            "JAX_PLATFORMS": "cpu",
            "PHALANX_STALL_TIMEOUT_S": str(stall_s),
            "DONATE": "yes" if donate else "no",
            "SHARDED": "yes" if is_sharded else "no",
            "PAUSE_S": str(pause_s),
            "PAUSE_GROWTH": str(pause_growth),
            **({} if widths is None else {"WIDTHS": " ".join(map(str, widths))}),
        }
        launcher = [sys.executable, "-m", "phalanx", "run", "--workers", workers, *options]
        script = ["-m", module, how, str(epochs)]
        super().__init__(self.command([*launcher, *script]), int(workers.rpartition(":")[2]), environment, popen)

    def command(self, launcher: list[str]) -> list[str]:
        """Returns the command of the whole training, given that of a launcher."""
        return launcher

    def hurry(self) -> None:
        """Ends the pauses of the processes."""
        (self.folder / "hurry").touch()

    def lose(self, victims: Iterable[int], kind: str) -> float:
        """Ends processes, and returns the time in seconds from the last end until all others have finished a step of a later generation.

        Raises:
          RuntimeError: they do not.
        """
        before, lost = self.done(), set(victims)
        for number, pid in enumerate(lost):
            if kind == "again" and number:
                time.sleep(_INTO_RECOVERY_S)
            began_s = time.monotonic()
            if kind in _SIGNALS:
                os.kill(pid, _SIGNALS[kind])
            else:
                (self.folder / f"{pid}.do").write_text(kind)
        others = set(before) - lost
        generation = max(done.generation for done in before.values())

        def seconds() -> float | None:
            now = self.done()
            if not all(pid in now and now[pid].generation > generation for pid in others):
                return None
            return max(now[pid].at_s for pid in others) - began_s - (STALL_S if kind == "stop" else 0.0)

        return self._wait_for(seconds, f"the others do not go on after {kind} of {lost}")

    def result(self) -> list[np.ndarray]:
        """Returns the weights at the end, and then the losses."""
        with np.load(self.folder / "end.npz") as saved:
            weights = [saved[name] for name in sorted(saved.files) if name != "losses"]
            return [*weights, saved["losses"]]


def _wait_for_end(started: set[int]) -> None:
    """Waits until processes have ended, and kills them if they do not."""
    deadline_s = time.monotonic() + _END_S
    while left := {pid for pid in started if processes.is_alive(pid)}:
        if time.monotonic() > deadline_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Played:
    """The result of some rounds.

    Args:
      seconds: of each round.
      differs: largest relative difference of the weights from those of an undisturbed training.
      code: exit code.
    """

    seconds: list[float]
    differs: float
    code: int


def play(how: str, kinds: Sequence[str], rounds: int, rng: random.Random, *, epochs: int, **options: Any) -> Played:
    """Disturbs a training of three processes, and trains one process that nothing disturbs. `options` are those of `Job`."""
    seconds = []
    with Job(how, "1:3", epochs, **options) as job:
        for number in range(rounds):
            found = sorted(job.wait_until_complete())
            time.sleep(rng.uniform(0.0, 0.5))
            kind = kinds[number % len(kinds)]
            seconds.append(job.lose(rng.sample(found, 2 if kind == "two" else 1), kind))
        code = job.wait(600)
        differs = difference_from_undisturbed(job, how, epochs, widths=options.get("widths"))
    return Played(seconds, differs, code)


def lose_again(rng: random.Random) -> float | None:
    """Starts a training of three processes, and kills two, the second one while the others recover.

    Returns:
      The time in seconds from the second kill to the next step of the last one. None if it does not make one.
    """
    with Job("loop", "1:3", 100_000) as job:
        found = sorted(job.wait_until_complete())
        time.sleep(rng.uniform(0.0, 0.5))
        try:
            return job.lose(rng.sample(found, 2), "again")
        except RuntimeError:
            return None


def difference_from_undisturbed(job: Job, how: str, epochs: int, *, widths: Sequence[int] | None = None) -> float:
    """Trains one process that nothing disturbs, and returns the largest relative difference of the weights."""
    disturbed = job.result()
    with Job(how, "1", epochs, widths=widths) as alone:
        alone.wait(3600)
        return largest_difference(disturbed, alone.result())


def largest_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Returns the largest relative difference of the weights in two results of `Job`."""
    return max(_difference(x, y) for x, y in zip(found[:-1], expected[:-1], strict=True))


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _speed(workers: str, seconds: float) -> float:
    """Returns the steps per second of an undisturbed training."""
    with Job("loop", workers, 100_000) as job:
        if ":" in workers:
            job.wait_until_complete()
        while len(found := job.done()) < job.size or min(done.step for done in found.values()) < 50:
            time.sleep(_POLL_S)
        (pid, first), *_ = found.items()
        time.sleep(seconds)
        last = job.done()[pid]
        return (last.step - first.step) / (last.at_s - first.at_s)


_COLUMNS = ("training", "rounds", "median s", "worst s", "difference of the weights", "exit code")


def run(*, quick: bool, rounds: int = 50, seed: int = 0) -> Report:
    """Loses processes in all ways in `fit` and in a custom loop, and compares the speed with that of a fixed group."""
    report = Report(
        "elastic",
        f"Processes of three are lost (kill -9, SIGSTOP after {STALL_S:g} s, exception, os._exit, two at once, SIGTERM): seconds to the next step",
        _COLUMNS,
    )
    rng = random.Random(seed)
    rounds = 2 if quick else rounds

    def lose(how: str, name: str, kinds: Sequence[str] = KINDS, **options: Any) -> None:
        _lose(report, f"{how}, {name}", how, kinds, rounds, rng, **options)

    def lose_two_in_a_row() -> None:
        tries = [lose_again(rng) for _ in range(1 if quick else max(10, rounds // 2))]
        seconds = [s for s in tries if s is not None]
        name = f"loop, another kill {_INTO_RECOVERY_S} s after the first: {len(seconds)} of {len(tries)} go on"
        times = [statistics.median(seconds), max(seconds)] if seconds else ["", ""]
        report.add([name, len(tries), *times, "", ""], how="again", seconds=tries)

    def compare() -> None:
        pairs = [
            (_speed("2:2", 2.0 if quick else 10.0), _speed("2", 2.0 if quick else 10.0))
            for _ in range(1 if quick else 7)
        ]
        ratio = statistics.median(elastic / fixed for elastic, fixed in pairs)
        text = f"--workers 2:2 makes {ratio:.3f} of the steps of --workers 2"
        report.add([text, len(pairs), "", "", "", ""], pairs=pairs)

    report.measure(
        [
            *(
                lambda h=h, d=d: lose(h, f"donate={d}", donate=d)
                for h, d in (("loop", True), ("fit", True), ("loop", False))
            ),
            *(
                lambda s=s: lose("loop", SHARDS[s], [k for k in KINDS if k != "two"], is_sharded=s, widths=WIDTHS)
                for s in SHARDS
            ),
            lose_two_in_a_row,
            compare,
        ]
    )
    return report


def run_sharded(*, quick: bool, rounds: int = 20, seed: int = 0) -> Report:
    """Kills processes of two groups in turn, of which one has whole variables and one has sharded ones."""
    report = Report(
        "sharded_elastic", "One of three processes is lost by kill -9: seconds to the next step", _COLUMNS[:4]
    )
    rng = random.Random(seed)
    seconds: dict[bool, list[float]] = {is_sharded: [] for is_sharded in SHARDS}
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"widths": WIDTHS, "pause_s": 0.001}
        jobs = {s: stack.enter_context(Job("loop", "1:3", 100_000, is_sharded=s, **options)) for s in SHARDS}
        for _ in range(2 if quick else rounds):
            for is_sharded, job in jobs.items():
                found = sorted(job.wait_until_complete())
                time.sleep(rng.uniform(0.0, 0.5))
                seconds[is_sharded].append(job.lose(rng.sample(found, 1), "kill"))
            print(seconds, file=sys.stderr)
    for is_sharded, each in seconds.items():
        row = [f"loop, {SHARDS[is_sharded]}", len(each), statistics.median(each), max(each)]
        report.add(row, how=row[0], seconds=each)
    return report


def _lose(
    report: Report, name: str, how: str, kinds: Sequence[str], rounds: int, rng: random.Random, **options: Any
) -> None:
    """Loses processes of one training, and adds a row."""
    played = play(how, kinds, rounds, rng, epochs=max(60, 20 * rounds), **options)
    median, worst = statistics.median(played.seconds), max(played.seconds)
    row = [name, rounds, median, worst, f"{played.differs:.1e}", played.code]
    report.add(row, how=name, seconds=played.seconds, differs=played.differs)
