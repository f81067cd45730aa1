# SPDX-License-Identifier: Apache-2.0
"""Runs a script on some or all devices of this machine, in turn, and reports how fast it was. Imports no JAX."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx._src.cluster.untrusted import parse_json, read_data
from phalanx._src.launch.plan import Machine
from phalanx._src.tools.bench.timeline import NAMES, Moments, Result, in_words, parts_of
from phalanx._src.tools.env import report
from phalanx.errors import InvalidArgumentError, StartupError

_WARM_UP = 5
"""Steps before the measurement. The first one compiles."""
_TAIL = 4000
TOO_FEW = 3
"""The exit code of a script that ends before it has made enough steps."""


@dataclass(frozen=True)
class Script:
    """What to run.

    Args:
      target: the path of a script, or the name of a module.
      arguments: its arguments. `{devices}` and `{processes}` in them are replaced by the numbers of a run.
      is_module: whether `target` is a module.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def command(self, processes: int, devices: int, calls: int, path: Path) -> list[str]:
        """Returns the command that notes the moments of so many calls in files whose names begin with a path."""
        filled = [a.replace("{devices}", f"{devices}").replace("{processes}", f"{processes}") for a in self.arguments]
        kind = "module" if self.is_module else "script"
        return [
            *launcher(processes, devices),
            "-m",
            "phalanx._src.tools.bench.recorder",
            f"{calls}",
            f"{path}",
            kind,
            self.target,
            *filled,
        ]


def launcher(processes: int, devices: int) -> list[str]:
    """Returns the command that starts so many processes of a script."""
    workers = ["--workers", f"{processes}", "--devices-per-worker", f"{devices}"]
    # -P: the current folder, from which nothing is imported, may be another user's.
    return [sys.executable, "-P", "-m", "phalanx", "run", *workers]


@dataclass(frozen=True)
class Options:
    """How to measure.

    Args:
      devices: the most devices of one process.
      processes: the most processes.
      rounds: how often to run each number of devices and processes.
      steps: number of calls of the training program to measure in each run.
      timeout_s: seconds after which a run is given up.
    """

    devices: int
    processes: int
    rounds: int = 3
    steps: int = 30
    timeout_s: float = 600.0

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the numbers of processes, and of devices of each."""
        # One process with one device is in the first list already.
        return [(1, n) for n in _up_to(self.devices)] + [(n, 1) for n in _up_to(self.processes)[1:]]


def _up_to(most: int) -> list[int]:
    """Returns the powers of two up to a number, and the number."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


class _ScriptError(StartupError):
    """A script does not get to its end with some number of devices and processes."""

    def __init__(self, call: str, what: str, hint: str, output: str) -> None:
        super().__init__(call, f"{what}. The end of its output:\n{output[-_TAIL:]}", hint)
        self.summary = f"{what}: {output.splitlines()[-1]}" if output else f"{what}."


@dataclass
class Measured:
    """What was measured.

    Args:
      script: the script, in words.
      results: one for each number of devices and processes.
      notes: what was skipped, and why.
      machine: facts about the machine, and the versions of the libraries.
    """

    script: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)


def measure(script: Script, options: Options, say: Callable[[str], None]) -> Measured:
    """Runs a script with each number of devices and processes in turn.

    Args:
      script: the script.
      options: how to measure.
      say: called with the description of each run when it begins.

    Raises:
      StartupError: the script fails with each of them, makes too few steps, or takes too long.
    """
    shapes = options.shapes()
    failures: list[_ScriptError] = []
    runs: dict[tuple[int, int], list[list[Moments]]] = {}
    measured = Measured(" ".join([script.target, *script.arguments]), machine=this_machine())
    # All shapes in each round, so that whatever slows the machine for a while slows all of them.
    for number in range(options.rounds):
        for shape in list(shapes):  # The loop removes shapes.
            say(f"round {number + 1} of {options.rounds}: {in_words(*shape)}")
            try:
                moments = _run(script, *shape, options)
                why = _useless(shape, moments, [x[0] for x in runs.values()]) if number == 0 else None
            except _ScriptError as e:
                # The script has run with this shape before, so that the shape is not the reason.
                if number > 0:
                    raise
                failures.append(e)
                why = f"{in_words(*shape)}: {e.summary}"
            if why is None:
                runs.setdefault(shape, []).append(moments)
            else:
                shapes.remove(shape)
                measured.notes.append(why)
        if not runs:
            raise failures[0]
    measured.results = [result_of(shape, found) for shape, found in runs.items()]
    return measured


def _useless(shape: tuple[int, int], moments: Sequence[Moments], others: Sequence[Sequence[Moments]]) -> str | None:
    """Returns why a run adds no information, or None if it does."""
    processes, devices = shape
    if moments[0].num_processes < processes:
        return f"{processes} processes: each trains alone. A MultiWorkerMirroredStrategy would train on all of them together."
    known = [each[0].num_replicas for each in others if each[0].num_processes == processes]
    if devices > 1 and moments[0].num_replicas in known:
        return (
            f"{devices} devices: the script uses {moments[0].num_replicas} of them, as with fewer. If it has an argument for their "
            "number, {devices} in it stands for the number of a run."
        )
    return None


