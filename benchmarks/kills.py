# SPDX-License-Identifier: Apache-2.0
"""`kill -9` at random moments of a custom loop that saves every 5 steps, again and again; each time it starts again.

Each start must restore the newest checkpoint that is on the disk, and every checkpoint must be whole. Every step, of whatever
start, must have the rows and the loss, to the last bit, that it has in a training that nothing disturbs. With sharded variables,
the kills come while a checkpoint is saved, and all shards that a start restores must have been saved by one start.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.numpy

from benchmarks.parent import ROOT
from benchmarks.report import Report

EVERY = 5
"""Steps between two saves."""

_LAST_STEPS = 20
_FIRST_SAVE_S = 0.2
_DEADLINE_S = 300.0
_OF_THE_PARENT = ("NPROC", "PHALANX_CPU_DEVICES", "PYTHONPATH")


@dataclass
class Job:
    """A training that is killed and started again.

    Args:
      workers: how many processes it has.
      folder: for its checkpoints and its log.
      popen: starts a process, as `subprocess.Popen` does.
      is_sharded: whether the variables are fully sharded, and kills come during saves.
      starts: how many there were.
      inside: how many kills came before the checkpoint that was being saved was complete.
      restored: the step that each start restored.
      faults: what was not as it should be.
    """

    workers: int
    folder: Path
    popen: type[subprocess.Popen] = subprocess.Popen
    is_sharded: bool = False
    starts: int = 0
    inside: int = 0
    restored: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def run(self, rng: random.Random | None, until: int | None = None) -> None:
        """Starts it, and kills it after a random time if there is an `rng`."""
        newest = self.newest()
        process = self._start(until)
        timer = threading.Timer(_DEADLINE_S, process.kill)
        timer.start()
        try:
            if rng is not None:
                self._kill(process, rng)
            output, _ = process.communicate()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        entries = self.log(self.starts)
        restored = {entry["restored"] for entry in entries}
        savers = {start for entry in entries for start in entry["saved_by"]}
        self.starts += 1
        self.restored += restored
        if len(savers) != 1:
            self.faults.append(f"start {self.starts} restored shards that the starts {savers} saved")
        if rng is None and process.returncode:
            self.faults.append(f"start {self.starts} ended with {process.returncode}: {output[-2000:]}")
        if restored != {newest}:
            self.faults.append(
                f"start {self.starts} restored step {restored}, and the newest checkpoint is of {newest}: {output[-2000:]}"
            )

    def newest(self) -> int:
        """Returns the step of the newest checkpoint, after reading all of them without Phalanx."""
        steps = [0]
        for file in self.folder.glob("*-*.safetensors"):
            try:
                steps.append(int(safetensors.numpy.load_file(file)["step"]))
                pieces = [safetensors.numpy.load_file(f) for f in file.with_suffix(".shards").glob("*.safetensors")]
                if self.is_sharded and len(pieces) != self.workers:
                    self.faults.append(f"{file.name} has the shards of {len(pieces)} processes")
            except Exception as e:
                self.faults.append(f"{file.name} cannot be read: {e}")
        return max(steps)

    def log(self, start: int | str = "*") -> list[dict[str, Any]]:
        """Returns what all workers wrote after each step, in one start or in all."""
        entries = []
        for file in sorted(self.folder.glob(f"log-*-{start}")):
            lines = file.read_text().split("\n")
            # A killed process may have written a part of its last line.
            entries += [json.loads(line) for line in lines if line.endswith("}")]
        return entries

    def _start(self, until: int | None) -> subprocess.Popen[str]:
        target = ["-m", "benchmarks.kills_script", str(self.folder), str(self.starts), str(until or 0)]
        launcher = ["-m", "phalanx", "run", "--workers", str(self.workers)]
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_PARENT}
        environment |= {
            "PYTHONPATH": str(ROOT / "src"),  # Phalanx need not be installed.
            "JAX_PLATFORMS": "cpu",
            "SHARDED": "yes" if self.is_sharded else "no",
        }
        return self.popen(
            [sys.executable, *([] if self.workers == 1 else launcher), *target],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _kill(self, process: subprocess.Popen[str], rng: random.Random) -> None:
        """Kills one worker, or all, after its first step and a random time, or a random part of the time of a save."""
        deadline = time.monotonic() + _DEADLINE_S
        saves, pids = rng.randint(1, 3) if self.is_sharded else 0, {}
        # Without shards, between once and some thirty steps: in a step, in a copy, in the writing of a file.
        pause_s = rng.uniform(0.0, self._save_s() if self.is_sharded else 0.3)
        while len(pids) < self.workers or len(self._saves()) < saves:
            if process.poll() is not None or time.monotonic() > deadline:
                self.faults.append(f"start {self.starts + 1} made no step")
                return
            time.sleep(0.002)
            pids = {e["rank"]: e["pid"] for e in self.log(self.starts)}
        time.sleep(pause_s)
        for pid in rng.choice([list(pids.values()), [rng.choice(list(pids.values()))]]):
            os.kill(pid, signal.SIGKILL)
        # Looks after the kill, so that a save that counts had not ended when it came.
        self.inside += any(not self._file(step).exists() for step in list(self._saves())[-1:])

    def _saves(self) -> dict[int, float]:
        """Returns when the saves of this start began, by step. The chief writes down a step just before it saves."""
        return {e["step"]: e["at_s"] for e in self.log(self.starts) if e["rank"] == 0 and e["step"] % EVERY == 0}

    def _save_s(self) -> float:
        """Returns the median time in seconds that the newest checkpoints took."""
        begun = {e["step"]: e["at_s"] for e in self.log() if e["rank"] == 0 and self._file(e["step"]).exists()}
        seconds = [self._file(step).stat().st_mtime - at_s for step, at_s in begun.items() if step % EVERY == 0]
        return statistics.median(seconds or [_FIRST_SAVE_S])

    def _file(self, step: int) -> Path:
        """Returns the file of the checkpoint that is saved after a step."""
        return self.folder / f"ckpt-{step // EVERY}.safetensors"


@dataclass(frozen=True)
class Played:
    """The result of a job.

    Args:
      steps: how many steps it had at its end.
      repeated: how many steps were trained again, because a kill came before they were saved.
      inside: how many kills came before the checkpoint that was being saved was complete.
      restored: the step that each start restored.
      faults: what was not as it should be.
    """

    steps: int
    repeated: int
    inside: int
    restored: list[int]
    faults: list[str]


def play(
    workers: int,
    kills: int,
    seed: int,
    popen: type[subprocess.Popen] = subprocess.Popen,
    *,
    is_sharded: bool = False,
) -> Played:
    """Kills a job so many times, ends it, trains another one as far without a kill, and compares them."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        job, other = (Job(workers, Path(name, kind), popen, is_sharded) for kind in ("killed", "undisturbed"))
        for each in (job, other):
            each.folder.mkdir()
        for _ in range(kills):
            job.run(rng)
        steps = job.newest() + _LAST_STEPS
        job.run(None, steps)
        other.run(None, steps)
        done = [e["step"] for e in job.log() if e["rank"] == 0]
        faults = [*job.faults, *other.faults, *_differences(job, other, steps)]
        return Played(steps, len(done) - len(set(done)), job.inside, job.restored, faults)


