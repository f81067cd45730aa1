# SPDX-License-Identifier: Apache-2.0
"""Calls a function ahead of its consumer, in a background thread or in the consumer's own thread."""

import contextvars
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, final

from typing_extensions import override

T = TypeVar("T")

_EXIT_TIMEOUT_S = 2.0
_LOOK_S = 1.0
_MOST_IDLE = 4


class AbstractReadings(ABC, Generic[T]):
    """The results of a function, call after call, until it returns None."""

    @abstractmethod
    def get(self, most: int | None = None) -> T | None:
        """Returns the next item, or None at the end and on every later call.

        Args:
          most: number of items that will still be taken, with this one, so that no others are read. None if it is unknown.

        Raises:
          BaseException: the function raised it instead of returning this item.
        """

    @abstractmethod
    def stop(self) -> tuple[list[T], BaseException | None]:
        """Stops reading. Returns the items that were read but not taken, and the failure after them, if any."""


def readings(
    read: Callable[[], T | None], ahead: int, *, in_thread: bool, most: int | None = None
) -> AbstractReadings[T]:
    """Returns the results of `read`, with up to `ahead` items read in advance.

    Args:
      read: returns the next item, or None at the end.
      ahead: number of items to read in advance. 0 reads each item when it is requested.
      in_thread: whether a background thread reads. If not, the consumer reads the later items when it takes one.
      most: see `AbstractReadings.get`.
    """
    return _InThread(read, ahead, most) if ahead and in_thread else _ByCaller(read, ahead)


class _Stock(Generic[T]):
    """The items that were read but not taken, and the failure after them, if any."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.failure: BaseException | None = None

    def take(self) -> T | None:
        """Returns the next item, or None if there is none. Raises the failure once all items before it are taken."""
        if self.items:
            return self.items.popleft()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return None

    def rest(self) -> tuple[list[T], BaseException | None]:
        rest = list(self.items), self.failure
        self.items, self.failure = deque(), None
        return rest


@final
class _ByCaller(AbstractReadings[T]):
    """Reads in the consumer's thread, for items that are cheaper to read than to pass between threads.

    Reading ahead still helps: `jax.device_put` returns before the transfer ends, so transfers overlap with the steps.
    """

    def __init__(self, read: Callable[[], T | None], ahead: int) -> None:
        self._read: Callable[[], T | None] = read
        self._size = ahead + 1
        self._stock = _Stock[T]()

    @override
    def get(self, most: int | None = None) -> T | None:
        size, stock = self._size if most is None else min(self._size, most), self._stock
        try:
            while len(stock.items) < size and stock.failure is None and (item := self._read()) is not None:
                stock.items.append(item)
        except Exception as e:  # `take` raises it after the items before it.
            stock.failure = e
        return stock.take()

    @override
    def stop(self) -> tuple[list[T], BaseException | None]:
        return self._stock.rest()


@final
class _InThread(AbstractReadings[T]):
    """Reads in a background thread, which stops reading after the last item, a failure or `stop`, or when this object is collected."""

    def __init__(self, read: Callable[[], T | None], ahead: int, most: int | None) -> None:
        self._shelf = shelf = _Shelf[T](ahead, most)
        # The thread refers to the shelf but not to this object, because that would keep the object alive.
        weakref.finalize(self, _end, shelf, _ReadingThread.fill(shelf, read))

    @override
    def get(self, most: int | None = None) -> T | None:
        return self._shelf.take(most)

    @override
    def stop(self) -> tuple[list[T], BaseException | None]:
        self._shelf.close()
        while not self._shelf.wait_for_end(_LOOK_S):
            pass
        return self._shelf.rest()


@final
class _ReadingThread(threading.Thread):
    """A thread that fills one shelf after another.

    One thread per epoch would cost memory: glibc allocates for each new thread in another of its arenas, and every arena keeps the
    memory of the batches that were read there.
    """

    _idle: "list[_ReadingThread]" = []

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._shelves: SimpleQueue[tuple[_Shelf[Any], Callable[[], Any], contextvars.Context]] = SimpleQueue()

    @classmethod
    def fill(cls, shelf: "_Shelf[T]", read: Callable[[], T | None]) -> threading.Thread:
        """Returns the thread that fills `shelf` with the results of `read`. When the shelf has ended, it is idle, or ends."""
        try:
            thread = cls._idle.pop()
        except IndexError:
            thread = cls()
            thread.start()
        thread.name = "phalanx-prefetch"
        # The context of the caller, because a user's generator may ask for the current strategy.
        thread._shelves.put((shelf, read, contextvars.copy_context()))
        return thread

    @override
    def run(self) -> None:
        is_needed = True
        while is_needed:
            shelf, read, context = self._shelves.get()
            context.run(_fill, shelf, read)
            del read, context
            # Before the shelf ends, because the consumer may then begin to read another.
            is_needed = len(self._idle) < _MOST_IDLE
            if is_needed:
                self.name = "phalanx-idle"
                self._idle.append(self)
            shelf.end()
            del shelf


# A fork of the process does not have these threads.
os.register_at_fork(after_in_child=_ReadingThread._idle.clear)


def _fill(shelf: "_Shelf[T]", read: Callable[[], T | None]) -> None:
    try:
        while shelf.wait_for_room():
            item = read()
            if item is None:
                break
            shelf.put(item)
    except BaseException as e:  # `take` raises it in the consumer's thread.
        shelf.fail(e)


def _end(shelf: "_Shelf[T]", thread: threading.Thread) -> None:
    shelf.close()
    # The garbage collector may run the finalizer in any thread, including in the reading one, which cannot wait for itself.
    if thread is not threading.current_thread():
        # A daemon thread that is inside `jax.device_put` at interpreter exit can crash the process.
        shelf.wait_for_end(_EXIT_TIMEOUT_S)


class _Shelf(Generic[T]):
    """A bounded queue between the reading thread and the consumer, which also carries a failure, and closes.

    `queue.Queue` cannot be closed before Python 3.13 (`Queue.shutdown`), so a thread blocked in `put` could not be stopped.
    """

    def __init__(self, size: int, most: int | None) -> None:
        # How many items there is room for, and how many will still be taken.
        self._size, self._most = size, most
        self._stock = _Stock[T]()
        self._ended = self._closed = False
        self._change = threading.Condition()

    def wait_for_room(self) -> bool:
        """Waits until there is room for an item. Returns False if the consumer has closed the shelf instead."""
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._stock.items) < self._room)
            return not self._closed

    @property
    def _room(self) -> int:
        return self._size if self._most is None else min(self._size, self._most)

    def put(self, item: T) -> None:
        with self._change:
            self._stock.items.append(item)
            self._change.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self._change:
            self._stock.failure = failure

    def end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()

    def wait_for_end(self, timeout_s: float) -> bool:
        """Waits until nothing more will be put here. Returns False if that takes longer."""
        with self._change:
            return self._change.wait_for(lambda: self._ended, timeout_s)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()

    def take(self, most: int | None) -> T | None:
        with self._change:
            self._most = most
            self._change.notify_all()
            # With a limit: a Ctrl-C between Python's last look for signals and an endless wait would have no effect.
            while not self._change.wait_for(lambda: self._stock.items or self._ended, _LOOK_S):
                pass
            item = self._stock.take()
            if item is not None:
                # Until the next `take`, so that the thread reads no item which nobody will take.
                self._most = most and most - 1
                self._change.notify_all()
            return item

    def rest(self) -> tuple[list[T], BaseException | None]:
        # No lock: the shelf has ended before `stop` calls this.
        return self._stock.rest()