def _run(script: Script, processes: int, devices: int, options: Options) -> list[Moments]:
    calls = _WARM_UP + options.steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "moments"
        command = script.command(processes, devices, calls, path)
        # With a PHALANX_CPU_DEVICES of the caller, `phalanx run` would refuse other numbers of devices.
        environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PHALANX_CPU_DEVICES")}
        try:
            done = subprocess.run(
                command, check=False, env=environment, capture_output=True, text=True, timeout=options.timeout_s
            )
        except subprocess.TimeoutExpired as e:
            raise StartupError(
                f"{script.target} with {in_words(processes, devices)}",
                f"it has not run {calls} steps in {options.timeout_s:g} s.",
                "phalanx bench --steps 10, or a longer --timeout-seconds",
            ) from e
        files = sorted(Path(folder).glob("moments.*"))
        if len(files) < processes:
            call, output = f"{script.target} with {in_words(processes, devices)}", (done.stdout + done.stderr).rstrip()
            if done.returncode == TOO_FEW:
                what = f"it has not run {calls} training steps, {_WARM_UP} of them to warm up"
                hint = "a longer run of fit or strategy.run, or a smaller phalanx bench --steps. A training step applies an optimizer, assigns a trainable variable, or returns the state that it takes"
            else:
                what = f"it has failed with exit code {done.returncode}"
                hint = f"phalanx run --workers {processes} --devices-per-worker {devices} {script.target}"
            raise _ScriptError(call, what, hint, output)
        moments = [Moments.from_json(json.loads(file.read_text())) for file in files]
        if any(one.num_steps <= _first_step(moments[0]) for one in moments):
            raise _ScriptError(
                f"{script.target} with {in_words(processes, devices)}",
                f"its replicas have run {min(one.num_steps for one in moments)} training steps in {calls} calls",
                "update the weights in the function that strategy.run calls: assign them, or return them as phalanx.Mirrored",
                (done.stdout + done.stderr).rstrip(),
            )
        return sorted(moments, key=lambda one: one.rank)


def result_of(shape: tuple[int, int], rounds: Sequence[Sequence[Moments]]) -> Result:
    """Returns the result of some rounds.

    Args:
      shape: number of processes, and of devices of each.
      rounds: the moments of all processes, for each round.
    """
    speeds, parts, late = [], [], []
    for moments in rounds:
        steps, latest = parts_of(moments, _first_step(moments[0]))
        speeds.append(len(steps) / sum(step.step for step in steps))
        parts.append([statistics.mean(getattr(step, name) for step in steps) for name in NAMES])
        late.append(latest)
    # Of an even number the lower one, whose parts add up to its step.
    speed, rows = statistics.median_low(speeds), rounds[0][0].rows
    return Result(
        *shape,
        rounds[0][0].num_replicas,
        speed,
        None if rows is None else rows * speed,
        dict(zip(NAMES, parts[speeds.index(speed)], strict=True)),
        max(late[0], key=lambda rank: statistics.mean(each[rank] for each in late)),
        speeds,
    )


def _first_step(moments: Moments) -> int:
    """Returns the first step to measure. A call may make several steps."""
    return max(1, _WARM_UP * moments.num_steps // len(moments.calls))


def default_devices() -> int:
    """Returns the number of devices that a measurement takes if the user names none: GPUs, or else cores, at most 8."""
    machine = Machine.this(os.environ)
    return min(8, len(machine.gpus) or machine.cores)


def this_machine() -> dict[str, str]:
    """Returns facts about this machine, and the versions of the libraries."""
    return report.system() | {"gpus": f"{len(Machine.this(os.environ).gpus)}"} | report.versions()


def read(path: str) -> Measured:
    """Returns the content of a JSON file.

    Raises:
      InvalidArgumentError: it is not such a file.
    """
    try:
        saved = parse_json(read_data(Path(path)))
        if "links" in saved:
            raise TypeError("it holds links")
        # A file also has what is computed from the fields: the name and the verdict.
        names = set(Result.__dataclass_fields__)
        results = [Result(**{k: v for k, v in one.items() if k in names}) for one in saved["results"]]
        for one in results:  # What the table needs.
            _ = one.name, 1 / one.steps_per_s, *map("{:.2f}".format, (*one.rounds, *map(one.parts.__getitem__, NAMES)))
        return Measured(saved["script"], results, saved["notes"], dict(saved["machine"]))
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as e:
        raise InvalidArgumentError(
            f"--compare {path}", f"cannot be read as a measurement: {e}.", "phalanx bench --output FILE.json train.py"
        ) from e


def pairs(before: Measured, after: Measured) -> Iterator[tuple[Result, Result]]:
    """Yields the results for the same devices of two measurements."""
    results_after = {one.name: one for one in after.results}
    yield from ((one, results_after[one.name]) for one in before.results if one.name in results_after)
