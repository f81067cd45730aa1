# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint`: saves and restores the objects of a training run."""

import functools
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import jax
import keras
from typing_extensions import override

from phalanx._src.checkpoint import background, shards
from phalanx._src.checkpoint.capture import capture
from phalanx._src.checkpoint.names import Holder
from phalanx._src.checkpoint.objects import Snapshot
from phalanx._src.checkpoint.remote import absolute
from phalanx._src.checkpoint.restoration import Restoration
from phalanx._src.checkpoint.status import CheckpointStatus
from phalanx._src.checkpoint.store import CheckpointFile, file_of, path_of, refuse_existing, write
from phalanx._src.cluster.watch import membership
from phalanx._src.compat import is_lifting, settle_models
from phalanx._src.input.wire import exchange_bytes
from phalanx._src.mesh.topology import Topology
from phalanx._src.strategies.base import living_strategies
from phalanx._src.strategies.current import get_strategy
from phalanx._src.tracing import context
from phalanx._src.tracing.context import has_strategy
from phalanx.errors import (
    CheckpointError,
    ContextError,
    InvalidArgumentError,
    PeerLostError,
    PhalanxError,
    arguments,
    shown,
)

T = TypeVar("T")

_log = logging.getLogger("phalanx")

# Not an RLock: a `get_state` that saves must be refused too, and it runs in the same thread.
_busy = threading.Lock()


def _nothing(*_: object) -> None:
    pass


class AbstractPosition(ABC):
    """An object that knows how far a training run has come, and that a checkpoint saves and restores."""

    @property
    @abstractmethod
    def place(self) -> tuple[int, int]:
        """The epoch, from 0, and the number of its batches that are done."""


