# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder, into which only one process at a time saves numbered checkpoints."""

import errno
import fcntl
import os
import platform
import stat
import time
from pathlib import Path

from phalanx._src.checkpoint import background
from phalanx._src.cluster.watch import membership
from phalanx._src.runtime.notes import note
from phalanx.errors import CheckpointError

# In the folder, because the programs that share it may run on different machines.
_LOCK = ".phalanx-checkpoints.lock"
_HANDOVER_S = 120.0
"""Time in seconds until a process that has left the group has ended. NFS keeps the locks of a lost machine for 90 s by default."""
_POLL_S = 0.5

_occupied: dict[str, int] = {}
"""The folders that this process saves into, and the descriptors of their lock files. Open until the process ends, or leaves them."""


def _close_in_child() -> None:
    # The lock would last as long as a child that is forked, for example by a data loader.
    for lock in _occupied.values():
        os.close(lock)
    _occupied.clear()


os.register_at_fork(after_in_child=_close_in_child)


def occupy(directory: Path) -> bool:
    """Makes this process the only one that saves into a folder.

    In an elastic group, it waits for a process that has left the group.

    Returns:
      Whether it was not so before.

    Raises:
      CheckpointError: another process saves into the folder, or the folder cannot be written to.
    """
    # flock(2) locks of two descriptors conflict even in one process, so all managers of a folder share one descriptor.
    lock = _occupied.get(os.path.realpath(directory))
    if lock is not None and _is_lock(directory, lock):
        return False
    until_s, is_told = time.monotonic() + (_HANDOVER_S if membership.own() else 0.0), False
    while (owner := _taken_by(directory)) is not None:
        if time.monotonic() >= until_s:
            raise CheckpointError(
                f"a checkpoint in {directory}",
                f"{owner} saves its checkpoints into this folder too, and each program would delete those of the other.",
                "use another folder for each program; or end the other program",
            )
        if not is_told:
            note(f"waits until {owner} leaves {directory}, into which it has saved its checkpoints")
            is_told = True
        time.sleep(_POLL_S)
    return True


def _taken_by(directory: Path) -> str | None:
    """Tries to make this process the only one that saves into a folder. Returns None if it is, or else the name of the process that is.

    Raises:
      CheckpointError: the folder cannot be written to.
    """
    file = directory / _LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Other users may be able to write into the folder: a link would lead to another file, which is written to below.
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise OSError(errno.EINVAL, "it is a pipe or a device", str(file))
    except OSError as e:
        raise CheckpointError(
            f"a checkpoint in {directory}",
            f"the folder cannot be written to: {e}.",
            "use a folder that this user may write to",
        ) from e
    try:
        # The operating system releases the lock when the process ends, however it ends.
        # Not `lockf`, whose lock ends when this process closes any descriptor of the file.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(lock, 200).decode(errors="replace").strip()
        os.close(lock)
        return owner or "another process"
    if not _is_lock(directory, lock):  # Another process has left the folder since this one opened the file.
        os.close(lock)
        return _taken_by(directory)
    os.truncate(lock, 0)  # Only now: until here, the text named the earlier owner.
    os.write(lock, f"process {os.getpid()} on {platform.node()}\n".encode())
    _occupied[os.path.realpath(directory)] = lock
    return None


def leave_all(*, after_save: bool) -> None:
    """Leaves the folders that this process saves into, because it has left its group, or is not the chief of the next one.

    Args:
      after_save: whether to wait for a save that is under way. Without it, this process stays in its folders then.
    """
    if after_save:
        background.join()
    if not background.is_writing():
        for directory in list(_occupied):
            leave(Path(directory))


def leave(directory: Path) -> None:
    """Removes the lock of this process, so that other processes may save into the folder."""
    lock = _occupied.pop(os.path.realpath(directory), None)
    if lock is not None:
        # Unlinked while it is locked: later, it could be the file that another process has locked since.
        (directory / _LOCK).unlink(missing_ok=True)
        os.close(lock)


def _is_lock(directory: Path, lock: int) -> bool:
    """Returns whether a descriptor is that of the lock file that the folder has now."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(directory / _LOCK))
    except FileNotFoundError:
        return False
