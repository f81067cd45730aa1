# SPDX-License-Identifier: Apache-2.0
"""What `fit` hands over when processes die, leave or join: the counters of callbacks, and the work of the chief."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras.callbacks import Callback, CallbackList

from phalanx._src.checkpoint import text
from phalanx._src.elastic.training import Training
from phalanx._src.input.wire import exchange_bytes
from phalanx._src.mesh.topology import Topology
from phalanx.keras.backup import FitProgress
from phalanx.keras.data import EpochData

_OF_PROCESS = ("_model", "append", "append_header", "model", "params")
"""Attributes of a callback that belong to its own process."""


@dataclass
class Run:
    """One call of `fit`.

    Args:
      data: the batches.
      validation: the batches of the validation, or None.
      hooks: the callbacks that this process runs.
      callbacks: all callbacks of the user, in the same order on every process.
      progress: progress of the training run.
      epochs: the number of epochs.
      validation_freq: after which epochs the validation runs.
      training: continues the training run if processes are lost. None if the group does not change.
    """

    data: EpochData
    validation: EpochData | None
    hooks: CallbackList
    callbacks: Sequence[Callback]
    progress: FitProgress
    epochs: int
    validation_freq: int | Collection[int]
    training: Training | None
    _counters: list[dict[str, Any]] = field(default_factory=list, init=False)

    def begin_epoch(self, epoch: int) -> None:
        """Calls `on_epoch_begin`, unless the callbacks were already called for this epoch."""
        if self.training is None or self.training.begin_epoch(epoch):
            self._forget_total()
            self.hooks.on_epoch_begin(epoch)

    def _forget_total(self) -> None:
        """Makes progress bars show no total if an epoch may have other steps than the one before, as in a group that scales batches."""
        if self.training is not None and self.data.num_batches is None:
            for callback in self.hooks.callbacks:
                if isinstance(callback, keras.callbacks.ProgbarLogger):
                    callback.target = None

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Calls `on_epoch_end` of each callback once, even if one of them fails because a process was lost."""
        if self.training is None:
            self.hooks.on_epoch_end(epoch, logs)
            return
        if epoch < self.training.told[0]:
            return
        local_callbacks = self.hooks.callbacks
        # All processes use the user's order, because callbacks may communicate.
        for callback in self.callbacks[self.progress.called :]:
            if _is_among(callback, local_callbacks):
                callback.on_epoch_end(epoch, logs)
            self.progress.called += 1
        if self.progress.called == len(self.callbacks):
            for callback in local_callbacks:
                if not _is_among(callback, self.callbacks):
                    callback.on_epoch_end(epoch, logs)
            self.progress.called += 1

    def share_counters(self, topology: Topology, *, has_arrays: bool = False) -> None:
        """Sends the counters of the chief's callbacks to all processes.

        Args:
          topology: the devices of all processes.
          has_arrays: whether to include arrays, such as the best weights so far. They are large, and only a process that started
            later needs them.
        """
        payload = b""
        if topology.worker_index == 0:
            payload = text.packed([_counters_of(callback, has_arrays=has_arrays) for callback in self._all()])
        self._counters = text.unpacked(exchange_bytes(payload, topology.exchange)[0])

    def take_counters(self) -> None:
        """Sets the counters of all callbacks to the last shared values."""
        for callback, counters in zip(self._all(), self._counters, strict=False):
            _set_counters(callback, counters)

    def promote(self, is_writer: Callable[[Callback], bool]) -> None:
        """Adds the callbacks that only the chief runs, because this process has become the chief."""
        for i, callback in enumerate(self.callbacks):
            if not is_writer(callback) or _is_among(callback, self.hooks.callbacks):
                continue
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # The rows of the former chief stay in the file.
            self.hooks.callbacks.append(callback)
            callback.set_params(self.hooks.params)
            callback.set_model(self.hooks.model)
            callback.on_train_begin()
            if i < len(self._counters):
                _set_counters(callback, self._counters[i])
            if self.training is not None and self.training.told[0] >= 0:
                callback.on_epoch_begin(self.training.told[0])

    def _all(self) -> list[Callback]:
        return [*self.callbacks, self.hooks.model.history]


def _is_among(callback: Callback, callbacks: Sequence[Callback]) -> bool:
    return any(callback is other for other in callbacks)


def _counters_of(callback: Callback, *, has_arrays: bool) -> dict[str, Any]:
    """Returns the attributes that are numbers, text or containers of these. With `has_arrays`, also attributes with arrays."""
    counters = {}
    for name, value in vars(callback).items():
        if name in _OF_PROCESS or value is None:  # None may stand for a file, or another object that is not open yet.
            continue
        if text.is_plain(value) or isinstance(value, np.generic):
            counters[name] = value
        elif has_arrays:
            with suppress(TypeError):
                text.packed(value)
                counters[name] = value
    return counters


def _set_counters(callback: Callback, counters: dict[str, Any]) -> None:
    vars(callback).update(counters)
