# SPDX-License-Identifier: Apache-2.0
"""What `fit` hands over when processes die, leave or join: the state of callbacks, and the work of the chief.

The state of a callback is what its `get_state` returns, or else all attributes that have changed since it was fresh: since its first
`on_train_begin`. What has not changed is the same in a process that has just started, or belongs to a process, such as its rank.
"""

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
from keras.callbacks import Callback, CallbackList

from phalanx._src import compat
from phalanx._src.checkpoint import text
from phalanx._src.checkpoint.names import numbered
from phalanx._src.elastic.training import Training
from phalanx._src.input.order import set_generators
from phalanx._src.input.wire import exchange_bytes
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.identity import IdentityMap
from phalanx.errors import InvalidArgumentError, listed, warn_of_slip
from phalanx.keras.backup import BackupAndRestore, FitProgress
from phalanx.keras.callbacks import digest_of, has_state
from phalanx.keras.data import EpochData
from phalanx.keras.model_checkpoint import ModelCheckpoint
from phalanx.typing import PyTree

_OF_PROCESS = ("_model", "append", "append_header", "model", "params", "writer")
"""Attributes of a callback that belong to its own process."""

WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)
"""Callbacks that only write files. With several processes, they run on the first one only."""

_READERS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
"""Those among them that read weights, which one process cannot do alone if all of them hold parts."""

Marks = Mapping[str, str | int]
"""A mark for each attribute of a callback, which changes with its value: a text if the value can be sent, else its identity."""


