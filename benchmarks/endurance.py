# SPDX-License-Identifier: Apache-2.0
"""Memory, threads and open files over rounds of everything: models and strategies made and dropped, signals, data that fails."""

import ctypes
import gc
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.parent import call_in_child
from benchmarks.report import Report, verdict
from benchmarks.soak import resident_bytes

_MINUTES, _QUICK_MINUTES = 30.0, 2.0
_MODELS_PER_STRATEGY = 5
_TARGET = 2.0
_ROWS, _BATCH, _WIDTH = 64, 16, 16


def run(*, quick: bool, minutes: float | None = None) -> Report:
    """Repeats rounds in one process; what it holds after the first tenth must stay."""
    minutes = minutes or (_QUICK_MINUTES if quick else _MINUTES)
    found = call_in_child("benchmarks.endurance:measure", 60 * minutes + 300, devices=2, seconds=60 * minutes)
    report = Report(
        "endurance",
        f"{minutes:g} minutes of fit, evaluate, run, run_steps, interrupts and failing data ({found['models']} models, "
        f"{found['strategies']} strategies, {found['interrupts']} interrupts, {found['failures']} failures); growth after the "
        f"first tenth is the fitted line's, target: flat (< {_TARGET}%)",
        ("what", "first", "last", "most", "growth %", "target", "samples"),
    )
    for what, samples in found["samples"].items():
        kept = samples[len(samples) // 10 :]
        slope, start = statistics.linear_regression(range(len(kept)), kept)
        growth = 100 * slope * (len(kept) - 1) / start
        shown = " ".join(f"{x:g}" for x in kept[:: max(1, len(kept) // 20)])
        row = [what, kept[0], kept[-1], max(kept), growth, verdict(growth, at_most=_TARGET), shown]
        report.add(row, what=what, growth=growth, samples=samples)
    return report


def measure(seconds: float) -> dict[str, Any]:
    """In a child: repeats rounds; returns how often what was done, and of each sample what the process held."""
    everything = _Everything()
    held: dict[str, list[float]] = {"resident MB": [], "threads": [], "open files": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        everything.round()
        _release()
        held["resident MB"].append(round(resident_bytes() / 1e6, 1))
        held["threads"].append(len(os.listdir("/proc/self/task")))
        held["open files"].append(len(os.listdir("/proc/self/fd")))
    return everything.done | {"samples": held}


def _release() -> None:
    """Gives back what nobody uses: glibc keeps up to 200 MB of freed memory, by chance more in one round than in the next."""
    gc.collect()
    with suppress(OSError, AttributeError):  # Other C libraries have no such function.
        ctypes.CDLL(None).malloc_trim(0)


class _Interrupt(BaseException):
    """What the handler of the alarm raises."""


class _Everything:
    """One long-lived training loop, and in each round a strategy with models of its own."""

    def __init__(self) -> None:
        import numpy as np

        self.done = dict.fromkeys(("models", "strategies", "interrupts", "failures"), 0)
        self._draw, rng = random.Random(0), np.random.default_rng(0)
        self._rows = rng.random((_ROWS, _WIDTH), "float32"), rng.integers(10, size=_ROWS).astype("int32")
        signal.signal(signal.SIGALRM, self._interrupt)
        self._strategy, self._model = self._made(0)

    def round(self) -> None:
        """Does everything once, and five times what makes a model."""
        import phalanx

        strategy, model = self._strategy, self._model
        dataset = strategy.experimental_distribute_dataset(self._rows, batch_size=_BATCH)
        step = phalanx.function(lambda batch: strategy.run(lambda b: model(b[0]).sum(), args=(batch,)))
        self._interrupted(lambda: [float(strategy.reduce("SUM", step(b), axis=None)) for b in dataset])
        iterator = iter(dataset)
        strategy.run_steps(lambda batch: batch[0].sum(), iterator, 3)
        self._interrupted(lambda: model.fit(*self._rows, batch_size=_BATCH, epochs=50, verbose=0))
        model.evaluate(*self._rows, batch_size=_BATCH, verbose=0)
        self._fails(lambda: [strategy.run(lambda b: b[0].sum(), args=(b,)) for b in self._failing()])
        self._fails(lambda: model.fit(self._failing(), verbose=0))
        other = None
        for _ in range(_MODELS_PER_STRATEGY):
            if other is None:
                other, short_lived = self._made(self.done["strategies"])
            else:
                short_lived = self._model_of(other)
            short_lived.fit(*self._rows, batch_size=_BATCH, verbose=0)
            short_lived.predict(self._rows[0], batch_size=_BATCH, verbose=0)

    def _made(self, number: int) -> tuple[Any, Any]:
        import phalanx

        kinds: list[Callable[[], Any]] = [
            lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"]),
            lambda: phalanx.OneDeviceStrategy("cpu:1"),
            lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
            lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded(min_size=1)),
        ]
        strategy = kinds[number % len(kinds)]()
        self.done["strategies"] += 1
        return strategy, self._model_of(strategy)

    def _model_of(self, strategy: Any) -> Any:
        import keras

        self.done["models"] += 1
        with strategy.scope():
            model = keras.Sequential([keras.Input((_WIDTH,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def _failing(self) -> Any:
        x, y = self._rows
        batches = [(x[:_BATCH], y[:_BATCH])] * 2

        def generator() -> Any:
            yield from batches
            raise OSError("a file that cannot be read")

        return self._strategy.distribute_datasets_from_function(lambda _: generator())

    def _interrupted(self, call: Callable[[], Any]) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._draw.uniform(0.01, 0.3))
        try:
            call()
        except _Interrupt:
            self.done["interrupts"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _fails(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as e:
            if "a file that cannot be read" not in f"{e} {e.__cause__}":
                raise
            self.done["failures"] += 1
        else:
            raise AssertionError("the dataset did not fail")

    def _interrupt(self, *_: object) -> None:
        raise _Interrupt