@final
@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `Checkpoint.save` and `Checkpoint.write`. May be created in any context.

    Args:
      enable_async: whether a background thread writes the file, while training continues.

    Raises:
      InvalidArgumentError: `enable_async` is not a bool.

    Source: tf.train.CheckpointOptions. Unlike there, saving is asynchronous by default.

    Example:
      >>> import phalanx
      >>> phalanx.train.CheckpointOptions(enable_async=False).enable_async
      False
    """

    enable_async: bool = True

    def __post_init__(self) -> None:
        arguments.flag("enable_async", self.enable_async)


@final
class Checkpoint(Holder):
    """Saves objects to a file and restores them, under any strategy. May be created outside replica functions.

    The objects become attributes, and attributes that are set later are saved too. A checkpoint contains the values of all of
    them. It can be restored under another strategy, with another number of devices and processes.

    Restoring changes variables, models, optimizers, metrics, iterators, generators, NumPy arrays, lists and dicts in place. It
    replaces numbers, text, tuples, JAX arrays and pytrees, as attributes of this object. Variables that do not exist yet receive
    their values when they are created.

    With several processes, all must call the methods, and one writes the file, in a folder that all can read.

    Args:
      root: an object whose parts are saved without a prefix. None for none.
      **objects: Keras models, layers, optimizers, metrics and variables; iterators of distributed datasets; arrays, numbers and
        text; NumPy generators; objects with `get_state()` and `set_state(state)`; and containers and pytrees of these.

    Raises:
      InvalidArgumentError: the name of an object is that of a method, or begins with an underscore.
      MissingDependencyError: the library that writes the files is not installed.

    Source: tf.train.Checkpoint.

    Example:
      >>> import keras, os, phalanx, tempfile
      >>> step = keras.Variable(0)
      >>> checkpoint = phalanx.train.Checkpoint(step=step)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = checkpoint.save(os.path.join(folder, "ckpt"))
      ...     step.assign(7)
      ...     _ = checkpoint.restore(path)
      Array(7, dtype=int32)
      >>> int(step)
      0
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        if private := [name for name in objects if name.startswith("_")]:
            raise InvalidArgumentError(
                f"Checkpoint({private[0]}=...)",
                "attributes whose names begin with an underscore are not saved.",
                f"Checkpoint({private[0].strip('_') or 'objects'}=...)",
            )
        taken = sorted(name for name in objects if hasattr(type(self), name))
        if taken:
            raise InvalidArgumentError(
                f"Checkpoint({taken[0]}=...)",
                "is the name of a method or attribute of Checkpoint.",
                f"Checkpoint(my_{taken[0]}=...)",
            )
        self._root = root
        self._counter: keras.Variable | None = None
        self._file: Path | None = None  # Of the last save or restoration.
        for name, value in objects.items():
            setattr(self, name, value)

    @property
    def save_counter(self) -> keras.Variable:
        """The number of saves so far: a variable that is saved and restored too. May be called outside replica functions."""
        # At the first use: programs that only `write` and `read` have no counter in their files.
        if self._counter is None:
            self._counter = keras.Variable(0, dtype="int32", trainable=False, name="save_counter")
        return self._counter

    def _place(self) -> str:
        """Returns how far the training has come, for the user, if one of the objects knows it."""
        objects = [getattr(self, name) for name in self._names()]
        epoch, batches = next((o.place for o in objects if isinstance(o, AbstractPosition)), (0, 0))
        # Keras counts both from 1.
        return f" in epoch {epoch + 1} after batch {batches}" if batches else f" at epoch {epoch + 1}" if epoch else ""

    @override
    def _names(self) -> list[str]:
        return [*super()._names(), *(["save_counter"] if self._counter is not None else [])]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The objects are attributes."""

    def save(self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None) -> str:
        """Saves the objects as `<file_prefix>-<number>`. Call it outside replica functions, in all processes.

        The number is that of this save: `save_counter`, which is saved and restored too. The call returns when the values are
        copied to this process. A thread writes the file. If that fails, the next step or call raises the error.

        Args:
          file_prefix: the folder and the beginning of the name.
          options: None for the default.

        Returns:
          The path of the checkpoint, for `restore`.

        Raises:
          CheckpointError: an object cannot be saved, the file exists already, or an earlier save has failed.
          ContextError: called in a replica function or a traced function.
          InvalidArgumentError: an argument has the wrong type.
        """
        prefix = arguments.path("file_prefix", file_prefix)
        return self._save(f"Checkpoint.save({prefix!r})", lambda number: f"{prefix}-{number}", options)

    def write(self, file_prefix: str | os.PathLike[str], options: CheckpointOptions | None = None) -> str:
        """Saves the objects as `file_prefix`, without a number. See `save`.

        Args:
          file_prefix: the folder and the name.
          options: None for the default.

        Returns:
          `file_prefix`.

        Raises:
          CheckpointError, ContextError, InvalidArgumentError: see `save`.
        """
        path = arguments.path("file_prefix", file_prefix)
        return self._write(f"Checkpoint.write({path!r})", path, options)

    def restore(
        self, save_path: str | os.PathLike[str] | None, options: CheckpointOptions | None = None
    ) -> CheckpointStatus:
        """Restores the objects from a checkpoint. Call it outside replica functions, in all processes.

        What the checkpoint does not contain stays as it is.

        Args:
          save_path: what `save` returned, or `latest_checkpoint`. None does nothing.
          options: has no effect; for programs of tf.train.

        Returns:
          An object that can check what was restored.

        Raises:
          CheckpointError: there is no such checkpoint, or it is incomplete.
          CheckpointMismatchError: a value has another shape or dtype. Nothing was restored.
          ContextError: called in a replica function or a traced function.
          InvalidArgumentError: an argument has the wrong type.
        """
        return self._read("restore", save_path, options)

    def read(self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None) -> CheckpointStatus:
        """Restores the objects from what `write` has written. See `restore`.

        Args:
          save_path: what `write` returned.
          options: has no effect; for programs of tf.train.

        Returns:
          An object that can check what was restored.

        Raises:
          CheckpointError, CheckpointMismatchError, ContextError, InvalidArgumentError: see `restore`.
        """
        return self._read("read", save_path, options)

    def sync(self) -> None:
        """Waits until the file of the last save is on the disk, and this process sees it. May be called in any context.

        Raises:
          CheckpointError: a save has failed.
        """
        background.wait()

    def _save(
        self,
        call: str,
        name: Callable[[int], str],
        options: CheckpointOptions | None,
        before: Callable[[Path], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> str:
        """Saves the objects, with one more save in the counter.

        Args:
          call: the call of the user, for messages.
          name: returns the path for the number of this save.
          options: see `save`.
          before: called on the chief with the new file, before anything is saved.
          after: called in the background when the file is on the disk.
        """
        require_between_steps(call)
        number = int(self.save_counter) + 1
        # Before the objects are captured, so that a program that restores this file continues with the number after it.
        self.save_counter.assign(number)
        try:
            return self._write(call, name(number), options, before, after)
        except BaseException:
            self.save_counter.assign(number - 1)
            raise

    def _write(
        self,
        call: str,
        path: str,
        options: CheckpointOptions | None,
        before: Callable[[Path], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> str:
        _check_options(options)
        # The program may change its working directory before the thread writes.
        file, topology = absolute(file_of(path)), _topology()
        is_chief = topology.is_chief

        def prepare() -> None:
            if is_chief:
                # Only the chief waits: its file is written last, so then all pieces of the earlier save are on the disk too.
                background.wait()
                # Before the check: it takes the manager's lock, and then no other manager can write the file after the check.
                before(file)
                refuse_existing(file)
                # What a process that was killed has left would pass for pieces of the new one.
                shards.delete_pieces(shards.folder_of(file))

        try:
            with _ExclusiveCall(call):
                _, path_of_chief = _together(topology, call, prepare, path_of(file))
                snapshot = Snapshot(topology)
                # Collective: reading a variable may combine values of all processes. So `_together` comes before it.
                capture(self, snapshot)
                # The snapshot shares no memory with variables. Later steps may consume their arrays while a thread writes.
                if is_chief:
                    background.submit(functools.partial(_finish, file, snapshot, after))
                else:
                    # Programs of tf.distribute give each worker its own folder. Only that of the chief gets a file.
                    files = {file, file_of(path_of_chief)}
                    background.expect(files, functools.partial(_write_pieces, file, snapshot))
                if options is not None and not options.enable_async:
                    background.wait()
        except PeerLostError as e:
            if not membership.outlives_losses():
                raise
            # In all processes, the next save has another number: the chief may have written this one.
            _log.warning("%s was skipped. %s", call, str(e).partition("\n")[0])
        self._file = file
        return path

    def _read(self, method: str, path: object, options: CheckpointOptions | None) -> CheckpointStatus:
        _check_options(options)
        if path is None and method == "restore":  # `latest_checkpoint` returned None in the first run.
            _together(_topology(), "Checkpoint.restore(None)", _nothing)
            return CheckpointStatus(None, self)
        path = arguments.path("save_path", path)
        call = f"Checkpoint.{method}({path!r})"
        with _ExclusiveCall(call):
            background.wait()
            if method == "restore":
                _ = self.save_counter  # Created, so that it is restored.
            # If one process refuses the checkpoint, none has begun with it.
            restoration, _ = _together(_topology(), call, lambda: Restoration(self, CheckpointFile(path)))
            restoration.begin()
            status = CheckpointStatus(restoration, self)
            self._file = absolute(restoration.stored.file)
            return status


# In this order, a crash at any point leaves the older checkpoints, and at most pieces that belong to no checkpoint.
def _finish(file: Path, snapshot: Snapshot, after: Callable[[], None]) -> None:
    _write_pieces(file, snapshot)
    write(file, snapshot.arrays, {**snapshot.notes(), "files": background.sums_of_pieces(file, snapshot.ranks)})
    after()


def _write_pieces(file: Path, snapshot: Snapshot) -> None:
    if snapshot.pieces:
        notes: dict[str, Any] = {"values": {}, "names": {}, "aliases": {}}
        write(shards.file_of_rank(file, jax.process_index()), snapshot.pieces, notes)


def _check_options(options: object) -> None:
    if options is not None and not isinstance(options, CheckpointOptions):
        raise InvalidArgumentError(
            f"options={shown(options)}",
            "must be CheckpointOptions or None.",
            "options=CheckpointOptions(enable_async=False)",
        )


def require_between_steps(call: str) -> None:
    """Checks that no function is being traced.

    Args:
      call: the method and its arguments, for the message.

    Raises:
      ContextError: a replica function or another function is being traced.
    """
    if is_lifting() or (context.depth() and context.current().replica is not None):
        raise ContextError(
            f"{call} in a replica function or a traced function",
            "the function is traced once and then runs without Python, so nothing would be saved or restored.",
            "call it between two steps, outside strategy.run and phalanx.function",
        )


class _ExclusiveCall:
    """Checks where a method is called, and that no other one runs."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __enter__(self) -> None:
        require_between_steps(self._call)
        settle_models()  # Before the lock, which a Keras error would keep.
        if not _busy.acquire(blocking=False):
            raise CheckpointError(
                f"{self._call} while another checkpoint is saved or restored",
                "the values would be those of different moments.",
                "call it after the other call has returned, and not in get_state or set_state of an object",
            )

    def __exit__(self, *exception: object) -> None:
        _busy.release()


