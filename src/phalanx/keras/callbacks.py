# SPDX-License-Identifier: Apache-2.0
"""Callbacks: what Keras has for TensorFlow only, and what it has not."""

import os
from typing import Any, final

import keras
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, MissingDependencyError, arguments, shown
from phalanx.testing import assert_in_sync


@final
class SyncCheck(keras.callbacks.Callback):
    """Checks at times that all replicas hold the same variables. May be made in any context.

    Training ends by the error of `phalanx.testing.assert_in_sync`, which names the variable and the ranks, where they do not.
    Each check copies all variables to the host.

    Args:
      every: after how many batches it checks; it also does at the end of the training.

    Raises:
      InvalidArgumentError: `every` is less than 1.

    Example:
      >>> import phalanx
      >>> callbacks = [phalanx.keras.SyncCheck(every=1000)]
    """

    def __init__(self, every: int = 1000) -> None:
        super().__init__()
        arguments.integer("every", every, kind="1 or more batches", hint="every=1000")
        self._every, self._batches = every, 0
        self._last = -1

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes that batches are numbered from 0 again."""
        self._last = -1

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Checks, if it is time."""
        before, self._batches = self._batches, self._batches + batch - self._last
        self._last = batch
        if self._batches // self._every > before // self._every:
            assert_in_sync(self.model)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        """Checks once more."""
        assert_in_sync(self.model)


@final
class TensorBoard(keras.callbacks.Callback):
    """Writes losses and metrics for TensorBoard, under the names that Keras's own callback gives them.

    Keras's needs TensorFlow; this one needs tensorboardX. May be made in any context.

    Args:
      log_dir: the folder; training writes below `train`, validation below `validation`.
      update_freq: `"epoch"`, `"batch"`, or every how many batches the batches' values are written too.

    Raises:
      InvalidArgumentError: `update_freq` is none of these.
      MissingDependencyError: tensorboardX is not installed.

    Source: keras.callbacks.TensorBoard.

    Example:
      >>> import phalanx
      >>> callbacks = [phalanx.keras.TensorBoard("logs")]
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", update_freq: str | int = "epoch") -> None:
        super().__init__()
        is_name = isinstance(update_freq, str) and update_freq in ("epoch", "batch")
        is_count = isinstance(update_freq, int) and not isinstance(update_freq, bool) and update_freq > 0
        if not (is_name or is_count):
            raise InvalidArgumentError(
                f"update_freq={shown(update_freq)}",
                'must be "epoch", "batch" or a number of batches.',
                'update_freq="epoch"',
            )
        try:
            import tensorboardX
        except ImportError as e:
            raise MissingDependencyError(
                "TensorBoard(...)",
                "tensorboardX writes its files, and is not installed.",
                "pip install phalanx[tensorboard]",
            ) from e
        self._writer_class = tensorboardX.SummaryWriter
        self._log_dir = arguments.path("log_dir", log_dir)
        self._every = {"epoch": 0, "batch": 1}.get(str(update_freq), update_freq)
        self._writers: dict[str, Any] = {}
        self._batches = 0
        self._is_training = False

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to write."""
        self._is_training = True

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the values so far in this epoch, where they are asked for."""
        self._batches += 1
        if self._every and self._batches % int(self._every) == 0:
            self._write("train", {f"batch_{name}": value for name, value in (logs or {}).items()}, self._batches)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the values of the epoch, and the learning rate."""
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
    def on_test_end(self, logs: Any = None) -> None:
        """Writes the values of `evaluate`, beside the number of steps that the optimizer has done."""
        optimizer = self.model.optimizer
        if optimizer is not None:
            named = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
            self._write("validation", named, int(optimizer.iterations))
        if not self._is_training:
            self._close()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        """Writes what is left."""
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
