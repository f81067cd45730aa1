# SPDX-License-Identifier: Apache-2.0
"""`BackupAndRestore`: `fit` continues at the batch at which it was stopped."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import keras
import numpy as np
from typing_extensions import override

from phalanx._src.checkpoint.checkpoint import AbstractPosition, writes_here
from phalanx._src.checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
from phalanx._src.checkpoint.store import require_room
from phalanx._src.input.order import generators, set_generators
from phalanx._src.input.sources.base import State
from phalanx._src.mesh.topology import Topology
from phalanx.errors import ContextError, InputError, InvalidArgumentError, arguments, shown
from phalanx.keras.callbacks import BatchCounter
from phalanx.train import Checkpoint, CheckpointManager
from phalanx.typing import PyTree


class Data(Protocol):
    """The batches of `fit` or of its validation."""

    @property
    def is_agreed(self) -> bool:
        """Whether a position is that of all processes together, so that all must ask for it at the same time."""

    def get_state(self, *, undone: bool = False) -> State:
        """Returns the position within the epoch. With `undone`, that before the present steps."""

    def set_state(self, state: State) -> None:
        """Makes the next epoch continue from a position."""

    def get_order(self) -> State:
        """See `EpochData.get_order`."""

    def move(self) -> None:
        """See `EpochData.move`."""


@final
class FitProgress(AbstractPosition):
    """How far a call of `fit` has come. Saved and restored as a part of a checkpoint.

    Args:
      data: the batches.
      validation: the batches of the validation, or None.
      topology: the devices of all processes.
      settle: waits until all steps so far have ended.

    Attributes:
      epoch: the present epoch.
      logs: the results of its steps, once all of them are done.
      results: `logs` with those of the validation, once that is done too.
      called: how many callbacks have received the results.
      last_logs: the results with what callbacks have added, such as the learning rate, once the backup has received them.
      states: returns the states of the callbacks by their names, to save them.
      restored: the states that were restored, until the callbacks have them. None if nothing was restored.
    """

    def __init__(self, data: Data, validation: Data | None, topology: Topology, settle: Callable[[], object]) -> None:
        self.topology, self.settle = topology, settle
        self._data, self._validation = data, validation
        self.states: Callable[[], dict[str, Any]] = dict
        self.restored: dict[str, Any] | None = None
        self._restored = 0  # Number of batches of the epoch that were done when a checkpoint was saved.
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Notes that an epoch begins."""
        self.epoch, self.called = epoch, 0
        self.logs: dict[str, Any] | None = None
        self.results: dict[str, Any] | None = None
        self.last_logs: dict[str, Any] | None = None

    def get_state(self) -> dict[str, Any]:
        """Returns epoch, position in the data, the states of callbacks, and those of the global generators, from which shuffles draw."""
        # A program that is started again must not call the callbacks once more.
        epoch = self.epoch + (self.results is not None)
        return {"epoch": epoch, "data": self._data.get_state(), "random": generators(), "callbacks": self.states()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes back to a state."""
        self.begin(state["epoch"])
        self._data.set_state(state["data"])
        # Earlier versions have not saved them.
        self.restored = {"random": state["random"], **state.get("callbacks", {})}
        self._restored = state["data"].get("done", 0)  # Parameter servers resume at the end of an epoch.
        # `EpochData` draws the order of the present epoch again, from older states. These count for what is drawn after that.
        set_generators(state["random"])

    @property
    @override
    def place(self) -> tuple[int, int]:
        return self.epoch, self._restored

    @property
    def is_agreed(self) -> bool:
        """See `Data.is_agreed`."""
        return self._data.is_agreed

    @property
    def stage(self) -> list[int]:
        """The epoch, and how much of it is done besides its steps."""
        if self.logs is None:
            return [self.epoch, 0]
        return [self.epoch, 1 if self.results is None else 2 + self.called]

    def get_position(self, *, undone: bool) -> dict[str, Any]:
        """Returns all that another process needs to continue in the middle of an epoch, validation or list of callbacks.

        Args:
          undone: whether the present steps do not count.
        """
        stage = {"epoch": self.epoch, "logs": self.logs, "results": self.results, "called": self.called}
        order = None if self._validation is None else self._validation.get_order()
        data = self._data.get_state(undone=undone)
        return {"stage": stage, "data": data, "validation": order, "random": generators()}

    def set_position(self, position: dict[str, Any]) -> None:
        """Goes to what `get_position` has returned, perhaps in another process."""
        self._data.set_state(position["data"])
        if self._validation is not None:
            self._validation.set_state(position["validation"])
        set_generators(position["random"])
        vars(self).update(position["stage"])

    def move(self, topology: Topology) -> None:
        """Goes on with the devices of another group of processes. `set_position` follows."""
        self.topology = topology
        for data in filter(None, (self._data, self._validation)):
            data.move()


@final
class BackupAndRestore(BatchCounter):
    """Saves the state of `fit` and, when the program is started again, continues at the same batch. May be created in any context.

    The state consists of the model, the optimizer and the metrics, the epoch, the position in the data and what decides its order: the
    global generators of Python, NumPy, Keras and torch, and what a dataset has changed in itself. It includes the state of the other callbacks:
    what `get_state()` returns, if a callback also has `set_state(state)`, or else attributes that are numbers, text, arrays or containers of
    these. What cannot be saved is named once. The program may be started again under another strategy, and with another number of processes. With
    several processes, all save together, and the chief writes. `fit` calls this callback after all others, so that they have seen the last step.

    Args:
      backup_dir: folder for the backup, which all processes can read. Only one program may use it.
      save_freq: when to save: "epoch" for the end of each epoch, or a number of batches. False for never, with
        `save_before_preemption`.
      save_every_s: time in seconds between two backups, instead of `save_freq`. None for no limit.
      delete_checkpoint: whether to delete the backup at the end of training.
      save_before_preemption: whether to save when a process receives SIGTERM. All processes then save after the same step and end
        with exit code 42, so that `phalanx run --max-restarts 3` starts them again. `fit` must run in the main thread.

    Raises:
      CheckpointError: this user may not write into the folder.
      InvalidArgumentError: an argument has the wrong type or value.
      MissingDependencyError: the library that writes checkpoints is not installed.

    Source: keras.callbacks.BackupAndRestore, which continues at the next epoch.

    Example:
      >>> import phalanx
      >>> callbacks = [phalanx.keras.BackupAndRestore("backup", save_freq=500)]
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | bool = "epoch",
        *,
        save_every_s: float | None = None,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
    ) -> None:
        super().__init__()
        is_epoch = isinstance(save_freq, str) and save_freq == "epoch"
        self.saves_before_preemption = arguments.flag("save_before_preemption", save_before_preemption)
        is_never = save_freq is False and (save_before_preemption or save_every_s is not None)
        if not is_epoch and not is_never and not arguments.is_integer(save_freq, least=1):
            raise InvalidArgumentError(
                f"save_freq={shown(save_freq)}",
                'must be "epoch", a positive number of batches, or False with save_before_preemption=True.',
                'save_freq="epoch"',
            )
        self._dir, self._freq = arguments.path("backup_dir", backup_dir), save_freq
        self._every_s = arguments.seconds("save_every_s", save_every_s)
        self._deletes = arguments.flag("delete_checkpoint", delete_checkpoint)
        if writes_here():
            require_room(self._dir)
        self.progress: FitProgress | None = None
        self._manager: CheckpointManager | None = None
        self._handler: PreemptionCheckpointHandler | None = None
        self._due = 0
        self._since_s = 0.0

    @override
    def on_train_begin(self, logs: PyTree = None) -> None:
        """Restores the last backup, if there is one."""
        super().on_train_begin(logs)
        if self.progress is None:
            raise ContextError(
                "BackupAndRestore in fit of a model that belongs to no strategy",
                "Keras's own training loop does not expose the position in the data.",
                "with strategy.scope(): around the lines that create and compile the model; or keras.callbacks.BackupAndRestore",
            )
        checkpoint = Checkpoint(model=self.model, progress=self.progress)
        self._manager = CheckpointManager(checkpoint, self._dir, max_to_keep=1, checkpoint_name="backup")
        if self.saves_before_preemption:
            config = TerminationConfig(save_fn=self._save)
            # The handler restores the last backup itself.
            self._handler = PreemptionCheckpointHandler(None, self._manager, termination_config=config)
        else:
            self._manager.restore_or_initialize()
        # 0 for no save within an epoch. With `save_every_s`, the first save is early: the time of a step is unknown before one has run.
        self._due = 1 if self._every_s else int(self._freq) if self._freq != "epoch" else 0
        self._since_s = time.monotonic()

    @override
    def on_train_batch_end(self, batch: int, logs: PyTree = None) -> None:
        """Saves, if enough batches or seconds have passed."""
        super().on_train_batch_end(batch, logs)
        # With `steps_per_execution`, one call may pass the number that is due.
        if self._due and self.batches >= self._due:
            self._save()
            self._due = self.batches + (self._batches_until_next() if self._every_s else int(self._freq))
        if self._handler is not None:
            self._handler.save_checkpoint_if_preempted()

    @override
    def on_epoch_end(self, epoch: int, logs: PyTree = None) -> None:
        """Saves at the end of each epoch, with `save_freq="epoch"`, or if SIGTERM came during validation."""
        assert self.progress is not None
        self.progress.last_logs = logs
        if self._freq == "epoch" and not self._every_s:
            self._save()
        if self._handler is not None:
            self._handler.save_checkpoint_if_preempted()

    @override
    def on_train_end(self, logs: PyTree = None) -> None:
        """Deletes the backup. `fit` waits for it otherwise."""
        assert self._manager is not None
        if self._deletes:
            self._manager.delete_all()

    def end(self) -> None:
        """Ends what it does in a call of `fit`, even after an exception."""
        self.progress = None
        if self._handler is not None:
            self._handler.close()

    def _save(self) -> None:
        assert self._manager is not None
        assert self.progress is not None
        # Workers of parameter servers may still run steps that the position counts already.
        self.progress.settle()
        self._manager.save()

    def _batches_until_next(self) -> int:
        """Returns the number of batches until the next backup. The chief computes it from its clock, for all processes."""
        assert self.progress is not None
        assert self._every_s is not None
        # The time of compiling counts too, so the first intervals are shorter.
        step_s = (time.monotonic() - self._since_s) / self.batches
        num_batches = np.array([max(1, round(self._every_s / max(step_s, 1e-6)))])
        return int(self.progress.topology.exchange(num_batches)[0, 0])


@contextmanager
def informed(callbacks: Sequence[keras.callbacks.Callback], progress: FitProgress) -> Iterator[None]:
    """Returns a context in which the backups among some callbacks know the progress of `fit`."""
    backups = [c for c in callbacks if isinstance(c, BackupAndRestore)]
    for backup in backups:
        backup.progress = progress
    try:
        yield
    finally:
        for backup in backups:
            backup.end()


def refuse_position() -> InputError:
    """Returns the error for data whose position is unknown."""
    return InputError(
        "BackupAndRestore(save_freq=...) with a dataset function under ParameterServerStrategy",
        "each worker reads its own dataset, so the position is known only at the end of an epoch.",
        'save_freq="epoch"',
    )
