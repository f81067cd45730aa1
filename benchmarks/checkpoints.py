# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring against plain copies, `numpy.save` and Orbax called by hand, and what saving costs a training.

Each round measures all of them, one after the other, on the same variables. torch saves tensors of the same shapes in an
environment of its own. Two processes that share 1 GB of variables are compared with Orbax in two processes of JAX that share as
many arrays, and so is one process that restores what the two have saved.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.parent import Child, call_in_child
from benchmarks.report import Report, verdict
from benchmarks.workers import Workers

_CASES = {"MLP, 8 MB": (784, (512, 512, 10), 64), "50 MB": (1024, (1024, 1024, 1024, 1024), 64)}
"""Inputs, units of the layers, and rows of a batch. Adam's slots make each model three times as large."""

_EVERY = 10
_COLUMNS = ("model", "what", "ms", "against", "ms", "ratio", "target", "all rounds")
_PAIRS = (
    ("save blocks for", "blocks", "copy to the host", "copy", 1.2),
    ("whole save, with fsync", "whole", "numpy.save", "numpy", 1.5),
    ("restore", "restore", "numpy.load and placement", "load", 1.5),
    ("save blocks for", "blocks", "Orbax save_async", "orbax blocks", None),
    ("whole save, with fsync", "whole", "Orbax save_async, to the end", "orbax whole", None),
    ("restore", "restore", "Orbax load", "orbax load", None),
    (f"{_EVERY} steps and a save", "saving", f"{_EVERY} steps", "training", None),
    (f"{_EVERY} steps and a copy to the host", "copying", f"{_EVERY} steps", "training", None),
    (f"{_EVERY} steps and a save", "saving", f"{_EVERY} steps and a copy", "copying", 1.04),
    (f"{_EVERY} steps and a copy that a thread writes", "writing", f"{_EVERY} steps and a copy", "copying", None),
)
_TORCH = (
    ("save blocks for", "blocks", "torch DCP async_save, 2 processes", "dcp blocks"),
    ("whole save", "whole", "torch.save", "torch"),
)
_SHARDED = (
    ("save blocks for", 2, "save", "blocks", "Orbax save_async"),
    ("save and the next step", 2, "save", "next", "Orbax save_async and the next step"),
    ("whole save, with fsync", 2, "save", "whole", "Orbax save_async, to the end"),
    ("restore", 2, "load", "whole", "Orbax load"),
    ("restore in 1 process", 1, "load", "whole", "Orbax load in 1 process"),
    ("peak memory in a save, MB per process", 2, "save", "peak", "Orbax save_async"),
    ("peak memory in a restore, MB per process", 2, "load", "peak", "Orbax load"),
    ("peak memory in a restore in 1 process, MB", 1, "load", "peak", "Orbax load in 1 process"),
)


def run(*, quick: bool) -> Report:
    """Measures each model in a process of its own."""
    report = Report("checkpoints", "Saving and restoring in one process on one device", _COLUMNS)
    rounds = 3 if quick else 15
    for case in _CASES:
        found = call_in_child("benchmarks.checkpoints:measure", 900, devices=1, case=case, rounds=rounds)
        for what, own, against, other, target in _PAIRS:
            _add(report, case, what, found[own], against, found[other], target)
        if not quick:
            with Child(python=str(peers.interpreter("torch", peers.TORCH))) as torch:
                theirs = torch.call("benchmarks.checkpoints_torch:measure", 600, shapes=found["shapes"], rounds=rounds)
            for what, own, against, other in _TORCH:
                _add(report, case, what, found[own], against, theirs[other], None)
    return report


def run_sharded(*, quick: bool, rounds: int = 7) -> Report:
    """Measures two processes that share their variables, and one process that restores what they have saved."""
    report = Report("sharded_checkpoints", "Saving and restoring 1 GB of variables that two processes share", _COLUMNS)
    shared = _sharded(rounds=3 if quick else rounds)
    for what, workers, call, figure, against in _SHARDED:
        # The slowest process, and the one that needs most memory.
        ours, orbax = (
            [max(process[figure] for process in each) for each in shared[name, workers, call]]
            for name in ("sharded", "orbax")
        )
        _add(report, "1 GB, sharded, 2 processes", what, ours, against, orbax, None)
    return report