def _topology() -> Topology:
    """Returns the topology of the current strategy, or outside all scopes, of the strategy with the most processes."""
    current = get_strategy().topology  # Outside all scopes, that of one process.
    if jax.process_count() == 1 or has_strategy():
        return current
    return max([current, *(s.topology for s in living_strategies())], key=lambda topology: topology.num_workers)


def writes_here() -> bool:
    """Returns whether this process writes checkpoints, as far as is known before the first save."""
    return all(strategy.topology.is_chief for strategy in living_strategies())


def of_chief(text: str) -> str:
    """Returns the text that the chief passed. All workers must call it."""
    return exchange_bytes(text.encode(), _topology().exchange)[0].decode()


def _together(topology: Topology, call: str, prepare: Callable[[], T], text: str = "") -> tuple[T, str]:
    """Calls `prepare` on all workers. The watchdog reports a worker that does not make the call.

    Returns:
      The result of `prepare` on this worker, and the text that the chief passed.

    Raises:
      CheckpointError: the workers made different calls, or `prepare` failed on one of them.
    """
    if topology.num_workers == 1:
        return prepare(), text
    result, error = None, None
    try:
        result = prepare()
    # Any other exception leaves here. The watchdog then reports this process to those that wait in the exchange.
    except PhalanxError as e:
        error = e
    message = json.dumps([call, "" if error is None else str(error), text])
    messages = [json.loads(text) for text in exchange_bytes(message.encode(), topology.exchange)]
    if error is not None:
        raise error
    # Only calls, not files: programs of tf.distribute give the manager of each worker its own folder (`workertemp_1`).
    different = [f"rank {rank}: {called}" for rank, (called, *_) in enumerate(messages) if called != messages[0][0]]
    if different:
        raise CheckpointError(
            f"{call} in rank {topology.worker_index} of {topology.num_workers} processes",
            f"the processes made different calls: rank 0: {messages[0][0]}; {'; '.join(different)}.",
            "the same call with the same path in all processes, in a folder that all of them see",
        )
    failed = [f"rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(messages) if problem]
    if failed:
        raise CheckpointError(call, f"failed in other processes. {' '.join(failed)}")
    return result, messages[0][2]  # type: ignore[return-value]
