# SPDX-License-Identifier: Apache-2.0
"""Callbacks that write losses and metrics to a writer of `phalanx.summary`."""

import time
from abc import abstractmethod
from dataclasses import asdict
from typing import Any, final

import keras
import numpy as np
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.cluster.watch.watch import step_times
from phalanx._src.tracing.records import Record
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.keras.callbacks import BatchCounter
from phalanx.summary import SummaryWriter
from phalanx.typing import PyTree


class ScalarCallback(BatchCounter):
    """Writes losses, metrics, the learning rate and the speed of a training run. Subclasses decide where to.

    Args:
      update_freq: when to write the values of batches, in addition to those of epochs: "epoch" for never, "batch" for every
        batch, or a number of batches.
      write_steps_per_second: whether to write the speed, and with several processes the `phalanx.experimental.step_times` of each.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.
    """

    def __init__(self, update_freq: str | int, write_steps_per_second: bool) -> None:
        super().__init__()
        is_name = isinstance(update_freq, str) and update_freq in ("epoch", "batch")
        if not is_name and not arguments.is_integer(update_freq, least=1):
            raise InvalidArgumentError(
                f"update_freq={shown(update_freq)}",
                'must be "epoch", "batch" or a positive number of batches.',
                'update_freq="epoch"',
            )
        self._every = int({"epoch": 0, "batch": 1}.get(str(update_freq), update_freq))
        self._writes_speed = arguments.flag("write_steps_per_second", write_steps_per_second)
        self._is_training = False
        self._batch_began = self._epoch_began = 0.0
        self._before_epoch = 0

    @override
    def on_train_begin(self, logs: PyTree = None) -> None:
        """Marks the start of training, so that a validation inside `fit` does not end the writing."""
        super().on_train_begin(logs)
        self._is_training = True

    @override
    def on_epoch_begin(self, epoch: int, logs: PyTree = None) -> None:
        """Notes when the epoch begins."""
        self._epoch_began, self._before_epoch = time.perf_counter(), self.batches

    @override
    def on_train_batch_begin(self, batch: int, logs: PyTree = None) -> None:
        """Notes when the batch begins."""
        super().on_train_batch_begin(batch, logs)
        self._batch_began = time.perf_counter()

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Writes the averages of this epoch so far, at every `update_freq` batches."""
        before = self.batches
        super().on_train_batch_end(batch, logs)
        if self._every and self._has_passed(self._every):
            self._write("train", "batch_{}", self._with_speed(logs, before, self._batch_began), self.batches)

    @override
    def on_epoch_end(self, epoch: int, logs: PyTree = None) -> None:
        """Writes the values and the learning rate of the epoch."""
        logs = logs or {}
        trained = {name: value for name, value in logs.items() if not name.startswith("val_")}
        trained |= _learning_rates(self.model.optimizer)
        validated = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
        self._write("train", "epoch_{}", self._with_speed(trained, self._before_epoch, self._epoch_began), epoch)
        self._write("validation", "epoch_{}", validated, epoch)
        self._write("train", "step_times_{}", self._step_times(), epoch)
        self._flush()

    @override
    def on_test_end(self, logs: PyTree = None) -> None:
        """Writes the results of `evaluate`, with the optimizer's number of steps as the x-axis."""
        if self.model.optimizer is not None:
            step = int(self.model.optimizer.iterations)
            self._write("validation", "evaluation_{}_vs_iterations", logs or {}, step)
        if not self._is_training:
            self._end()

    @override
    def on_train_end(self, logs: PyTree = None) -> None:
        """Ends the writing."""
        self._is_training = False
        self._end()

    def _with_speed(self, values: PyTree, since: int, began: float) -> dict[str, Any]:
        seconds = time.perf_counter() - began
        speed = {"steps_per_second": (self.batches - since) / seconds} if self._writes_speed else {}
        return {**(values or {}), **speed}

    def _step_times(self) -> dict[str, Any]:
        """Returns the step times of each process, if the speed is written and there are several."""
        times = step_times() if self._writes_speed else []
        return {f"rank_{t.rank}_{name}": value for t in times for name, value in asdict(t).items() if name != "rank"}

    def _write(self, part: str, name: str, values: dict[str, Any], step: int) -> None:
        """Writes numbers. Values of other shapes, which a training step may return, are skipped."""
        numbers = {key: value for key, value in values.items() if not np.ndim(value)}
        if numbers:
            writer, prefix = self._target(part)
            for key, value in numbers.items():
                tag = prefix + name.format(key)
                writer.write(Record(kind="scalar", tag=tag, value=value, step=step, notes=(None,)), None)

    @abstractmethod
    def _target(self, part: str) -> tuple[SummaryWriter, str]:
        """Returns the writer, and the beginning of the names, for "train" or "validation"."""

    @abstractmethod
    def _flush(self) -> None:
        """Waits until the values are written."""

    @abstractmethod
    def _end(self) -> None:
        """Ends the writing."""


@final
class Tracking(ScalarCallback):
    """Gives losses and metrics of `fit` and `evaluate` to a writer, for example of `create_tracker_writer`. May be created in any context.

    The names are those of `TensorBoard`, with the prefix `train/` or `validation/`. The writer stays open.

    Args:
      writer: what `phalanx.summary.create_tracker_writer` returns, or another writer.
      update_freq: when to write the values of batches, in addition to those of epochs: "epoch" for never, "batch" for every
        batch, or a number of batches.
      write_steps_per_second: whether to write the speed, and with several processes the `phalanx.experimental.step_times` of each.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Example:
      >>> import keras, numpy as np, pathlib, phalanx, tempfile
      >>> with phalanx.OneDeviceStrategy("cpu:0").scope():
      ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
      ...     model.compile(keras.optimizers.SGD(0.5), "mse")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "scalars.csv")
      ...     writer = phalanx.summary.create_tracker_writer(phalanx.summary.trackers.CSVTracker(path))
      ...     callbacks = [phalanx.keras.Tracking(writer)]
      ...     _ = model.fit(np.ones((8, 2)), np.zeros((8, 1)), verbose=0, callbacks=callbacks)
      ...     writer.close()
      ...     print(path.read_text().splitlines()[-1])
      0,train/epoch_learning_rate,0.5
    """

    def __init__(
        self, writer: SummaryWriter, update_freq: str | int = "epoch", write_steps_per_second: bool = False
    ) -> None:
        super().__init__(update_freq, write_steps_per_second)
        hint = "phalanx.summary.create_tracker_writer(tracker)"
        self._writer = arguments.instance("writer", writer, SummaryWriter, hint)

    @override
    def _target(self, part: str) -> tuple[SummaryWriter, str]:
        return self._writer, f"{part}/"

    @override
    def _flush(self) -> None:
        self._writer.flush()

    @override
    def _end(self) -> None:
        self._writer.flush()


def _learning_rates(optimizer: Any) -> dict[str, float]:
    """Returns the learning rate; of each optimizer, if there are several."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a `LossScaleOptimizer`.
    several = getattr(optimizer, "optimizers", None)
    if several is not None:
        return {f"learning_rate_{one.name}": float(one.learning_rate) for one in several}
    is_known = isinstance(optimizer, keras.optimizers.Optimizer) and compat.known_rate(optimizer) is not None
    return {"learning_rate": float(optimizer.learning_rate)} if is_known else {}