def _differences(job: Job, other: Job, until: int) -> Iterator[str]:
    """Yields where the rows or the loss of a step are others than those of the undisturbed training."""
    expected = {(e["rank"], e["step"]): (e["rows"], e["loss"]) for e in other.log()}
    rows = [row for (_, step), (own, _) in expected.items() for row in own if step <= until]
    if len(rows) != len(set(rows)):
        yield "the undisturbed training saw a row twice"
    for e in job.log():
        # A start may have come further than the end, and been killed before it saved.
        if e["step"] <= until and (e["rows"], e["loss"]) != expected[e["rank"], e["step"]]:
            yield f"step {e['step']} of start {e['start'] + 1} in rank {e['rank']} has other rows or another loss"
    reached = {(e["rank"], e["step"]) for e in job.log() if e["step"] <= until}
    if reached != set(expected):
        yield f"{len(set(expected) - reached)} steps were left out"


def run(*, quick: bool, rounds: int = 200, seed: int = 0) -> Report:
    """Kills jobs of one and of two processes, so many times together.

    Raises:
      SystemExit: something was not as it should be. It comes after the report.
    """
    return _run("kills", (1, 2), 3 if quick else rounds // 2, seed, is_sharded=False)


def run_sharded(*, quick: bool, rounds: int = 60, seed: int = 0) -> Report:
    """Kills a job of two processes that shard their variables, so many times while it saves.

    Raises:
      SystemExit: something was not as it should be. It comes after the report.
    """
    return _run("sharded_kills", (2,), 3 if quick else rounds, seed, is_sharded=True)


def _run(name: str, sizes: Sequence[int], kills: int, seed: int, *, is_sharded: bool) -> Report:
    moments = "in saves" if is_sharded else "at random moments"
    report = Report(
        name,
        f"kill -9 {moments} of a loop that saves every {EVERY} steps: what the next start restores, and the end",
        ("processes", "kills", "in a save", "restored steps", "steps to the end", "done twice", "minutes", ""),
    )
    faults: list[str] = []
    for workers in sizes:
        began_s = time.monotonic()
        played = play(workers, kills, seed, is_sharded=is_sharded)
        faults += played.faults
        verdict = "; ".join(played.faults[:3]) or "newest checkpoint restored each time, all rows and losses the same"
        restored, minutes = " ".join(map(str, played.restored)), (time.monotonic() - began_s) / 60
        row = [workers, kills, played.inside, restored, played.steps, played.repeated, minutes, verdict]
        report.add(row, workers=workers, kills=kills, **asdict(played))
    report.show()
    if faults:
        raise SystemExit(f"{len(faults)} faults: {faults[:5]}")
    return report
