# SPDX-License-Identifier: Apache-2.0
"""Resident memory over 10,000 steps fed by a distributed iterator, epoch after epoch."""

import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.parent import call_in_child
from benchmarks.report import Report, verdict

_PROGRAMS = {"run": 1, "run_steps, K = 16": 16}
_STEPS, _WARM_UP, _EVERY = 10_000, 1_000, 500
_TARGET = 2.0
_ROWS, _BATCH, _WIDTH = 60_000, 64, 32  # 938 batches an epoch, the last one short.


def run(*, quick: bool) -> Report:
    """Measures both loops on 1 and 2 replicas, each in a process of its own."""
    report = Report(
        "soak",
        f"Resident memory over {_STEPS} steps after {_WARM_UP}; growth is the fitted line's, target: flat (< {_TARGET}%)",
        ("loop", "replicas", "steps", "first MB", "last MB", "peak MB", "kB a 1000 steps", "growth %", "target", "MB"),
    )
    for title, steps in _PROGRAMS.items():
        for replicas in (1, 2):
            count = 3_000 if quick else _STEPS
            samples = call_in_child("benchmarks.soak:measure", 600, devices=replicas, count=count, steps=steps)
            _add(report, title, replicas, samples)
    return report


def _add(report: Report, title: str, replicas: int, samples: list[tuple[int, int]]) -> None:
    at, bytes_ = zip(*samples, strict=True)
    slope, start = statistics.linear_regression(at, bytes_)
    growth = 100 * slope * (at[-1] - at[0]) / (start + slope * at[0])
    sizes = [f"{b / 1e6:.1f}" for b in (bytes_[0], bytes_[-1], max(bytes_))]
    row = [title, replicas, at[-1], *sizes, f"{slope:.2f}", growth, verdict(growth, at_most=_TARGET)]
    all_samples = " ".join(f"{b / 1e6:.0f}" for b in bytes_)
    report.add([*row, all_samples], loop=title, replicas=replicas, growth=growth, slope=slope, samples=samples)


def measure(count: int, steps: int) -> list[tuple[int, int]]:
    """In a child: trains for `count` steps after the warm-up; returns after how many there were how many resident bytes."""
    import numpy as np

    import phalanx
    from benchmarks.with_phalanx import train_step

    strategy = phalanx.MirroredStrategy()
    step = train_step(strategy, _model)
    rng = np.random.default_rng(0)
    rows = rng.random((_ROWS, _WIDTH), dtype="float32"), rng.integers(10, size=_ROWS).astype("int32")
    loop = _Loop(strategy, step, strategy.experimental_distribute_dataset(rows, batch_size=_BATCH), steps)
    loop.until(_WARM_UP)
    samples = []
    for at in range(_WARM_UP, _WARM_UP + count + 1, _EVERY):
        loop.until(at)
        samples.append((loop.done - _WARM_UP, resident_bytes()))
    return samples


def _model() -> Any:
    import keras

    return keras.Sequential([keras.Input((_WIDTH,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])


class _Loop:
    """A training loop that can be interrupted after any number of steps."""

    def __init__(self, strategy: Any, step: Any, dataset: Any, steps: int) -> None:
        self._strategy, self._step, self._dataset, self._steps = strategy, step, dataset, steps
        self._iterator = iter(dataset)
        self.done = 0

    def until(self, at: int) -> None:
        """Trains on, and waits for the last step."""
        import phalanx

        loss = None
        while self.done < at:
            try:
                loss = self._next()
            except phalanx.errors.OutOfRangeError:
                self._iterator = iter(self._dataset)
        if loss is not None:
            self._strategy.reduce("SUM", loss, axis=None)

    def _next(self) -> Any:
        if self._steps == 1:
            loss = self._strategy.run(self._step, args=(self._iterator.get_next(),))
            self.done += 1
        else:
            loss = self._strategy.run_steps(self._step, self._iterator, self._steps)
            self.done += len(loss.values[0])
        return loss


def resident_bytes() -> int:
    """Returns how much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
