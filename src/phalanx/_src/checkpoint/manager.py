# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager`: numbered checkpoints in one folder, of which it keeps the last ones."""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import keras

from phalanx._src.checkpoint import background, folder_lock, shards
from phalanx._src.checkpoint.capture import size_of
from phalanx._src.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointOptions,
    of_chief,
    require_between_steps,
    writes_here,
)
from phalanx._src.checkpoint.remote import absolute, as_os_error, is_remote, path_from
from phalanx._src.checkpoint.store import SUFFIX, path_of, require_room
from phalanx._src.runtime.notes import note
from phalanx.errors import CheckpointError, InvalidArgumentError, arguments, shown

_HOUR_S = 3600.0
_LONGEST_NAME = 200


def numbered(directory: str | os.PathLike[str], name: str | None = None) -> list[tuple[int, Path]]:
    """Returns the numbers and files of the checkpoints in a folder, by number."""
    checkpoints = []
    folder = path_from(directory)
    try:
        with as_os_error():
            files = list(folder.glob(f"*-*{SUFFIX}"))
    except OSError as e:
        if is_remote(folder):
            raise CheckpointError(
                f"the checkpoints in {folder}",
                f"the folder cannot be read: {e}.",
                "check its name, and the credentials of this machine",
            ) from e
        files = []  # The name is too long.
    for file in files:
        parts = _name_and_number(file)
        # A store lists no folders. On a disk, a folder may have such a name.
        if parts is not None and name in (None, parts[0]) and (is_remote(file) or not file.is_dir()):
            checkpoints.append((parts[1], file))
    return sorted(checkpoints)  # `glob` has no order, and as text 10 precedes 9.


def _name_and_number(path: Path) -> tuple[str, int] | None:
    """Returns the parts of the name of a numbered checkpoint, with or without the suffix. None for another file."""
    # 18 digits fit in 64 bits. A file of another user may have a name with any number of digits.
    match = re.fullmatch(r"([^.].*)-(\d{1,18})", path.name.removesuffix(SUFFIX))
    return None if match is None else (match[1], int(match[2]))


