# SPDX-License-Identifier: Apache-2.0
"""Calls a function ahead of its consumer, in a background thread or in the consumer's own thread."""

import contextvars
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from typing_extensions import override

T = TypeVar("T")

_EXIT_TIMEOUT_S = 2.0
_LOOK_S = 1.0


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


@final
class _ByCaller(AbstractReadings[T]):
    """Reads in the consumer's thread, for items that are cheaper to read than to pass between threads.

    Reading ahead still helps: `jax.device_put` returns before the transfer ends, so transfers overlap with the steps.
    """

    def __init__(self, read: Callable[[], T | None], ahead: int) -> None:
        self._read: Callable[[], T | None] = read
        self._size = ahead + 1
        self._items: deque[T] = deque()

    @override
    def get(self, most: int | None = None) -> T | None:
        size = self._size if most is None else min(self._size, most)
        while len(self._items) < size and (item := self._read()) is not None:
            self._items.append(item)
        return self._items.popleft() if self._items else None

    @override
    def stop(self) -> tuple[list[T], BaseException | None]:
        unused, self._items = list(self._items), deque()
        return unused, None


@final
class _InThread(AbstractReadings[T]):
    """Reads in a background thread, which ends after the last item, a failure or `stop`, or when this object is collected."""

    def __init__(self, read: Callable[[], T | None], ahead: int, most: int | None) -> None:
        self._shelf = shelf = _Shelf[T](ahead, most)
        # The thread refers to the shelf but not to this object, because that would keep the object alive. It runs in the
        # context of the caller, because a user's generator may ask for the current strategy.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_fill, shelf, read), name="phalanx-prefetch", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, shelf, self._thread)

    @override
    def get(self, most: int | None = None) -> T | None:
        return self._shelf.take(most)

    @override
    def stop(self) -> tuple[list[T], BaseException | None]:
        self._shelf.close()
        self._thread.join()
        return self._shelf.rest()


def _fill(shelf: "_Shelf[T]", read: Callable[[], T | None]) -> None:
    failure = None
    try:
        while shelf.wait_for_request() and (item := read()) is not None:
            shelf.put(item)
    except BaseException as e:  # `take` raises it in the consumer's thread.
        failure = e
    shelf.end(failure)


def _end(shelf: "_Shelf[T]", thread: threading.Thread) -> None:
    shelf.close()
    # The garbage collector may run the finalizer in any thread, including in the reading one, which cannot join itself.
    if thread is not threading.current_thread():
        # A daemon thread that is inside `jax.device_put` at interpreter exit can crash the process.
        thread.join(_EXIT_TIMEOUT_S)


@dataclass(frozen=True)
class _End:
    """What follows the last item."""

    failure: BaseException | None


class _Shelf(Generic[T]):
    """Two queues between the consumer and the reading thread: requests, and the items that answer them.

    `queue.SimpleQueue` passes an item faster than a `threading.Condition`, which counts for small batches. `queue.Queue`
    cannot be closed before Python 3.13 (`Queue.shutdown`), so a thread blocked in `put` could not be stopped.
    """

    def __init__(self, size: int, most: int | None) -> None:
        self._size = size
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._requested = 0  # Items that were requested and are not taken.
        self._closed = False
        self._request(most)

    def _request(self, most: int | None) -> None:
        """Requests as many items as will still be taken, up to the size of the shelf."""
        for _ in range(self._requested, self._size if most is None else min(self._size, most)):
            self._requests.put(None)
            self._requested += 1

    def wait_for_request(self) -> bool:
        """Waits until an item is requested. Returns False if the consumer has closed the shelf instead."""
        self._requests.get()
        return not self._closed

    def put(self, item: T) -> None:
        self._items.put(item)

    def end(self, failure: BaseException | None) -> None:
        self._items.put(_End(failure))

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)

    def take(self, most: int | None) -> T | None:
        self._request(most)
        self._requested -= (
            1  # Now, and not when the item is here: a Ctrl-C before it could be counted would end in an endless wait.
        )
        while True:
            try:
                # With a limit: a Ctrl-C between Python's last look for signals and an endless wait would have no effect.
                item = self._items.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                pass
        if isinstance(item, _End):
            self.end(None)  # For later calls.
            if item.failure is not None:
                raise item.failure
            return None
        self._request(most and most - 1)
        return item

    def rest(self) -> tuple[list[T], BaseException | None]:
        # The thread has ended before `stop` calls this, and put the end behind the last item.
        items, failure = [], None
        while not self._items.empty():
            item = self._items.get()
            if isinstance(item, _End):
                failure = failure or item.failure
            else:
                items.append(item)
        return items, failure
