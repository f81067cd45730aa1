# SPDX-License-Identifier: Apache-2.0
"""Three models are trained with less communication and with all of it, on the same rows: what that costs at the end.

Digits (accuracy on unseen images), text (loss per character of unseen files) and a table (accuracy on unseen rows), on two replicas in
one process, with several seeds. The difference of a seed is the one to whole gradients with that seed.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (Before Keras.)

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from benchmarks.report import Report, verdict
from phalanx.experimental import CommunicationOptions, DiLoCo, LocalSGD, PowerSGD, TopK

Rows = tuple[np.ndarray, np.ndarray]

_POINTS = 0.5
"""Target for accuracies, in points."""
_PERCENT = 1.0
"""Target for losses, in percent."""
_WINDOW, _CHARACTERS = 16, 128


@dataclass(frozen=True)
class Task:
    """A training.

    Args:
      model: makes the model.
      optimizer: makes the optimizer.
      rows: returns the rows of the training and those of the test.
      epochs: number of epochs.
      is_accuracy: whether the result is the accuracy in percent, instead of the loss.
    """

    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.Optimizer]
    rows: Callable[[], tuple[Rows, Rows]]
    epochs: int
    is_accuracy: bool


def _digits() -> tuple[Rows, Rows]:
    data = load_digits()
    images = (data.data / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(images, data.target, test_size=500, random_state=0)
    return (x, y), (x_test, y_test)


def _text() -> tuple[Rows, Rows]:
    """Returns windows of characters, and the character after each, of modules of Python's library."""
    files = sorted(Path(statistics.__file__).parent.glob("[a-d]*.py"))[:12]
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    parts = [np.concatenate(texts[:10]), np.concatenate(texts[10:])]

    def windows(codes: np.ndarray, stride: int) -> Rows:
        starts = np.arange(0, len(codes) - _WINDOW, stride)
        found = np.minimum(codes, _CHARACTERS - 1)
        return found[starts[:, None] + np.arange(_WINDOW)].astype("int32"), found[starts + _WINDOW].astype("int32")

    return windows(parts[0], 7), windows(parts[1], 11)


def _table() -> tuple[Rows, Rows]:
    """Returns rows of six categories, whose labels depend on weights and on a product of two of them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 500, (24_000, 6))
    weights, factors = rng.normal(size=(6, 500)), rng.normal(size=(500, 2))
    logits = weights[np.arange(6), ids].sum(1) + 2 * (factors[ids[:, 0]] * factors[ids[:, 1]]).sum(1)
    labels = (rng.random(len(ids)) < 1 / (1 + np.exp(-logits))).astype("int32")
    x = (ids + 500 * np.arange(6)).astype("int32")
    return (x[:20_000], labels[:20_000]), (x[20_000:], labels[20_000:])


def _dense(*widths: int) -> list[keras.layers.Layer]:
    return [keras.layers.Dense(width, activation="relu") for width in widths]


TASKS = {
    "digits, accuracy": Task(
        lambda: keras.Sequential([keras.Input((64,)), *_dense(256, 128), keras.layers.Dense(10)]),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        _digits,
        20,
        is_accuracy=True,
    ),
    "text, loss": Task(
        lambda: keras.Sequential(
            [
                keras.Input((_WINDOW,), dtype="int32"),
                keras.layers.Embedding(_CHARACTERS, 32),
                keras.layers.Flatten(),
                *_dense(256),
                keras.layers.Dense(_CHARACTERS),
            ]
        ),
        lambda: keras.optimizers.SGD(0.03, momentum=0.9),
        _text,
        3,
        is_accuracy=False,
    ),
    "table, accuracy": Task(
        lambda: keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(3000, 8),
                keras.layers.Flatten(),
                *_dense(64),
                keras.layers.Dense(2),
            ]
        ),
        lambda: keras.optimizers.Adam(2e-3),
        _table,
        3,
        is_accuracy=True,
    ),
}
CHOICES: dict[str, dict[str, Any]] = {
    "whole gradients": {},
    "int8": {"compression": "int8"},
    "PowerSGD(2)": {"compression": PowerSGD(2)},
    "PowerSGD(4)": {"compression": PowerSGD(4)},
    "TopK(0.01)": {"compression": TopK(0.01)},
    "TopK(0.05)": {"compression": TopK(0.05)},
    "int8, no error feedback": {"compression": "int8", "error_feedback": False},
    "PowerSGD(4), no error feedback": {"compression": PowerSGD(4), "error_feedback": False},
    "TopK(0.05), no error feedback": {"compression": TopK(0.05), "error_feedback": False},
    "LocalSGD(8)": {"local_updates": LocalSGD(8)},
    "DiLoCo(50), outer momentum 0.5": {"local_updates": DiLoCo(lambda: _outer(0.5), every=50)},
    "DiLoCo(50), outer momentum 0.9": {"local_updates": DiLoCo(lambda: _outer(0.9), every=50)},
}
_WITH_TARGET = ("int8", "PowerSGD(4)", "LocalSGD(8)", "DiLoCo(50), outer momentum 0.5")


def _outer(momentum: float) -> keras.Optimizer:
    return keras.optimizers.SGD(0.7, momentum=momentum, nesterov=True)


def _result(task: Task, options: dict[str, Any], seed: int, *, quick: bool) -> float:
    """Trains, and returns the accuracy or the loss on unseen rows."""
    keras.utils.set_random_seed(seed)
    local_updates = options.get("local_updates")
    compression = CommunicationOptions(**options) if local_updates is None else None
    strategy = phalanx.MirroredStrategy(
        ["cpu:0", "cpu:1"], communication_options=compression, local_updates=local_updates
    )
    (x, y), test = task.rows()
    with strategy.scope():
        model = task.model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(task.optimizer(), loss, metrics=["accuracy"])
    if quick:
        x, y = x[:256], y[:256]
    model.fit(x, y, batch_size=64, epochs=1 if quick else task.epochs, verbose=0)
    found = model.evaluate(*test, batch_size=256, verbose=0, return_dict=True)
    return 100 * found["accuracy"] if task.is_accuracy else float(found["loss"])


def run(*, quick: bool, rounds: int = 5, seed: int = 0) -> Report:
    """Trains each model in each way, and compares the results with those of whole gradients at every step."""
    report = Report(
        "equal_training",
        "The result on unseen rows, and its difference to whole gradients: points of accuracy, or percent of the loss (more is worse)",
        ("model", "what is sent", "mean", "difference", "spread", "target", "all seeds"),
    )
    phalanx.set_virtual_cpu_devices(2)
    seeds = range(seed, seed + (1 if quick else rounds))

    def play(name: str, task: Task) -> None:
        results = {c: [_result(task, o, s, quick=quick) for s in seeds] for c, o in CHOICES.items()}
        for choice, found in results.items():
            pairs = zip(found, results["whole gradients"], strict=True)
            worse = [whole - x if task.is_accuracy else 100 * (x / whole - 1) for x, whole in pairs]
            limit = _POINTS if task.is_accuracy else _PERCENT
            mean, spread = statistics.mean(worse), statistics.stdev(worse) if len(worse) > 1 else 0.0
            target = verdict(mean, at_most=limit) if choice in _WITH_TARGET else ""
            shown = " ".join(f"{x:.2f}" for x in found)
            report.add([name, choice, statistics.mean(found), mean, spread, target, shown], name=name, results=found)

    report.measure(lambda n=n, t=t: play(n, t) for n, t in TASKS.items())
    return report