def number_of(path: str) -> int:
    """Returns the number at the end of the path of a checkpoint."""
    return int(path.rpartition("-")[2])


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None) -> str | None:
    """Returns the path of the checkpoint with the largest number in a folder. May be called in any context.

    A save of this process that is under way ends first.

    Args:
      checkpoint_dir: the folder.
      latest_filename: has no effect; for programs of tf.train.

    Returns:
      The path, or None if there is none.

    Raises:
      CheckpointError: a save has failed.
      InvalidArgumentError: `checkpoint_dir` is not a path.

    Source: tf.train.latest_checkpoint.

    Example:
      >>> import phalanx
      >>> phalanx.train.latest_checkpoint("no such folder") is None
      True
    """
    path = arguments.path("checkpoint_dir", checkpoint_dir)
    background.wait()  # tf.train.Checkpoint.save returns with the file complete.
    checkpoints = numbered(path)
    return path_of(checkpoints[-1][1]) if checkpoints else None


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields the latest checkpoint of a folder whenever there is a new one. May be called in any context.

    Args:
      checkpoint_dir: the folder. It may be created later.
      min_interval_secs: least time in seconds between two checkpoints that it yields.
      timeout: time in seconds to wait for a new checkpoint. None for no limit.
      timeout_fn: called after each `timeout`. The iterator ends when it returns True. None to end at the first timeout.

    Yields:
      Paths for `Checkpoint.restore`.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.train.checkpoints_iterator.

    Example:
      >>> import phalanx
      >>> list(phalanx.train.checkpoints_iterator("no such folder", timeout=0.1))
      []
    """
    directory = arguments.path("checkpoint_dir", checkpoint_dir)
    arguments.seconds("timeout", timeout)
    if not (isinstance(min_interval_secs, (int, float)) and min_interval_secs == 0):
        arguments.seconds("min_interval_secs", min_interval_secs, hint="min_interval_secs=60")
    if timeout_fn is not None:
        arguments.function("timeout_fn", timeout_fn, "timeout_fn=lambda: True")
    return _watch(directory, min_interval_secs, timeout, timeout_fn)


_POLL_S = 0.5


def _watch(
    directory: str, min_interval_s: float, timeout_s: float | None, timeout_fn: Callable[[], bool] | None
) -> Iterator[str]:
    last: str | None = None
    while True:
        since = time.monotonic()
        while (newest := latest_checkpoint(directory)) in (None, last):
            waited = time.monotonic() - since
            if timeout_s is not None and waited >= timeout_s:
                if timeout_fn is None or timeout_fn():
                    return
                since = time.monotonic()
            time.sleep(_POLL_S if timeout_s is None else min(_POLL_S, timeout_s))
        last = newest
        # Before the yield, so that the time in which the caller evaluates the checkpoint counts.
        seen_s = time.monotonic()
        assert last is not None
        yield last
        time.sleep(max(0.0, min_interval_s - (time.monotonic() - seen_s)))


@final
class CheckpointManager:
    """Saves numbered checkpoints in a folder and deletes old ones. May be created outside replica functions.

    Args:
      checkpoint: the `Checkpoint` to save and restore.
      directory: the folder, which all processes can read. It is created when needed.
      max_to_keep: number of checkpoints to keep. None for all. More of an earlier program stay, because it may have kept them on purpose.
      keep_checkpoint_every_n_hours: hours between checkpoints that are never deleted, in addition to the last `max_to_keep`.
      checkpoint_name: the beginning of the file names.
      step_counter: variable with the number of steps so far, for `checkpoint_interval`.
      checkpoint_interval: number of steps between two saves. `save` does nothing before so many steps have passed.
      init_fn: initializes the objects if there is no checkpoint to restore.

    Raises:
      CheckpointError: this user may not write into the folder, or the disk has no room for one checkpoint.
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.train.CheckpointManager.

    Example:
      >>> import keras, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     manager = phalanx.train.CheckpointManager(phalanx.train.Checkpoint(step=keras.Variable(0)), folder, max_to_keep=2)
      ...     saved = [manager.save() for _ in range(3)]
      ...     manager.sync()
      ...     manager.checkpoints == saved[1:]
      True
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: keras.Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        arguments.instance(
            "checkpoint",
            checkpoint,
            Checkpoint,
            "CheckpointManager(phalanx.train.Checkpoint(model=model), directory, 5)",
        )
        arguments.path("directory", directory)
        if max_to_keep is not None:
            arguments.integer(
                "max_to_keep", max_to_keep, kind="1 or more checkpoints, or None for all", hint="max_to_keep=5"
            )
        arguments.seconds(
            "keep_checkpoint_every_n_hours", keep_checkpoint_every_n_hours, hint="keep_checkpoint_every_n_hours=1.0"
        )
        is_name = isinstance(checkpoint_name, str) and re.fullmatch(r"[^./\x00-\x1f][^/\x00-\x1f]*", checkpoint_name)
        if not is_name or len(os.fsencode(checkpoint_name)) > _LONGEST_NAME:
            raise InvalidArgumentError(
                f"checkpoint_name={shown(checkpoint_name, 100)}",
                f"must be the beginning of a file name, of at most {_LONGEST_NAME} bytes.",
                'checkpoint_name="ckpt"',
            )
        if (step_counter is None) != (checkpoint_interval is None):
            raise InvalidArgumentError(
                f"checkpoint_interval={shown(checkpoint_interval)} and step_counter={shown(step_counter)}",
                "either both must be given or none.",
                "step_counter=optimizer.iterations, checkpoint_interval=100",
            )
        if checkpoint_interval is not None:
            arguments.integer(
                "checkpoint_interval", checkpoint_interval, kind="1 or more steps", hint="checkpoint_interval=100"
            )
            arguments.instance("step_counter", step_counter, keras.Variable, "step_counter=optimizer.iterations")
        if init_fn is not None:
            arguments.function("init_fn", init_fn, "init_fn=initialize")
        # Here, because the first save may come after hours. Slots that are not built yet are not counted.
        if writes_here():
            require_room(directory, size_of(checkpoint))
        self._checkpoint, self._given, self._name = checkpoint, path_from(directory), checkpoint_name
        self._absolute = absolute(self._given)
        self._max_to_keep, self._keep_every_h = max_to_keep, keep_checkpoint_every_n_hours
        self._step_counter, self._interval, self._init_fn = step_counter, checkpoint_interval, init_fn
        # A variable, so that a process which joins an elastic group takes it over and saves after the same steps as the others.
        self._last_step = None if step_counter is None else keras.Variable(-1, False, "int32", name="last_step")
        self._since_s = time.time()  # Compared with the times of files, hence no monotonic clock.
        self._kept: set[Path] = set()
        self._is_first = True

    @property
    def _directory(self) -> Path:
        """The folder: as it was given, or its absolute path once the program has changed its working directory."""
        return self._given if absolute(self._given) == self._absolute else self._absolute

    @property
    def checkpoint(self) -> Checkpoint:
        """The object that saves and restores. May be called in any context."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The folder. May be called in any context."""
        return str(self._directory)

    @property
    def checkpoint_interval(self) -> int | None:
        """The number of steps between two saves. May be called in any context."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints, oldest first. May be called in any context. Waits until the last save is on the disk."""
        self.sync()
        return [path_of(file) for _, file in numbered(self._directory, self._name)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the last checkpoint, or None. May be called in any context. Waits until the last save is on the disk."""
        return next(reversed(self.checkpoints), None)

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Saves a checkpoint. Call it outside replica functions, in all processes.

        Args:
          checkpoint_number: the number for the name. None for the next value of `checkpoint.save_counter`; or, if the checkpoint that was
            last saved here or restored from here has a larger number, for the number after it.
          check_interval: whether to save nothing before `checkpoint_interval` steps have passed since the last save.
          options: None for the default.

        Returns:
          The path of the checkpoint. None if it saved nothing.

        Raises:
          CheckpointError: an object cannot be saved, there is a checkpoint of this number or a later one, another program saves into
            the folder, or an earlier save has failed.
          ContextError: called in a replica function or a traced function.
          InvalidArgumentError: an argument has the wrong type.
        """
        call = f"CheckpointManager.save({'' if checkpoint_number is None else shown(checkpoint_number)})"
        require_between_steps(call)
        arguments.flag("check_interval", check_interval)
        if checkpoint_number is not None:
            arguments.integer(
                "checkpoint_number",
                checkpoint_number,
                least=0,
                most=10**18 - 1,
                kind="0 or more, and an integer of at most 18 digits",
            )
        step = self._step
        if check_interval and not self._is_due(step):
            return None

        def name(count: int) -> str:
            number = max(count, self._last_number() + 1) if checkpoint_number is None else checkpoint_number
            return str(self._directory / f"{self._name}-{number}")

        path = self._checkpoint._save(call, name, options, functools.partial(self._prepare, call), self._delete_old)
        self._note_step(step)  # After the save: if it fails, the next call tries again.
        return path

    def _note_step(self, step: int | None) -> None:
        if self._last_step is not None:
            self._last_step.assign(step)

    def _last_number(self) -> int:
        """Returns the number of the checkpoint that was last saved or restored, if it is one of this manager; else 0."""
        # All processes made the same calls, so they agree without looking into the folder, where a save may be under way.
        file = self._checkpoint._file
        parts = None if file is None or file.parent != self._absolute else _name_and_number(file)
        return parts[1] if parts is not None and parts[0] == self._name else 0

    @property
    def _step(self) -> int | None:
        return None if self._step_counter is None else int(self._step_counter)

    def _is_due(self, step: int | None) -> bool:
        if step is None or self._last_step is None or self._interval is None:
            return True
        last = int(self._last_step)
        return last < 0 or step >= last + self._interval  # -1: nothing was saved yet.

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint; if there is none, calls `init_fn`. Call it outside replica functions, in all processes.

        Returns:
          The path of the checkpoint that was restored, or None.

        Raises:
          CheckpointError, CheckpointMismatchError, ContextError: see `Checkpoint.restore`.
        """
        # The chief may see a checkpoint before the others do.
        latest = of_chief(self.latest_checkpoint or "")
        if not latest:
            if self._init_fn is not None:
                self._init_fn()
            return None
        self._checkpoint.restore(latest)
        self._note_step(self._step)  # A restored step is on the disk, and so counts as saved.
        note(f"resumed{self._checkpoint._place()} from {latest}")
        return latest

    def delete_all(self) -> None:
        """Deletes all checkpoints of this manager, and leaves the folder to other programs. Call it in all processes."""
        self.sync()
        of_chief("")  # Nobody reads a file any more.
        for _, file in numbered(self._directory, self._name):
            shards.delete(file)
        if not is_remote(self._directory):
            folder_lock.leave(self._directory)
        self._is_first = True

    def sync(self) -> None:
        """Waits until the file of the last save is on the disk. May be called in any context.

        Raises:
          CheckpointError: a save has failed.
        """
        self._checkpoint.sync()

    def _prepare(self, call: str, new: Path) -> None:
        """Makes this process the only one that saves into the folder, and removes what a killed one has left unfinished.

        Raises:
          CheckpointError: another process saves into the folder, the folder cannot be written to, or it has a later checkpoint.
        """
        latest = next(reversed(numbered(self._directory, self._name)), None)
        number = number_of(path_of(new))
        if latest is not None and number <= latest[0]:
            older = f"{path_of(latest[1])}, which would stay the latest checkpoint, and the new one would be the first to be deleted"
            raise CheckpointError(
                f"{call} of {path_of(new)}",
                f"the folder contains {older if number < latest[0] else 'a checkpoint of this name'}.",
                f"manager.restore_or_initialize() before the first save; or use another folder; or save({latest[0] + 1})",
            )
        # First the lock: another program may still write the files that are deleted below.
        self._is_first |= not is_remote(self._directory) and folder_lock.occupy(self._directory)
        if self._is_first and not is_remote(self._directory):
            for unfinished in self._directory.glob(f".{self._name}-*.part"):
                with contextlib.suppress(OSError):
                    unfinished.unlink()
        if self._is_first:
            # Pieces without a checkpoint: their save ended before the chief wrote its file.
            saved = {shards.folder_of(file) for _, file in numbered(self._directory, self._name)}
            for folder in set(self._directory.glob(f"{self._name}-*.shards")) - saved:
                shards.delete_pieces(folder)
            # Files older than the last ones were preserved on purpose.
            self._kept = {file for _, file in self._old()}
            self._is_first = False

    def _old(self) -> list[tuple[float, Path]]:
        """Returns the times and files of all checkpoints except the last `max_to_keep`."""
        checkpoints = numbered(self._directory, self._name)[: -self._max_to_keep] if self._max_to_keep else []
        # The times of files, so that a restarted program keeps the same ones.
        return [(status.st_mtime, file) for file, status in shards.with_status(file for _, file in checkpoints)]

    def _delete_old(self) -> None:
        """Deletes old checkpoints. Runs after a save, in the thread that writes."""
        # No lock for `_kept`, because `_prepare` changes it only after it has waited for this thread.
        for saved_s, file in self._old():
            if file in self._kept:
                continue
            last_s = max((status.st_mtime for _, status in shards.with_status(self._kept)), default=self._since_s)
            if self._keep_every_h is not None and saved_s - last_s >= self._keep_every_h * _HOUR_S:
                self._kept.add(file)
            else:
                shards.delete(file)
