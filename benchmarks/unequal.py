# SPDX-License-Identifier: Apache-2.0
"""Two processes of which one has half a core train together: the steps per second by their shares of a batch.

Each is pinned to a core. A third process computes something else on the core of the second one, so this needs Linux and two cores.
"""

import os
import re
import statistics
import subprocess
import sys

from benchmarks.parent import ROOT
from benchmarks.report import Report

_CHOICES = {"equal shares": "None", "replica_weights=[2, 1]": "[2, 1]", 'replica_weights="auto"': "'auto'"}
_DEADLINE_S = 300
_STEPS = 30


def _measured(weights: str, steps: int) -> tuple[float, list[float]]:
    """Returns the steps per second, and the weights at the end."""
    command = [sys.executable, "-m", "phalanx", "run", "--workers", "2", "benchmarks/unequal_script.py", weights]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu", "PHALANX_CPU_DEVICES": "1"}
    done = subprocess.run(
        [*command, f"{steps}"],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    found = re.search(r"seconds (\S+)(.*)", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return steps / float(found[1]), list(map(float, found[2].split()))


def run(*, quick: bool, rounds: int = 5, seed: int = 0) -> Report:
    """Trains with each kind of shares in turn, and compares the steps per second with those of equal shares."""
    del seed  # Nothing is drawn.
    report = Report(
        "unequal",
        "Two processes, of which one has half a core, train an MLP: steps per second (ratio: to equal shares; 1.5 if only rows took time)",
        ("shares", "steps/s", "ratio", "weights at the end", "all rounds"),
    )
    speeds: dict[str, list[float]] = {name: [] for name in _CHOICES}
    weights: dict[str, list[float]] = {}

    def play(name: str) -> None:
        speed, weights[name] = _measured(_CHOICES[name], 2 if quick else _STEPS)
        speeds[name].append(speed)

    report.measure(lambda n=name: play(n) for _ in range(1 if quick else rounds) for name in _CHOICES)
    for name, found in speeds.items():
        ratio = statistics.median(x / y for x, y in zip(found, speeds["equal shares"], strict=True))
        shown = " ".join(f"{x:.2f}" for x in found)
        report.add([name, statistics.median(found), ratio, str(weights[name] or ""), shown], name=name, speeds=found)
    return report
