# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at random moments of training loops: is a variable lost, a step halved, an interrupt swallowed?"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.parent import call_in_child
from benchmarks.report import Report, verdict

_STRATEGIES = ("OneDevice", "Mirrored 2", "fully sharded 2", "CentralStorage 2")
_LOOPS = ("run", "run and reduce", "run_steps", "function", "fit")
_LATEST_S, _SWALLOWED_S = 0.02, 20.0
_ROWS, _BATCH = 96, 8


def run(*, quick: bool, rounds: int | None = None) -> Report:
    """Interrupts each loop under each strategy, in processes of their own, with a busy process beside them."""
    count = rounds or (50 if quick else 1000)
    report = Report(
        "interrupts",
        f"{count} interrupts (SIGINT) at random moments of each loop, a busy process beside it; target: nothing in the last three columns",
        ("strategy", "loop", "interrupts", "steps", "variables lost", "half steps", "swallowed", "target"),
    )
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for strategy in _STRATEGIES:
            for loop in _LOOPS:
                found = call_in_child(
                    "benchmarks.interrupts:measure", 60 + count, devices=3, strategy=strategy, loop=loop, count=count
                )
                bad = [found[name] for name in ("lost", "half", "swallowed")]
                row = [strategy, loop, found["heard"], found["steps"], *bad, verdict(sum(bad), at_most=0)]
                report.add(row, strategy=strategy, loop=loop, **found)
    finally:
        busy.kill()
        busy.wait()
    return report


def measure(strategy: str, loop: str, count: int) -> dict[str, int]:
    """In a child: interrupts a loop so many times, and looks at all variables after each interrupt."""
    training = _Training(strategy)
    step, draw = training.loops()[loop], random.Random(f"{strategy} {loop}")
    for _ in range(2):
        step()
    found = {"heard": 0, "swallowed": 0, "lost": 0, "half": 0}
    for _ in range(count):
        timer = threading.Timer(draw.uniform(0.0005, _LATEST_S), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            _until_interrupted(step, timer)
            found["swallowed"] += 1
        except KeyboardInterrupt:
            found["heard"] += 1
        timer.join()
        steps = training.steps()
        found["lost"] += steps is None
        found["half"] += steps is not None and len(steps) > 1
    return found | {"steps": max(training.steps() or {0})}


def _until_interrupted(step: Callable[[], Any], timer: threading.Timer) -> None:
    late = None
    while late is None or time.monotonic() < late:
        step()
        if late is None and not timer.is_alive():
            late = time.monotonic() + _SWALLOWED_S


class _Training:
    """A model whose step counts in several variables, which must agree."""

    def __init__(self, strategy: str) -> None:
        import keras
        import numpy as np

        import phalanx

        two = ["cpu:0", "cpu:1"]
        self._strategy = {
            "OneDevice": lambda: phalanx.OneDeviceStrategy("cpu:1"),
            "Mirrored 2": lambda: phalanx.MirroredStrategy(two),
            "fully sharded 2": lambda: phalanx.MirroredStrategy(two, layout=phalanx.fully_sharded(min_size=1)),
            "CentralStorage 2": lambda: phalanx.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"),
        }[strategy]()
        with self._strategy.scope():
            layers = keras.layers
            self._dropout = layers.Dropout(0.5)
            self._model = keras.Sequential(
                [keras.Input((20,)), layers.Dense(32), layers.BatchNormalization(), self._dropout, layers.Dense(10)]
            )
            self._model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            self._losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        rng = np.random.default_rng(0)
        self._rows = rng.random((_ROWS, 20), "float32"), rng.integers(10, size=_ROWS).astype("int32")
        self._dataset = self._strategy.experimental_distribute_dataset(self._rows, batch_size=_BATCH)
        self._batch, self._iterator = next(iter(self._dataset)), iter(self._dataset)
        self._seeds = int(self._dropout.seed_generator.state.numpy()[1])

    def loops(self) -> dict[str, Callable[[], Any]]:
        """Returns what each loop does again and again; its programs are compiled."""
        import phalanx

        strategy, step, batch = self._strategy, self._step, self._batch
        whole = phalanx.function(lambda batch: strategy.run(step, args=(batch,)))
        loops: dict[str, Callable[[], Any]] = {
            "run": lambda: strategy.run(step, args=(batch,)),
            "run and reduce": lambda: float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)),
            "run_steps": self._run_steps,
            "function": lambda: whole(batch),
            "fit": lambda: self._model.fit(*self._rows, batch_size=_BATCH, epochs=3, verbose=0),
        }
        return loops

    def _step(self, batch: Any) -> Any:
        import phalanx

        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(self._losses(y, self._model(x, training=True)))
        variables = self._model.trainable_variables
        self._model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def _run_steps(self) -> None:
        import phalanx

        try:
            self._strategy.run_steps(self._step, self._iterator, 3)
        except phalanx.errors.OutOfRangeError:
            self._iterator = iter(self._dataset)

    def steps(self) -> set[int] | None:
        """Returns how many steps each counter has counted; None if a variable is lost."""
        import numpy as np

        try:
            for variable in (*self._model.variables, *self._model.optimizer.variables):
                np.asarray(variable.numpy())
            drawn = int(self._dropout.seed_generator.state.numpy()[1]) - self._seeds
            return {drawn, int(self._model.optimizer.iterations.numpy())}
        except RuntimeError:
            return None
