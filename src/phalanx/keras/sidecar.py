# SPDX-License-Identifier: Apache-2.0
"""Evaluation in a separate process that watches a folder of checkpoints."""

import contextlib
import logging
import os
import re
import threading
import time
import zipfile
from pathlib import Path
from typing import final

import keras

from phalanx._src import compat
from phalanx._src.checkpoint.restoration import Restoration
from phalanx._src.checkpoint.store import SUFFIX, CheckpointFile
from phalanx._src.cluster.processes import training
from phalanx.errors import CheckpointError, InputError, InvalidArgumentError, arguments
from phalanx.keras.callbacks import Callbacks
from phalanx.train import Checkpoint
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")
_SUFFIXES = (".keras", ".weights.h5", SUFFIX)


@final
class SidecarEvaluator:
    """Evaluates a model on each new checkpoint in a folder. Run it in its own process, in any context.

    It reads the files that `keras.callbacks.ModelCheckpoint` writes, `*.keras` and `*.weights.h5`, and those of
    `phalanx.train.Checkpoint(model=model, ...)`, `CheckpointManager` and `phalanx.keras.ModelCheckpoint`. If there are several new
    checkpoints, it evaluates the newest. It retries a checkpoint that it cannot read, because the file may be incomplete.
    Under `phalanx run --evaluator`, it stops once the training has ended and the last checkpoint has been evaluated.

    Args:
      model: a compiled model with the structure of the trained one, of any strategy or none. Its optimizer does not matter.
      data: validation data as in `fit`: `(x, y)`, `(x, y, sample_weight)`, or a dataset.
      checkpoint_dir: folder of the checkpoints. It may be created later.
      steps: number of batches to evaluate. None for all.
      max_evaluations: number of the last checkpoint to evaluate, compared with the last number in its name
        (`model-10.keras`). If names have no number, the number of evaluations. None for no limit.
      callbacks: callbacks for `model.evaluate`. `phalanx.keras.TensorBoard` plots the results over the training steps.
      stop_at_step: value of `optimizer.iterations` from which a checkpoint is the last. None for no limit.
      poll_s: seconds between two looks at the folder.
      timeout_s: seconds without a new checkpoint after which it stops. None for no limit.

    Raises:
      InvalidArgumentError: the model is not compiled, a number is not positive, or an argument has the wrong type.

    Source: tf.keras.experimental.SidecarEvaluator.

    Example:
      >>> import keras, numpy as np, phalanx
      >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> data = (np.ones((4, 2)), np.ones((4, 1)))
      >>> evaluator = phalanx.keras.SidecarEvaluator(model, data, "checkpoints", timeout_s=0.1)
      >>> evaluator.start()
      []
    """

    def __init__(
        self,
        model: keras.Model,
        data: PyTree,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Callbacks = None,
        *,
        stop_at_step: int | None = None,
        poll_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> None:
        arguments.instance("model", model, keras.Model, "SidecarEvaluator(model, data, checkpoint_dir)")
        arguments.local_path("checkpoint_dir", checkpoint_dir)
        limits = {"steps": steps, "max_evaluations": max_evaluations, "stop_at_step": stop_at_step}
        for name, value in limits.items():
            if value is not None:
                arguments.integer(name, value, kind="positive, and an integer; or None", hint=f"{name}=None")
        if poll_s is None or arguments.seconds("poll_s", poll_s, hint="poll_s=1.0") is None:
            raise InvalidArgumentError("poll_s=None", "must be a number of seconds.", "poll_s=1.0")
        arguments.seconds("timeout_s", timeout_s)
        if not model.compiled:
            raise InvalidArgumentError(
                f"SidecarEvaluator of {model.name!r}",
                "the model is not compiled.",
                "model.compile(loss=..., metrics=[...])",
            )
        self._model, self._data, self._dir, self._steps = model, data, Path(checkpoint_dir), steps
        self._max_evaluations, self._stop_at_step = max_evaluations, stop_at_step
        self._callbacks, self._poll_s, self._timeout_s = callbacks, poll_s, timeout_s
        self._stopped = threading.Event()

    def start(self) -> list[dict[str, float]]:
        """Evaluates new checkpoints until a limit is reached, the training has ended or `stop` is called.

        Returns:
          One dict per evaluation: the metrics, and the training step of the checkpoint as `step`.

        Raises:
          InputError: a checkpoint belongs to a model of another structure.
        """
        results: list[dict[str, float]] = []
        seen = done = None
        since = time.monotonic()
        while not self._stopped.is_set():
            # Asked before the look at the folder, which then shows everything that was saved before the end.
            has_ended = training.has_ended()
            newest, before = self._newest(), seen
            seen = newest
            # A file that changed since the last look may still be incomplete, so wait until it stays the same.
            if newest is None or newest != before or newest == done or (step := self._load(newest[1])) is None:
                if has_ended and newest == before:
                    if newest not in (None, done):
                        _log.warning("SidecarEvaluator: the training has ended, but %s cannot be read", newest)
                    break
                if self._timeout_s is not None and time.monotonic() - since > self._timeout_s:
                    _log.info("SidecarEvaluator: no new checkpoint in %s for %s s", self._dir, self._timeout_s)
                    break
                self._stopped.wait(self._poll_s)
                continue
            results.append(self._evaluate(newest[1], step))
            done, since = newest, time.monotonic()
            if self._is_last(newest[1], results):
                break
        return results

    def stop(self) -> None:
        """Makes `start` return after the current evaluation. Call it from another thread or a callback."""
        self._stopped.set()

    def _newest(self) -> tuple[float, str] | None:
        """Returns the modification time and the name of the newest checkpoint, or None if there is none."""
        checkpoints = []
        try:
            for entry in os.scandir(self._dir):
                # Not a pipe, whose other end Keras would wait for, nor a link that leads nowhere: others may write there too.
                if entry.name.endswith(_SUFFIXES) and os.path.isfile(entry.path):
                    with contextlib.suppress(FileNotFoundError):  # The training program has removed it just now.
                        checkpoints.append((entry.stat().st_mtime, entry.name))
            return max(checkpoints, default=None)
        except FileNotFoundError:  # The folder does not exist yet.
            return None
        except OSError as e:
            hint = "the folder into which the training program saves"
            raise InputError(
                f"SidecarEvaluator of {self._model.name!r}", f"the folder cannot be read: {e}.", hint
            ) from e

    def _load(self, name: str) -> int | None:
        """Loads a checkpoint into the model. Returns its training step, or None if it cannot be read."""
        path = self._dir / name
        try:
            return _restore(self._model, path) if name.endswith(SUFFIX) else _load_weights(self._model, path)
        except (OSError, KeyError, EOFError, zipfile.BadZipFile) as e:  # Raised for an incomplete file.
            _log.info("SidecarEvaluator: cannot read %s, will retry (%s)", path, e)
            return None
        except (ValueError, CheckpointError) as e:
            if not path.exists():  # The training program has removed it, for example because of `max_to_keep`.
                return None
            raise InputError(
                f"SidecarEvaluator of {self._model.name!r} with {path}",
                f"the checkpoint belongs to another model: {e}",
                "create the model as in the training program",
            ) from e

    def _evaluate(self, name: str, step: int) -> dict[str, float]:
        x, y, sample_weight = compat.unpacked(self._data)
        options = {"y": y, "sample_weight": sample_weight, "steps": self._steps, "callbacks": self._callbacks}
        logs = self._model.evaluate(x, **options, verbose=0, return_dict=True)
        _log.info("SidecarEvaluator: %s, step %d: %s", name, step, logs)
        return {"step": step, **{key: float(value) for key, value in logs.items()}}

    def _is_last(self, name: str, results: list[dict[str, float]]) -> bool:
        if self._stop_at_step is not None and results[-1]["step"] >= self._stop_at_step:
            return True
        numbers = re.findall(r"\d+", name.removesuffix(".weights.h5").removesuffix(".keras"))
        number = int(numbers[-1]) if numbers else len(results)
        return self._max_evaluations is not None and number >= self._max_evaluations


def _load_weights(model: keras.Model, path: Path) -> int:
    """Loads a file that Keras has written. Returns the number of steps of the optimizer, or 0 if there is none."""
    optimizer = model.optimizer
    # Keras restores the state of an optimizer only if its variables exist.
    if optimizer is not None and not optimizer.built and model.built:
        optimizer.build(model.trainable_variables)
    model.load_weights(os.fspath(path))
    return 0 if optimizer is None else int(optimizer.iterations)


def _restore(model: keras.Model, path: Path) -> int:
    """Restores the model, without its optimizer, from a checkpoint in which it is called `model`.

    Returns:
      The number of steps of the optimizer that was saved, or 0 if the checkpoint contains none.

    Raises:
      CheckpointError: the checkpoint does not contain such a model.
    """
    stored = CheckpointFile(path)
    if not any(name.startswith("model/") for name in stored.names):
        contents = ", ".join(sorted({name.partition("/")[0] for name in stored.names})) or "nothing"
        raise CheckpointError(
            f"the checkpoint {path}",
            f"it contains no object of the name 'model', but {contents}.",
            "phalanx.train.Checkpoint(model=model, ...) in the training program",
        )
    # A different optimizer has different slots, and evaluation needs none.
    Restoration(Checkpoint(model=model), stored, without=model.optimizer).begin()
    step = _steps_of(stored)
    if model.optimizer is not None:
        model.optimizer.iterations.assign(step)  # TensorBoard reads it.
    return step


def _steps_of(stored: CheckpointFile) -> int:
    """Returns the number of steps of the optimizer in a checkpoint, or 0 if the checkpoint contains none."""
    aliases = stored.notes["aliases"]
    outer = [aliases.get(path, path) for path in ("model/optimizer", "optimizer")]
    counters = [f"{place}/iteration" for place in outer]
    # The format before: of an optimizer with a loss scale, the optimizer inside counts the steps.
    inner = [aliases.get(path, path) for path in (f"{place}/inner_optimizer" for place in outer)]
    counters += [f"{place}/variables/0" for place in (*outer, *inner)]
    return max((int(stored.array(name)) for name in counters if name in stored.names), default=0)
