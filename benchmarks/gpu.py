# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: the contract rows that fit on the devices of this machine, and five benchmarks, in one report.

It takes the platform from JAX, so that it also runs on CPUs. Each part runs in a process of its own with a deadline, and
the report is written after each part. It installs nothing: it skips a part whose packages are missing.
"""

import argparse
import functools
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import devices
from benchmarks.gpu_report import MEMORY, OUTCOMES, Part, Report
from benchmarks.parent import ROOT

BENCHMARKS = ("step", "fit", "memory", "host", "run_steps")
CONTRACT: dict[str, tuple[str, ...]] = {
    "test_law1_equals_one_device": (),
    "test_law2_contexts": (),
    "test_law4_checkpoints": ("safetensors",),
    "test_law4a_interrupts": (),
    "test_law5_failures": (),
    "test_law_estimator": ("safetensors", "tensorboardX", "PIL", "flatbuffers"),
    "test_law_fit_equals_keras": (),
    "test_law_fit_options": (),
    "test_law_python_calls": (),
    "test_law_saving": (),
    "test_divided_variables": (),
    "test_keras_trainer": (),
    "test_keras_trainer_callbacks": (),
    "test_keras_trainer_compile": (),
    "test_keras_trainer_data": ("grain",),
}
"""The test files that take their strategies from the table, and the modules that they import besides JAX and Keras."""

_QUICK = {"test_law1_equals_one_device": "test_mlp_trains_like_one_device"}
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
_ABORT_S = 10.0


@dataclass(frozen=True)
class Options:
    """How the parts run.

    Args:
      out: the file of the report.
      quick: whether to run one test and one row per benchmark, to see that everything works.
      deadline_s: the time of a part.
      only: the parts whose names contain this text run; empty for all parts.
    """

    out: Path
    quick: bool
    deadline_s: float
    only: str


def main() -> None:
    """Runs all parts. The exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-report.md", help="the report (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one test and one row per benchmark: to see that it works")
    parser.add_argument("--deadline", type=float, default=3600.0, help="of each part, in seconds (%(default)s)")
    parser.add_argument("--only", default="", help="the parts whose names contain this text, for example step")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="phalanx-gpu-") as folder:
        run = Run(Options(arguments.out, arguments.quick, arguments.deadline, arguments.only), Path(folder))
        run.all()
    print(f"Report: {arguments.out}")
    sys.exit(any(part.result == "failed" for part in run.report.parts))


class Run:
    """Runs the parts one after the other, and keeps the report.

    Args:
      options: how they run.
      folder: for the files that parts write.
    """

    def __init__(self, options: Options, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._machine = Part("machine")
        self._benchmarks = {name: Part(f"benchmark {name}") for name in BENCHMARKS}
        self._contract = {name: Part(f"contract {name}") for name in CONTRACT}
        parts = [self._machine, *self._contract.values(), *self._benchmarks.values()]
        self.report = Report(options.out, parts, python=platform.python_version(), is_quick=options.quick)

    def all(self) -> None:
        """Runs all parts."""
        self._measure(self._machine, self._describe)
        if self.report.machine is None:
            return
        environment = environment_of(list(self.report.machine[MEMORY]))
        changes = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        self.report.machine["variables of the other parts"] = changes
        for name, part in self._contract.items():
            reason = self._reason_to_leave_out(name)
            self._measure(part, functools.partial(self._test, part, name, environment), reason)
        for name, part in self._benchmarks.items():
            self._measure(part, functools.partial(self._benchmark, part, name, environment))

    def _measure(self, part: Part, run: Callable[[], None], reason: str = "") -> None:
        """Runs a part, unless there is a reason to leave it out, and writes the report whatever happens."""
        start = time.monotonic()
        if self._options.only not in part.name and part is not self._machine:
            reason = f"--only {self._options.only}"
        if reason:
            part.result, part.why = "left out", reason
        else:
            part.result, part.why = "failed", "interrupted"
        try:
            if not reason:
                run()
        finally:
            part.seconds = time.monotonic() - start
            self.report.write()
            print(f"{part.name}: {part.result} {part.why}".rstrip(), flush=True)

    def _reason_to_leave_out(self, test_file: str) -> str:
        if self._options.quick and test_file not in _QUICK:
            return "--quick"
        missing = [name for name in ("pytest", *CONTRACT[test_file]) if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else ""

    def _describe(self) -> None:
        file = self._folder / "machine.json"
        self._call(self._machine, ["benchmarks.machine", str(file)], environment_of([]))
        if file.exists():
            self.report.machine = json.loads(file.read_text(encoding="utf-8"))

    def _test(self, part: Part, name: str, environment: Mapping[str, str]) -> None:
        file = self._folder / f"{name}.jsonl"
        path = f"tests/contract/{name}.py" + (f"::{_QUICK[name]}" if self._options.quick else "")
        # GPUs may cause warnings that the tests do not know: they are printed, and no test fails because of them. Plugins that the
        # user has installed are not loaded.
        options = ["-p", "benchmarks.outcomes", "-p", "no:cacheprovider", "-W", "default", "-q"]
        variables = {OUTCOMES: str(file), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            self._call(part, ["pytest", *options, path], {**environment, **variables})
        finally:
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            part.add_outcomes([json.loads(line) for line in lines])

    def _benchmark(self, part: Part, name: str, environment: Mapping[str, str]) -> None:
        variables = {"PHALANX_BENCHMARK_RESULTS": str(self._folder)}
        if self._options.quick:
            variables["PHALANX_BENCHMARK_ROWS"] = "1"
        command = ["benchmarks", name, *["--quick"] * self._options.quick]
        file = self._folder / f"{name}.json"
        try:
            self._call(part, command, {**environment, **variables})
        finally:
            if file.exists():
                part.table = json.loads(file.read_text(encoding="utf-8"))

    def _call(self, part: Part, command: list[str], environment: Mapping[str, str]) -> None:
        """Runs a module in a process of its own, and notes how it ended."""
        log = self._folder / "log.txt"
        try:
            part.why = run_module(command, environment, log, self._options.deadline_s)
        finally:
            part.log = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        part.result = "failed" if part.why else "passed"


def run_module(command: list[str], environment: Mapping[str, str], log: Path, deadline_s: float) -> str:
    """Runs `python -m` in a process group of its own, which ends with this call.

    Returns:
      Why it failed; empty if it did not.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            # Python then prints the stacks of all threads.
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ABORT_S)
            return f"did not end within {deadline_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit status {code}" if code else ""


def environment_of(names: list[str]) -> dict[str, str]:
    """Returns the environment of a part that uses these devices."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PYTHONFAULTHANDLER": "1"}
    found |= {"KERAS_BACKEND": "jax", devices.VARIABLE: ",".join(names)}
    if not names or names[0].startswith("cpu:"):
        return found
    # Both sides of a comparison multiply in float32, so that the tolerances of their results are those on CPUs.
    found.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # Two processes of a benchmark share the GPU.
    if not any(name in found for name in _MEMORY_VARIABLES):
        found["XLA_CLIENT_MEM_FRACTION"] = "0.3"
    # Central storage holds its variables on the host.
    platforms = found.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        found["JAX_PLATFORMS"] = f"{platforms},cpu"
    return found


if __name__ == "__main__":
    main()
