# SPDX-License-Identifier: Apache-2.0
"""Callbacks: a check that replicas are in sync, the base of callbacks that count batches, and those that have a state."""

import hashlib
import os
import stat
from collections.abc import Sequence
from typing import TextIO, TypeAlias, final

import keras
import numpy as np
from typing_extensions import override

from phalanx._src import compat
from phalanx.errors import arguments
from phalanx.testing import assert_in_sync
from phalanx.typing import PyTree

Callbacks: TypeAlias = (
    keras.callbacks.CallbackList | keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None
)
"""The argument `callbacks` of `fit`, `evaluate` and `predict`."""


def has_state(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback itself says what its state is: by `get_state()` and `set_state(state)`, as in a checkpoint."""
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


def digest_of(array: np.ndarray) -> str:
    """Returns a text that stands for an array in the state of a callback, to compare it with another."""
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def runs_user_code(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Whether code of the user runs between two batches."""
    foreign = [c for c in callbacks if not _is_of_library(c)]
    kinds, times = ("train", "test", "predict"), ("begin", "end")
    return any(compat.listens(foreign, kind, when) for kind in kinds for when in times)


def _is_of_library(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is one of Keras or Phalanx, and does not call functions of the user."""
    is_known = type(callback).__module__.partition(".")[0] in ("keras", "phalanx")
    return is_known and not isinstance(callback, (keras.callbacks.LambdaCallback, keras.callbacks.CallbackList))


def fills_log(stream: TextIO, *, has_peers: bool) -> bool:
    """Whether a progress bar would fill a log: a file, or anything but a terminal if several processes write to it.

    A notebook is neither a file nor a terminal, and shows the progress bar of one process.
    """
    try:
        is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # Any object with `write` may be the standard output.
        is_file = False
    return is_file or (has_peers and not stream.isatty())


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
