# SPDX-License-Identifier: Apache-2.0
"""Between a worker and a parameter server of one machine: memory that both have, for what is large.

Ray copies a large argument or result into an object of its own, which costs more than the step that it is for. Here the side that
sends copies it into memory that it keeps, and the other reads it there; Ray carries the rest, and does so between machines with
all of it. Each side is done with what it has read before it sends again, so the memory is never overwritten too soon.
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

from phalanx.servers.remote.plans import Pusher

_ALIGNMENT = 64  # XLA takes arrays that begin at multiples of it as they are.
_SMALL = 1 << 16


@dataclass(frozen=True)
class Packed:
    """Something without its arrays.

    Args:
      pusher: the worker at one end of the line.
      path: of the file with the arrays. It is no other process's, has no other name, and ends with the processes that use it.
      rest: what is left, pickled.
      sizes: of the arrays, in bytes.
    """

    pusher: Pusher
    path: str
    rest: bytes
    sizes: tuple[int, ...]


class Line:
    """One end. Calls must not overlap.

    Args:
      pusher: the worker, at both ends.

    Example:
      >>> here, there = Line(Pusher(0, 0)), Line(Pusher(0, 0))
      >>> sent = here.pack({"kernel": np.ones((200, 200))})
      >>> there.unpack(pickle.loads(pickle.dumps(sent)))["kernel"].sum()
      np.float64(40000.0)
    """

    def __init__(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._mine: _Memory | None = None
        self._others: _Memory | None = None

    def greeting(self) -> Any:
        """Returns what to ask the other end with, whether there can be a line."""
        return (_machine(), self.pack(np.zeros(_SMALL, np.uint8))) if hasattr(os, "memfd_create") else None

    def understands(self, greeting: Any) -> bool:
        """Returns whether it came from this machine, and the memory can be seen."""
        if greeting is None or greeting[0] != _machine():
            return False
        try:
            self.unpack(greeting[1])
        except OSError:
            return False
        return True

    def pack(self, content: Any) -> Any:
        """Returns what to send; it is overwritten by the next call."""
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

    def unpack(self, sent: Any) -> Any:
        """Returns what was packed at the other end; its arrays change when that end packs again."""
        if not isinstance(sent, Packed):
            return sent
        self._others = self._others or _Memory(os.open(sent.path, os.O_RDWR))
        starts, end = _layout(sent.sizes)
        memory = self._others.of(end)
        return pickle.loads(
            sent.rest, buffers=[memory[start : start + n] for start, n in zip(starts, sent.sizes, strict=True)]
        )


class _Memory:
    """A file that grows, and its mapping."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._array = np.empty(0, np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"

    def grown_to(self, size: int) -> np.ndarray:
        """Makes it at least so large."""
        if size > self._array.size:
            os.ftruncate(self._fd, size)
        return self.of(size)

    def of(self, size: int) -> np.ndarray:
        """Returns its content, which has at least this size."""
        if size > self._array.size:
            self._array = np.frombuffer(mmap.mmap(self._fd, 0), np.uint8)
        return self._array


def _machine() -> str:
    """What is the same for processes that see each other's files in `/proc`."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where arrays of these sizes begin, and where the last one ends."""
    ends = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]
