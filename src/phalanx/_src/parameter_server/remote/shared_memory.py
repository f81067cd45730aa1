# SPDX-License-Identifier: Apache-2.0
"""Shared memory for large arrays between a worker and a parameter server on one machine.

Ray copies a large argument or result into its own object, which took longer than the step (18 ms of CPU time per step, 11
with shared memory). Here the sender copies arrays into memory that it keeps, and the receiver reads them there. Ray carries the
rest of the message. Between machines, Ray carries all of it.

Calls alternate: each side has used what it read before it sends again, so the memory is never overwritten too early.

`multiprocessing.shared_memory` would give the memory a name in the file system, which stays after a crash. An anonymous file
(`memfd_create`) has no name, and ends with its processes. The other process opens it through `/proc`.
"""

import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx._src.parameter_server.remote.plans import Pusher
from phalanx.typing import PyTree

_ALIGNMENT = 64  # XLA uses host arrays without a copy if they begin at a multiple of this.
# Messages whose arrays have fewer bytes go through Ray.
_SMALL = 1 << 16


@dataclass(frozen=True)
class Packed:
    """A message whose arrays are in shared memory.

    Args:
      pusher: the worker at one end of the line.
      path: path of the anonymous file with the arrays, in `/proc`. The file ends with the processes that use it.
      rest: the pickled message without its arrays.
      sizes: sizes of the arrays, in bytes.
    """

    pusher: Pusher
    path: str
    rest: bytes
    sizes: tuple[int, ...]


class SharedMemoryConnection:
    """One end of a connection through shared memory. Calls must not overlap.

    Args:
      pusher: the worker at one end. Both ends pass the same.

    Example:
      >>> here, there = SharedMemoryConnection(Pusher(0, 0)), SharedMemoryConnection(Pusher(0, 0))
      >>> sent = here.pack({"kernel": np.ones((200, 200))})
      >>> there.unpack(pickle.loads(pickle.dumps(sent)))["kernel"].sum()
      np.float64(40000.0)
    """

    def __init__(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._mine: _Memory | None = None
        self._others: _Memory | None = None

    def greeting(self) -> Any:
        """Returns a message that tests whether the other end can read this memory; None if the system has no memfd."""
        # The smallest message that `pack` puts into shared memory.
        return (_machine(), self.pack(np.zeros(_SMALL, np.uint8))) if hasattr(os, "memfd_create") else None

    def understands(self, greeting: Any) -> bool:
        """Returns whether a greeting came from this machine, and its memory can be read."""
        if greeting is None or greeting[0] != _machine():
            return False
        try:
            self.unpack(greeting[1])
        except OSError:  # Files in /proc cannot be opened if their process has ended, or is another user's.
            return False
        return True

    def pack(self, content: object) -> PyTree:
        """Copies the arrays of a message to shared memory, unless they are small.

        Returns:
          The message to send. The next call overwrites its arrays.
        """
        buffers: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
        arrays = [np.frombuffer(b.raw(), np.uint8) for b in buffers]
        sizes = tuple(a.nbytes for a in arrays)
        starts, end = _layout(sizes)
        if end < _SMALL:
            return content
        self._mine = self._mine or _Memory(os.memfd_create("phalanx"))
        memory = self._mine.grown_to(end)
        for array, start in zip(arrays, starts, strict=True):
            memory[start : start + array.nbytes] = array
        return Packed(self._pusher, self._mine.path, rest, sizes)

    def unpack(self, sent: object) -> PyTree:
        """Returns the message that the other end packed. Its arrays change when that end packs again."""
        if not isinstance(sent, Packed):
            return sent
        # Also for writing, which `mmap` asks for unless it is told otherwise.
        self._others = self._others or _Memory(os.open(sent.path, os.O_RDWR))
        starts, end = _layout(sent.sizes)
        memory = self._others.of(end)
        return pickle.loads(
            sent.rest, buffers=[memory[start : start + n] for start, n in zip(starts, sent.sizes, strict=True)]
        )


class _Memory:
    """A growing anonymous file and its mapping. Closes the file descriptor when it is collected."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._array = np.empty(0, np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"

    def grown_to(self, size: int) -> np.ndarray:
        """Grows the file to at least `size` bytes, and returns its content."""
        if size > self._array.size:
            os.ftruncate(self._fd, size)
        return self.of(size)

    def of(self, size: int) -> np.ndarray:
        """Returns the content of the file, which has at least `size` bytes. Maps it again if it has grown."""
        if size > self._array.size:
            # Messages of earlier calls keep their own mapping of the file alive.
            self._array = np.frombuffer(mmap.mmap(self._fd, 0), np.uint8)
        return self._array


def _machine() -> str:
    """Returns an identifier that is equal for processes that see each other in `/proc`: the boot and the PID namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of arrays of these sizes, aligned, and the end of the last one."""
    ends = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]
