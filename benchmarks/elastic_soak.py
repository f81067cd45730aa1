# SPDX-License-Identifier: Apache-2.0
"""One training of 20 minutes that loses processes in 100 random ways: what the survivor, the launcher and the service hold, and the result.

One of the three processes is never lost. Kills, stops, exceptions, exits, two at once and SIGTERM hit the others, and each time another
process takes the place. What is held after the first ten rounds must stay.
"""

import os
import random
import statistics
import time
from pathlib import Path

from benchmarks import processes
from benchmarks.elastic import KINDS, Job, difference_from_undisturbed
from benchmarks.report import Report, verdict

_TARGET = 5.0
_WARM_UP = 10
_PAUSE_S = 0.02
_STEPS_PER_ROUND = 300
"""More than the group makes between two losses, so that the training outlasts them."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def run(*, quick: bool, rounds: int | None = None, seed: int = 0) -> Report:
    """Loses processes at random, and looks what the others hold."""
    rounds = rounds or (3 if quick else 100)
    rng, seconds = random.Random(seed), []
    held: dict[tuple[str, str], list[float]] = {}
    epochs = rounds * _STEPS_PER_ROUND // 40
    began_s = time.monotonic()
    with Job("loop", "1:3", epochs, pause_s=_PAUSE_S) as job:
        survivor = rng.choice(sorted(job.wait_until_complete()))
        watched = {"survivor": survivor, "launcher": job.pid}
        for _ in range(rounds):
            found = sorted(set(job.wait_until_complete()) - {survivor})
            for name, pid in watched.items():
                for what, value in _held(pid).items():
                    held.setdefault((name, what), []).append(value)
            time.sleep(rng.uniform(0.0, 2.0))
            kind = rng.choice(KINDS)
            seconds.append(job.lose(rng.sample(found, 2 if kind == "two" else 1), kind))
        started = processes.descendants(job.pid)
        code = job.wait(3600)
        minutes = (time.monotonic() - began_s) / 60
        orphans = [pid for pid in started if processes.is_alive(pid)]
        differs = difference_from_undisturbed(job, "loop", epochs)
    report = Report(
        "elastic_soak",
        f"{rounds} random losses in one training of {minutes:.0f} minutes: median {statistics.median(seconds):.2f} s to the next step, worst "
        f"{max(seconds):.2f} s; exit code {code}, {len(orphans)} processes left, difference of the weights {differs:.1e}. "
        f"Growth after round {_WARM_UP}, target: at most {_TARGET:g}%",
        ("process", "what", "first", "last", "most", "growth %", "target", "samples"),
    )
    for (name, what), samples in held.items():
        kept = samples[min(_WARM_UP, len(samples) // 2) :]
        growth = 100 * (statistics.median(kept[-5:]) / statistics.median(kept[:5]) - 1)
        shown = " ".join(f"{x:g}" for x in samples[:: max(1, len(samples) // 20)])
        row = [name, what, kept[0], kept[-1], max(kept), growth, verdict(growth, at_most=_TARGET), shown]
        report.add(row, process=name, what=what, growth=growth, samples=samples)
    return report


def _held(pid: int) -> dict[str, float]:
    """Returns what a process holds."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return {
        "resident MB": round(resident / 1e6, 1),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
    }
