# SPDX-License-Identifier: Apache-2.0
"""What `restarts` trains in each worker: a small model that Keras backs up; at one step of the first start one rank fails."""

import argparse
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (before Keras, whose backend it chooses)

import keras
import numpy as np

from benchmarks.restarts import EPOCHS, MARK, STEPS

_BATCH, _WIDTH, _CLASSES = 24, 16, 10
_NAMES_OF_CODE = {module.__name__: module for module in (os, signal, sys, time)}


def main() -> None:
    args = _arguments()
    is_first_start = os.environ["PHALANX_RESTART"] == "0"
    # Before anything can go wrong: no process is to be left.
    _say(pid=os.getpid())
    strategy = phalanx.MultiWorkerMirroredStrategy()
    backup = args.folder / "backup"
    if not is_first_start and strategy.extended.should_checkpoint and backup.exists():
        shutil.copytree(backup, args.folder / "found")
    callbacks: list[Any] = [keras.callbacks.BackupAndRestore(backup, save_freq=args.save_freq)]
    if is_first_start and args.rank is not None:
        is_culprit = strategy.cluster_resolver.task_id == args.rank
        act = functools.partial(_fail, args.code) if is_culprit else functools.partial(time.sleep, args.pause)
        callbacks.append(_BeforeStep(args.step, act))

    model = _model(strategy)
    rng = np.random.default_rng(0)
    x, y = rng.random((STEPS * _BATCH, _WIDTH), dtype="float32"), rng.integers(_CLASSES, size=STEPS * _BATCH)
    # Without shuffling an epoch has the same batches, however often the training was started.
    options = {"batch_size": _BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=callbacks, **options).history
    state = [np.asarray(v.value) for v in (*model.variables, *model.optimizer.variables)]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in state)).hexdigest()
    _say(loss=history["loss"][-1], digest=digest, updates=int(model.optimizer.iterations))


class _BeforeStep(keras.callbacks.Callback):
    """Acts once, before a step; steps are numbered from 0 through all epochs."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._act = step, act

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._left == 0:
            self._act()
        self._left -= 1


def _fail(code: str) -> None:
    _say(failed_at=time.time())
    exec(code, _NAMES_OF_CODE)


def _model(strategy: phalanx.Strategy) -> keras.Model:
    """Returns a model with state beside its weights. Without Dropout: Keras does not back up where its seed is."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    with strategy.scope():
        hidden = [layers.Dense(32, "relu"), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((_WIDTH,)), *hidden, layers.Dense(_CLASSES)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _say(**facts: Any) -> None:
    """Tells the benchmark some facts, in a line of JSON."""
    print(MARK + json.dumps(facts), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the backup, and a copy of what a restart found")
    parser.add_argument("--save-freq", type=lambda text: int(text) if text.isdigit() else text, default="epoch")
    parser.add_argument("--rank", type=int, help="which one fails")
    parser.add_argument("--step", type=int, help="before which step")
    parser.add_argument("--code", help="what it does there")
    parser.add_argument("--pause", type=float, help="how many seconds the others do nothing there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
