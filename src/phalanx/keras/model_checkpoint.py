# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: saves the model of `fit` regularly, or whenever it has become better."""

import math
import numbers
import os
from typing import final

from typing_extensions import override

from phalanx._src import compat
from phalanx._src.checkpoint.checkpoint import of_chief
from phalanx._src.checkpoint.manager import number_of
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.keras.callbacks import BatchCounter
from phalanx.train import Checkpoint, CheckpointManager, load_checkpoint
from phalanx.typing import PyTree


@final
class ModelCheckpoint(BatchCounter):
    """Saves the model and its optimizer in `fit`: regularly, or whenever a metric is better than in all earlier saves. May be created in any context.

    The files are those of `phalanx.train.CheckpointManager`, with numbers that continue when the program is started again, and so does the best
    value. `phalanx.train.Checkpoint(model=model).restore(callback.latest_checkpoint)` restores them under any strategy. With
    several processes, all save together, and the chief decides and writes.

    Args:
      directory: folder for the checkpoints, which all processes can read. Use an empty one for a new run.
      monitor: name of the metric to compare, as in the logs.
      save_best_only: whether to save only if the metric is better than at all earlier saves.
      mode: whether less of the metric is better ("min") or more ("max"). "auto" for what Keras knows about the metric.
      save_freq: when to save: "epoch" for the end of each epoch, or a number of batches.
      max_to_keep: number of checkpoints to keep. None for all.
      initial_value_threshold: saves only what is better than this value, with `save_best_only`. None for no threshold.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value. In `fit`: the logs have no such metric, or its mode is unknown.

    Source: keras.callbacks.ModelCheckpoint and keras.callbacks.OrbaxCheckpoint.

    Example:
      >>> import keras, numpy as np, phalanx, tempfile
      >>> with phalanx.OneDeviceStrategy("cpu:0").scope():
      ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
      ...     model.compile("sgd", "mse")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     best = phalanx.keras.ModelCheckpoint(folder, monitor="loss", save_best_only=True, max_to_keep=1)
      ...     _ = model.fit(np.ones((8, 2)), np.zeros((8, 1)), epochs=3, verbose=0, callbacks=[best])
      ...     os.path.basename(best.latest_checkpoint)
      'model-3'
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        max_to_keep: int | None = None,
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__()
        is_epoch = isinstance(save_freq, str) and save_freq == "epoch"
        if not is_epoch and not arguments.is_integer(save_freq, least=1):
            raise InvalidArgumentError(
                f"save_freq={shown(save_freq)}", 'must be "epoch" or a positive number of batches.', 'save_freq="epoch"'
            )
        if not isinstance(monitor, str):
            raise InvalidArgumentError(
                f"monitor={shown(monitor)}", "must be the name of a metric.", 'monitor="val_loss"'
            )
        if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
            raise InvalidArgumentError(f"mode={shown(mode)}", 'must be "auto", "min" or "max".', 'mode="max"')
        if max_to_keep is not None:
            arguments.integer("max_to_keep", max_to_keep, kind="1 or more checkpoints, or None", hint="max_to_keep=5")
        is_number = isinstance(initial_value_threshold, numbers.Real) and not isinstance(initial_value_threshold, bool)
        if initial_value_threshold is not None and not (is_number and abs(initial_value_threshold) < math.inf):
            raise InvalidArgumentError(
                f"initial_value_threshold={shown(initial_value_threshold)}",
                "must be a number or None.",
                "initial_value_threshold=0.5",
            )
        self._dir, self._every = arguments.path("directory", directory), 0 if is_epoch else int(save_freq)
        self._monitor, self._mode = monitor, mode
        self._best_only = arguments.flag("save_best_only", save_best_only)
        self._most, self.best = max_to_keep, initial_value_threshold
        self._checkpoint: Checkpoint | None = None
        self._manager: CheckpointManager | None = None

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the last checkpoint, for `Checkpoint(model=model).restore`, or None. May be called in any context."""
        return None if self._manager is None else self._manager.latest_checkpoint

    @override
    def on_train_begin(self, logs: PyTree = None) -> None:
        """Continues the numbers, and the best value, of the checkpoints in the folder."""
        super().on_train_begin(logs)
        self._checkpoint = Checkpoint(model=self.model)
        self._manager = CheckpointManager(self._checkpoint, self._dir, self._most, checkpoint_name="model")
        # The chief's view of the folder, so that all processes save under the same number.
        latest = of_chief(self._manager.latest_checkpoint or "")
        if latest:
            self._checkpoint.save_counter.assign(number_of(latest))
            self.best = load_checkpoint(latest).values.get("best", self.best)

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Saves, if enough batches have passed."""
        super().on_train_batch_end(batch, logs)
        if self._every and self._has_passed(self._every):
            self._save(logs or {})

    @override
    def on_epoch_end(self, epoch: int, logs: PyTree = None) -> None:
        """Saves at the end of each epoch, with `save_freq="epoch"`."""
        if not self._every:
            self._save(logs or {})

    @override
    def on_train_end(self, logs: PyTree = None) -> None:
        """Waits for the last save."""
        assert self._manager is not None
        self._manager.sync()

    def _save(self, logs: dict[str, float]) -> None:
        assert self._checkpoint is not None
        assert self._manager is not None
        if self._best_only:
            # The chief's value, so that all save or none does. `repr` keeps every bit of a Python float.
            value = float(of_chief(repr(float(self._value(logs)))))
            if not self._is_better(value):
                return
            # In the checkpoint too, for the next start of the program.
            self._checkpoint.best = self.best = value
        self._manager.save()

    def _value(self, logs: dict[str, float]) -> float:
        """Returns the monitored metric.

        Raises:
          InvalidArgumentError: the logs do not have it.
        """
        if self._monitor not in logs:
            names = ", ".join(sorted(logs)) or "nothing"
            why = "; val_ metrics need validation_data, and stand in the logs at the end of an epoch" * (
                self._monitor.startswith("val_")
            )
            raise InvalidArgumentError(
                f"ModelCheckpoint(monitor={self._monitor!r})",
                f"the logs contain {names}{why}.",
                f'monitor="{min(logs, default="loss")}"',
            )
        return logs[self._monitor]

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):  # No later value would be better than NaN.
            return False
        if self.best is None:
            return True
        return value > self.best if self._direction() == "max" else value < self.best

    def _direction(self) -> str:
        """Returns whether less or more of the metric is better.

        Raises:
          InvalidArgumentError: Keras does not know it.
        """
        if self._mode != "auto":
            return self._mode
        name = self._monitor.removeprefix("val_")
        known = "min" if name == "loss" or name.endswith("_loss") else compat.better(self.model, name)
        if known is None:
            raise InvalidArgumentError(
                f"ModelCheckpoint(monitor={self._monitor!r}, mode='auto')",
                "Keras does not know whether less or more of this metric is better.",
                'mode="max", or mode="min"',
            )
        return known