def require_whole_weights(callbacks: Sequence[Callback], topology: Topology) -> None:
    """Checks that no callback that runs in one process alone reads weights of which no process holds the whole.

    Raises:
      InvalidArgumentError: one does.
    """
    alone = next((c for c in callbacks if isinstance(c, _READERS)), None)
    if alone is not None and topology.layout is not None and topology.num_workers > 1:
        name = type(alone).__name__
        raise InvalidArgumentError(
            f"keras.callbacks.{name} with layout={topology.layout!r} on {topology.num_workers} processes",
            "it reads the weights in the first process, and no process holds all of them.",
            f"phalanx.keras.{name}(folder), which all processes call",
        )


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
      fresh: the marks that callbacks had when they were fresh, including those of earlier calls of `fit`.
    """

    data: EpochData
    validation: EpochData | None
    hooks: CallbackList
    callbacks: Sequence[Callback]
    progress: FitProgress
    epochs: int
    validation_freq: int | Collection[int]
    training: Training | None
    fresh: IdentityMap[Marks] = field(default_factory=IdentityMap)
    _counters: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    # The epoch, and how many callbacks were called at its end, when the chief sent the counters of the writers.
    _written: list[int] = field(default_factory=lambda: [-1, 0], init=False)

    def begin_epoch(self, epoch: int) -> None:
        """Calls `on_epoch_begin`, unless the callbacks were already called for this epoch."""
        if self.training is None or self.training.begin_epoch(epoch):
            self._forget_total()
            if self.progress.restored is not None and self.data.is_within_epoch:
                self._repeat_beginning(epoch, self.progress.restored)
            else:
                self.hooks.on_epoch_begin(epoch)
            self.progress.restored = None

    def _repeat_beginning(self, epoch: int, restored: dict[str, Any]) -> None:
        """Calls `on_epoch_begin` for an epoch that was saved after its beginning, whose effects the backup contains already."""
        optimizer = self.hooks.model.optimizer
        # A `LearningRateScheduler` may compute the rate from the present one, which already has the effect of this beginning.
        rate = compat.known_rate(optimizer)
        self.hooks.on_epoch_begin(epoch)
        if rate != compat.known_rate(optimizer):
            optimizer.learning_rate = rate
        set_generators(restored["random"])
        self._set_states()

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
        # The group has gone back to an earlier epoch, whose end the callbacks have already seen.
        if epoch < self.training.told[0]:
            return
        local_callbacks = self.hooks.callbacks
        if self.training.told[0] == epoch:
            # This process may have called more callbacks than the process whose position it has taken.
            self.progress.called = max(self.progress.called, self.training.told[2])
        # All processes use the user's order, because callbacks may communicate.
        for callback in self.callbacks[self.progress.called :]:
            if _is_among(callback, local_callbacks):
                callback.on_epoch_end(epoch, logs)
            self._count_call(self.training)
        if self.progress.called == len(self.callbacks):
            # Keras's own history and progress bar, which a `CallbackList` appends to those of the user.
            for callback in local_callbacks:
                if not _is_among(callback, self.callbacks):
                    callback.on_epoch_end(epoch, logs)
            self._count_call(self.training)

    def _count_call(self, training: Training) -> None:
        self.progress.called += 1
        training.end_callbacks(self.progress.called)

    def note_fresh(self) -> None:
        """Remembers what callbacks are like that have not trained before. Call it after `on_train_begin`."""
        for callback in self._all():
            # What an earlier `fit` has changed is a change too, because a process that joins skips that call.
            if self.fresh.get(callback) is None:
                self.fresh[callback] = _marks_of(callback)

    def states(self) -> dict[str, Any]:
        """Returns the states of all callbacks by their names, for a backup. What cannot be saved is named."""
        model, results = self.hooks.model, self.progress.last_logs
        states: dict[str, Any] = {}
        for name, callback in self._by_name():
            states[name] = _counters_of(callback, has_arrays=True, fresh=self.fresh.get(callback) or {})
            _warn_of_unsent(
                callback, states[name].pop("unsent"), "BackupAndRestore saves callbacks", "saved", "after a restart"
            )
        history, epoch = model.history, self.progress.epoch
        # The history gets the results of an epoch after all other callbacks.
        if results is not None and epoch not in history.epoch[-1:]:
            logs = {key: [*history.history.get(key, []), value] for key, value in compat.to_python(results).items()}
            values = {"epoch": [*history.epoch, epoch], "history": history.history | logs}
            states["History"]["values"] = states["History"]["values"] | values
        return states | {"is_over": results is not None and bool(model.stop_training)}

    def restore_states(self) -> None:
        """Sets the states that a backup has restored. Call it after `on_train_begin`, which resets callbacks."""
        self.note_fresh()
        self.progress.states = self.states
        if self.progress.restored is not None:
            self._set_states()
            if self.progress.restored.get("is_over"):
                self.epochs = self.progress.epoch  # For example, `EarlyStopping` had stopped it. No epoch is left.

    def _set_states(self) -> None:
        # A copy, because callbacks change their lists, and `_repeat_beginning` sets the states a second time.
        restored = copy.deepcopy(self.progress.restored or {})
        for name, callback in self._by_name():
            if name in restored:
                if isinstance(callback, ModelCheckpoint):
                    restored[name]["values"].pop("best", None)  # Its own files have it.
                _set_counters(callback, restored[name])

    def _by_name(self) -> Iterator[tuple[str, Callback]]:
        """Yields the callbacks that run here and whose states belong to a backup, with their classes and numbers as names."""
        # Numbered over all callbacks, so that a name does not depend on which of them run in this process.
        for callback, name in zip(self._all(), numbered(type(c).__name__ for c in self._all()), strict=True):
            is_here = callback is self.hooks.model.history or _is_among(callback, self.hooks.callbacks)
            if is_here and not isinstance(callback, (BackupAndRestore, keras.callbacks.BackupAndRestore)):
                yield name, callback

    def share_counters(self, topology: Topology, *, has_arrays: bool = False) -> None:
        """Sends the counters of callbacks to all processes: those of the process that has the position, and of the chief's writers.

        Args:
          topology: the devices of all processes.
          has_arrays: whether to include arrays, such as the best weights so far. They are large, and only a process that started
            later needs them.
        """
        rank, source, counters = topology.worker_index, self.training.source if self.training else 0, {}
        for i, callback in enumerate(self._all()):
            if rank == (0 if isinstance(callback, WRITERS) else source):
                fresh = self.fresh.get(callback) or {}
                counters[str(i)] = _counters_of(callback, has_arrays=has_arrays, fresh=fresh)
        written = [self.training.told[0], self.training.told[2]] if self.training else [-1, 0]
        received = exchange_bytes(text.packed([written, counters]) if counters else b"", topology.exchange)
        # The chief sends nothing if another process is the source and no callback is a writer.
        (self._written, of_chief), (_, of_source) = (
            text.unpacked(received[r] or text.packed([[-1, 0], {}])) for r in (0, source)
        )
        self._counters = {**of_source, **of_chief}

    def take_counters(self, *, is_new: bool) -> None:
        """Sets the counters of all callbacks to the last shared values.

        Args:
          is_new: whether this process has just started, so that it needs what could not be shared. That is named.
        """
        for i, callback in enumerate(self._all()):
            # A writer that does not run here stays fresh until `promote`. Otherwise, what it takes now would not count as a change.
            if not _is_among(callback, self.hooks.callbacks):
                continue
            counters = self._counters[str(i)]
            _set_counters(callback, counters)
            if is_new:
                joined = "This process has joined a training run"
                _warn_of_unsent(callback, counters["unsent"], joined, "sent to it", "here")

    def promote(self) -> None:
        """Adds the callbacks that only the chief runs, because this process has become the chief."""
        for i, callback in enumerate(self.callbacks):
            if not isinstance(callback, WRITERS) or _is_among(callback, self.hooks.callbacks):
                continue
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # The rows of the former chief stay in the file.
            self.hooks.callbacks.append(callback)
            callback.set_params(self.hooks.params)
            callback.set_model(self.hooks.model)
            # First, because it resets the counters.
            callback.on_train_begin()
            self.fresh[callback] = _marks_of(callback)
            if str(i) in self._counters:
                _set_counters(callback, self._counters[str(i)])
            if self.training is not None and self.training.told[0] >= 0:
                callback.on_epoch_begin(self.training.told[0])
                self._repeat_end(i, callback)

    def _repeat_end(self, i: int, callback: Callback) -> None:
        """Calls a writer for the end of the present epoch if the former chief has died before it could say that it had done so."""
        epoch, results = self.progress.epoch, self.progress.results
        is_unknown = results is not None and self.progress.called > i and self._written < [epoch, i + 1]
        if is_unknown and not _has_row(callback, epoch):
            callback.on_epoch_end(epoch, results)

    def _all(self) -> list[Callback]:
        return [*self.callbacks, self.hooks.model.history]


def _has_row(callback: Callback, epoch: int) -> bool:
    """Whether a callback has written the row of an epoch into its file. It adds rows to that file, and writes no other one again."""
    if not isinstance(callback, keras.callbacks.CSVLogger) or not Path(callback.filename).exists():
        return False
    lines = Path(callback.filename).read_text().splitlines()
    return bool(lines) and lines[-1].partition(callback.sep)[0] == str(epoch)


def _is_among(callback: Callback, callbacks: Sequence[Callback]) -> bool:
    return any(callback is other for other in callbacks)


def _warn_of_unsent(callback: Callback, names: list[str], event: str, how: str, where: str) -> None:
    """Warns about attributes of a user's callback that another process does not get."""
    if names and not _is_built_in(callback):
        warn_of_slip(
            f"{event}, but {listed(names)} of {type(callback).__name__} cannot be {how}, so the callback may act differently {where}.",
            "get_state(), which returns numbers, text, arrays or containers of these, and set_state(state), in the callback",
        )


