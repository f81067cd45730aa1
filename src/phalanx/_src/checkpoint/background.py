# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in a background thread, one after the other."""

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from phalanx._src.checkpoint import shards
from phalanx._src.checkpoint.remote import is_remote
from phalanx._src.checkpoint.store import sum_of_contents
from phalanx.errors import CheckpointError, deferred
from phalanx.errors.deferred import raise_deferred

_writing: threading.Thread | None = None


def submit(write: Callable[[], None]) -> None:
    """Runs `write` in a thread. Its error is raised at the next step or call. Call `wait` first, so that only one thread writes."""
    global _writing  # noqa: PLW0603
    go = threading.Event()

    def begin() -> None:
        # `start` waits for the thread, which must not keep Python's lock then.
        go.wait()
        write()

    # Not a daemon, so that Python waits for the last save at the end of the program.
    _writing = threading.Thread(target=deferred.guarded(begin), name="phalanx-checkpoint")
    _writing.start()
    go.set()


# Polls, because inotify(7) reports nothing that another machine writes to a network file system.
_POLL_S, _SILENCE_S = 0.02, 10.0
_REMOTE_POLL_S, _REMOTE_S = 0.5, 1800.0


def expect(files: Collection[Path], write_first: Callable[[], None]) -> None:
    """Begins to write what this process has of a checkpoint, and to wait for the file of the chief: `wait` returns when it is there.

    Args:
      files: where the file may be: as this process names it, and as the chief does.
      write_first: writes what this process has.
    """

    def write_and_wait() -> None:
        write_first()
        _arrive(files)

    submit(write_and_wait)


def _arrive(files: Collection[Path]) -> None:
    """Waits for one of the files, as long as a process writes it and none expects another one."""

    def has_ended() -> bool:
        # Python joins this thread when the main one has ended. The chief may have ended without its file, so no more waiting then.
        is_wanted = threading.current_thread() is _writing and threading.main_thread().is_alive()
        return not is_wanted or any(file.exists() for file in files)

    # If nothing grows, its process has ended, or writes where this one does not see it. Others tell of the former.
    _wait_while_written(has_ended, [file.parent / f".{file.name}.*.part" for file in files], _SILENCE_S)


def _wait_while_written(has_ended: Callable[[], bool], parts: Collection[Path], silence_s: float) -> bool:
    """Waits as long as unfinished files grow.

    Args:
      has_ended: whether there is nothing more to wait for.
      parts: the patterns of the names of the unfinished files, in their folders.
      silence_s: time in seconds in which they must grow.

    Returns:
      Whether there is nothing more to wait for.
    """
    size, since_s, poll_s = -1, time.monotonic(), _POLL_S
    local = [each for each in parts if not is_remote(each)]
    if not local:  # Nobody sees how much of a file has arrived there.
        silence_s, poll_s = _REMOTE_S, _REMOTE_POLL_S
    while not has_ended():
        unfinished = itertools.chain.from_iterable(each.parent.glob(each.name) for each in local)
        written = sum(status.st_size for _, status in shards.with_status(unfinished))
        if written != size:
            size, since_s = written, time.monotonic()
        elif time.monotonic() - since_s > silence_s:
            return False
        time.sleep(poll_s)
    return True


# Longer than `_SILENCE_S`: without a piece the save fails, but without the chief's file only a wait ends.
_PIECES_S = 60.0
"""Time in seconds in which another process must begin to write its pieces, or continue."""


def sums_of_pieces(file: Path, ranks: Sequence[int]) -> dict[str, str]:
    """Waits until all processes have written their pieces of a checkpoint.

    Args:
      file: the checkpoint.
      ranks: the processes that have pieces.

    Returns:
      The sum of the contents of each process's file, by rank.

    Raises:
      CheckpointError: a process does not write, or writes where this one does not see it.
    """

    sums: dict[int, str] = {}

    def missing() -> list[int]:
        for rank in ranks:
            # Some stores show a file before they have all of it.
            if not sums.get(rank) and shards.file_of_rank(file, rank).exists():
                sums[rank] = sum_of_contents(shards.file_of_rank(file, rank))
        return [rank for rank in ranks if not sums.get(rank)]

    is_complete = _wait_while_written(lambda: not missing(), [shards.folder_of(file) / ".*.part"], _PIECES_S)
    # Looks again, because the last file may have been renamed since the last poll.
    if not is_complete and (left := missing()):
        raise CheckpointError(
            f"a checkpoint as {file}",
            f"rank {left[0]} has not written {shards.file_of_rank(file, left[0])}, as far as this machine sees.",
            "a folder that all machines share, because each process writes the shards that it holds",
        )
    return {str(rank): sums[rank] for rank in ranks}


def is_writing() -> bool:
    """Returns whether a write has not ended yet."""
    return _writing is not None and _writing.is_alive()


def wait() -> None:
    """Waits until all writes have ended.

    Raises:
      PhalanxError: one of them has failed.
    """
    join()
    raise_deferred()


def join() -> None:
    """Waits until all writes have ended. An error is raised later."""
    if _writing is not None:
        _writing.join()


# Runs after Python has joined the writer, so that the error of the last save is known.
@atexit.register
def _report() -> None:
    """Ends the process with status 1 if its last checkpoint is not on the disk."""
    if deferred.failures:
        print(f"{type(deferred.failures[0]).__name__}: {deferred.failures[0]}", file=sys.stderr, flush=True)
        sys.stdout.flush()  # `os._exit` flushes nothing.
        # Python ignores an exception in an exit handler, and the exit status would be 0.
        os._exit(1)
