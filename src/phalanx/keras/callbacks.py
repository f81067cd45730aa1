# SPDX-License-Identifier: Apache-2.0
"""Callbacks: a check that replicas are in sync, and a TensorBoard callback that does not need TensorFlow."""

import os
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import keras
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, MissingDependencyError, arguments, shown
from phalanx.testing import assert_in_sync
from phalanx.typing import PyTree

Callbacks: TypeAlias = (
    keras.callbacks.CallbackList | keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None
)
"""The argument `callbacks` of `fit`, `evaluate` and `predict`."""


class BatchCounter(keras.callbacks.Callback):
    """A callback that counts the batches of `fit`, as one number over all epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = self._before = self._first = 0

    @override
    def on_train_begin(self, logs: PyTree = None) -> None:
        """Counts from 0."""
        self.batches = 0

    @override
    def on_train_batch_begin(self, batch: int, logs: PyTree = None) -> None:
        """Notes the number of the first batch of a call. With `steps_per_execution`, a call trains on several batches."""
        self._first = batch

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Counts the batches of a call, of which `batch` is the last."""
        self._before, self.batches = self.batches, self.batches + batch + 1 - self._first

    def _has_passed(self, every: int) -> bool:
        """Returns whether the last call has reached or passed a multiple of `every` batches."""
        return self.batches // every > self._before // every


@final
class SyncCheck(BatchCounter):
    """Checks periodically that all replicas hold the same variables. May be created in any context.

    If they differ, training ends with the `DivergenceError` of `phalanx.testing.assert_in_sync`, which names the variable and
    the ranks. Each check copies all variables to the host.

    Args:
      every: number of batches between two checks. The end of training is checked too.

    Raises:
      InvalidArgumentError: `every` is not a positive integer.

    Example:
      >>> import phalanx
      >>> callbacks = [phalanx.keras.SyncCheck(every=1000)]
    """

    def __init__(self, every: int = 1000) -> None:
        super().__init__()
        arguments.integer("every", every, kind="1 or more batches", hint="every=1000")
        self._every = every

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Checks the replicas if `every` batches have passed since the last check."""
        super().on_train_batch_end(batch, logs)
        if self._has_passed(self._every):
            assert_in_sync(self.model)

    @override
    def on_train_end(self, logs: PyTree = None) -> None:
        """Checks the replicas at the end of training."""
        assert_in_sync(self.model)


@final
class TensorBoard(keras.callbacks.Callback):
    """Writes losses and metrics for TensorBoard. May be created in any context.

    `keras.callbacks.TensorBoard` needs TensorFlow; this callback needs tensorboardX. The names of the values are the same.

    Args:
      log_dir: folder for the logs. Training writes to its subfolder `train`, validation to `validation`.
      update_freq: when to write the values of batches, in addition to those of epochs: "epoch" for never, "batch" for every
        batch, or a number of batches.

    Raises:
      InvalidArgumentError: `update_freq` is neither of these.
      MissingDependencyError: tensorboardX is not installed.

    Source: keras.callbacks.TensorBoard.

    Example:
      >>> import phalanx
      >>> callbacks = [phalanx.keras.TensorBoard("logs")]
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", update_freq: str | int = "epoch") -> None:
        super().__init__()
        is_name = isinstance(update_freq, str) and update_freq in ("epoch", "batch")
        is_count = arguments.is_integer(update_freq, least=1)
        if not (is_name or is_count):
            raise InvalidArgumentError(
                f"update_freq={shown(update_freq)}",
                'must be "epoch", "batch" or a positive number of batches.',
                'update_freq="epoch"',
            )
        try:
            import tensorboardX
        except ImportError as e:
            raise MissingDependencyError(
                "TensorBoard(...)",
                "it needs the library tensorboardX, which is not installed.",
                'pip install ".[tensorboard]" in a clone of Phalanx',
            ) from e
        self._writer_class = tensorboardX.SummaryWriter
        self._log_dir = arguments.path("log_dir", log_dir)
        self._every = {"epoch": 0, "batch": 1}.get(str(update_freq), update_freq)
        self._writers: dict[str, Any] = {}
        self._batches = 0
        self._is_training = False

    @override
    def on_train_begin(self, logs: PyTree = None) -> None:
        """Marks the start of training, so that a validation inside `fit` does not close the files."""
        self._is_training = True

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Writes the averages of this epoch so far, at every `update_freq` batches."""
        self._batches += 1
        if self._every and self._batches % int(self._every) == 0:
            self._write("train", {f"batch_{name}": value for name, value in (logs or {}).items()}, self._batches)

    @override
    def on_epoch_end(self, epoch: int, logs: PyTree = None) -> None:
        """Writes the values and the learning rate of the epoch."""
        logs = logs or {}
        trained = {f"epoch_{name}": value for name, value in logs.items() if not name.startswith("val_")}
        validated = {f"epoch_{name[4:]}": value for name, value in logs.items() if name.startswith("val_")}
        if self.model.optimizer is not None:
            trained["epoch_learning_rate"] = self.model.optimizer.learning_rate
        self._write("train", trained, epoch)
        self._write("validation", validated, epoch)
        for writer in self._writers.values():
            writer.flush()

    @override
    def on_test_end(self, logs: PyTree = None) -> None:
        """Writes the results of `evaluate`, with the optimizer's number of steps as the x-axis."""
        optimizer = self.model.optimizer
        if optimizer is not None:
            named = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
            self._write("validation", named, int(optimizer.iterations))
        if not self._is_training:
            self._close()

    @override
    def on_train_end(self, logs: PyTree = None) -> None:
        """Closes the files."""
        self._is_training = False
        self._close()

    def _write(self, part: str, values: dict[str, Any], step: int) -> None:
        if values and part not in self._writers:
            self._writers[part] = self._writer_class(os.path.join(self._log_dir, part))
        for name, value in values.items():
            self._writers[part].add_scalar(name, float(value), step)

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