def _is_built_in(callback: Callback) -> bool:
    """Whether a callback is one of Keras or Phalanx, which make again what cannot be sent, such as files."""
    return type(callback).__module__.partition(".")[0] in ("keras", "phalanx")


def _mark_of(value: PyTree) -> str | int:
    if _is_operation(value):
        return f"keras.ops.{value.__name__}"
    try:
        return json.dumps(text.encode(value, digest_of))
    except (
        TypeError,
        RuntimeError,
    ):  # JAX raises the latter for an array that is deleted, or whose parts other processes have.
        return id(value)


def _is_operation(value: PyTree) -> bool:
    """Whether a value is a function of `keras.ops`, such as the comparison of `EarlyStopping`. These are sent by their names."""
    # By identity, because a function of the user may have such a name.
    return callable(value) and getattr(keras.ops, getattr(value, "__name__", ""), None) is value


def _marks_of(callback: Callback) -> Marks:
    return {name: _mark_of(value) for name, value in vars(callback).items()}


def _counters_of(callback: Callback, *, has_arrays: bool, fresh: Marks = MappingProxyType({})) -> dict[str, PyTree]:
    """Returns the state of a callback: numbers, text and containers of these. With `has_arrays`, also attributes with arrays.

    Args:
      callback: the callback.
      has_arrays: see `Run.share_counters`.
      fresh: the marks that it had when it was fresh.
    """
    counters: dict[str, PyTree] = {"values": {}, "operations": {}, "unsent": []}
    if has_state(callback):
        state = callback.get_state()
        return counters | ({"unsent": ["get_state()"]} if isinstance(_mark_of(state), int) else {"state": state})
    for name, value in vars(callback).items():
        before = fresh.get(name)
        # None may stand for a file, or another object that is not open.
        if name in _OF_PROCESS or (value is None and not isinstance(before, str)):
            continue
        if not (has_arrays or _is_operation(value) or text.is_plain(value) or isinstance(value, np.generic)):
            continue
        mark = _mark_of(value)
        if isinstance(mark, int):
            # A container may have changed although it is the same object.
            if mark != before or isinstance(value, Collection):
                counters["unsent"].append(name)
        elif mark != before and _is_operation(value):
            counters["operations"][name] = value.__name__
        elif mark != before:
            counters["values"][name] = value
    return counters


def _set_counters(callback: Callback, counters: dict[str, PyTree]) -> None:
    if "state" in counters:
        callback.set_state(counters["state"])
    operations = {name: getattr(keras.ops, operation) for name, operation in counters["operations"].items()}
    vars(callback).update(counters["values"] | operations)