def _sharded(rounds: int) -> dict[tuple[str, int, str], list[list[dict[str, float]]]]:
    """Saves in two processes and restores in two and in one, and returns what all processes measured in each round."""
    found: dict[tuple[str, int, str], list[list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        groups = {(name, n): stack.enter_context(Workers(n)) for name in ("sharded", "orbax") for n in (2, 1)}
        for (name, n), group in groups.items():
            options = {"folder": f"{folder}/{n}"} if name == "sharded" else {}
            sizes = group.call(f"benchmarks.checkpoints_{name}:prepare", 300, **options)
            # Phalanx also has a few numbers, which it does not divide.
            assert all(abs(n * here - total) < _NUMBERS for here, total in sizes)
        for number in range(rounds + 1):
            shutil.rmtree(f"{folder}/orbax", ignore_errors=True)
            path = {"sharded": f"{folder}/2/ckpt-{number + 1}", "orbax": f"{folder}/orbax"}
            for call, n in (("save", 2), ("load", 2), ("load", 1)):
                for name, file in path.items():
                    figures = groups[name, n].call(f"benchmarks.checkpoints_{name}:{call}", 300, path=file)
                    if number:  # The first one compiles.
                        found.setdefault((name, n, call), []).append(figures)
    return found


def _add(
    report: Report, case: str, what: str, own: list[float], against: str, other: list[float], target: float | None
) -> None:
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    ratio = statistics.median(ratios)
    own_ms, other_ms = 1000 * statistics.median(own), 1000 * statistics.median(other)
    met = verdict(ratio, at_most=target) if target else verdict(ratio)
    texts = " ".join(f"{r:.2f}" for r in ratios)
    report.add([case, what, own_ms, against, other_ms, ratio, met, texts], case=case, what=what, own=own, other=other)


def measure(case: str, rounds: int) -> dict[str, Any]:
    """In a child: seconds of each round, by what was measured."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from phalanx.train import Checkpoint, CheckpointManager

    model, step = _training(case)
    variables = [*model.variables, *model.optimizer.variables]
    arrays = lambda: [v.value for v in variables]  # noqa: E731
    found: dict[str, Any] = {"shapes": [list(v.shape) for v in variables]}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        manager = CheckpointManager(Checkpoint(model=model), folder / "phalanx", max_to_keep=1)
        restored = Checkpoint(model=model)
        options = ocp.Context()
        options.array.saving.use_compression = False

        def copy() -> None:
            _ = [np.array(array) for array in arrays()]

        writer = stack.enter_context(ThreadPoolExecutor(1))
        written = [writer.submit(lambda: None)]

        def write(copies: list[np.ndarray]) -> None:
            with (folder / "plain").open("wb") as file:
                for each in copies:
                    file.write(each.data)
                os.fsync(file.fileno())

        def copy_and_write() -> None:
            """The least that a save can do: no names, no sums, no older file that stays until the new one is complete."""
            copies = [np.array(array) for array in arrays()]
            written[0].result()
            written[0] = writer.submit(write, copies)

        def load() -> None:
            placed = [jax.device_put(np.load(folder / f"{i}.npy"), array.sharding) for i, array in enumerate(arrays())]
            jax.block_until_ready(placed)

        def numpy() -> None:
            for i, array in enumerate(arrays()):
                np.save(folder / f"{i}.npy", np.asarray(array))

        def orbax() -> tuple[float, float]:
            shutil.rmtree(folder / "orbax", ignore_errors=True)
            with options:
                start = time.perf_counter()
                response = ocp.save_async(folder / "orbax", arrays())
                blocks = time.perf_counter() - start
                response.result()
            return blocks, time.perf_counter() - start

        def orbax_load() -> None:
            with options:
                jax.block_until_ready(ocp.load(folder / "orbax", arrays()))

        def save() -> tuple[float, float]:
            start = time.perf_counter()
            manager.save()
            blocks = time.perf_counter() - start
            manager.sync()
            return blocks, time.perf_counter() - start

        def train(then: Callable[[], object]) -> float:
            start = time.perf_counter()
            for _ in range(_TURNS):
                for _ in range(_EVERY):
                    step()
                then()
            jax.block_until_ready(arrays())
            return (time.perf_counter() - start) / _TURNS

        def timed(function: Callable[[], object]) -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        def restore() -> None:
            path = manager.latest_checkpoint
            assert path is not None
            restored.restore(path)
            jax.block_until_ready(arrays())

        for number in range(rounds + 1):
            blocks, whole = save()
            orbax_blocks, orbax_whole = orbax()
            row = {
                "copy": timed(copy),
                "blocks": blocks,
                "whole": whole,
                "numpy": timed(numpy),
                "restore": timed(restore),
                "load": timed(load),
                "orbax blocks": orbax_blocks,
                "orbax whole": orbax_whole,
                "orbax load": timed(orbax_load),
                "training": train(lambda: None),
                "copying": train(copy),
                "writing": train(copy_and_write),
                "saving": train(manager.save),
            }
            manager.sync()
            if number:  # The first one compiles.
                for key, value in row.items():
                    found.setdefault(key, []).append(value)
    return found


_TURNS = 5
_NUMBERS = 1000


def _training(case: str) -> tuple[Any, Callable[[], None]]:
    """Returns a model and a step that trains it."""
    import phalanx  # isort: skip

    import keras
    import numpy as np

    inputs, units, rows = _CASES[case]
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        layers = [keras.layers.Dense(n, "relu") for n in units[:-1]]
        model = keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(units[-1])])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    x, y = rng.random((rows, inputs), dtype="float32"), rng.random((rows, units[-1]), dtype="float32")

    def replica_step(x: Any, y: Any) -> None:
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return model, lambda: strategy.run(replica_step, args=(x, y))
