# SPDX-License-Identifier: Apache-2.0
"""Reading ahead in a background thread."""

import contextvars
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

from typing_extensions import override

T = TypeVar("T")

_EXIT_TIMEOUT_S = 2.0


class AbstractReadings(ABC, Generic[T]):
    """What a function returns, call after call, until it returns None."""

    @abstractmethod
    def get(self) -> T | None:
        """Returns the next item; None at the end, again and again.

        Raises:
          BaseException: what the function raised, in the place of the item that it belongs to.
        """

    @abstractmethod
    def stop(self) -> tuple[list[T], BaseException | None]:
        """Ends reading; returns the items that were read but not handed out, and the failure after them."""


def readings(read: Callable[[], T | None], ahead: int, *, in_thread: bool) -> AbstractReadings[T]:
    """Returns what `read` returns, up to `ahead` items of it read in advance.

    Args:
      read: returns the next item, or None.
      ahead: how many.
      in_thread: whether a thread reads them; else the caller does, when it takes one.
    """
    return _InThread(read, ahead) if ahead and in_thread else _ByCaller(read, ahead)


@final
class _ByCaller(AbstractReadings[T]):
    """For what takes no time to read: handing an item from one thread to another takes longer.

    What is read ahead is on its way to the devices while the caller works, for `device_put` does not wait.
    """

    def __init__(self, read: Callable[[], T | None], ahead: int) -> None:
        self._read: Callable[[], T | None] = read
        self._size = ahead + 1
        self._items: deque[T] = deque()

    @override
    def get(self) -> T | None:
        while len(self._items) < self._size and (item := self._read()) is not None:
            self._items.append(item)
        return self._items.popleft() if self._items else None

    @override
    def stop(self) -> tuple[list[T], BaseException | None]:
        unused, self._items = list(self._items), deque()
        return unused, None


@final
class _InThread(AbstractReadings[T]):
    """Starts the thread. It ends with the last item, with a failure, on `stop`, or when this object is no more."""

    def __init__(self, read: Callable[[], T | None], ahead: int) -> None:
        self._shelf = shelf = _Shelf[T](ahead)
        # The thread knows the shelf, not this object, so that it does not keep it alive. It reads in the caller's context:
        # a generator may ask which strategy is current.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_fill, shelf, read), name="phalanx-prefetch", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, shelf, self._thread)

    @override
    def get(self) -> T | None:
        return self._shelf.take()

    @override
    def stop(self) -> tuple[list[T], BaseException | None]:
        self._shelf.close()
        self._thread.join()
        return self._shelf.rest()


def _fill(shelf: "_Shelf[T]", read: Callable[[], T | None]) -> None:
    try:
        while shelf.wait_for_room():
            item = read()
            if item is None:
                break
            shelf.put(item)
    except BaseException as e:  # Raised where the item would have been handed out.
        shelf.fail(e)
    finally:
        shelf.end()


def _end(shelf: "_Shelf[T]", thread: threading.Thread) -> None:
    shelf.close()
    if thread is not threading.current_thread():
        # A thread that is still in `device_put` when the interpreter ends would crash it.
        thread.join(_EXIT_TIMEOUT_S)


class _Shelf(Generic[T]):
    """Where the thread leaves items for the consumer."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[T] = deque()
        self._failure: BaseException | None = None
        self._ended = self._closed = False
        self._change = threading.Condition()

    def wait_for_room(self) -> bool:
        """Returns whether to read on, as soon as there is room for an item."""
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._items) < self._size)
            return not self._closed

    def put(self, item: T) -> None:
        with self._change:
            self._items.append(item)
            self._change.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self._change:
            self._failure = failure

    def end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()

    def take(self) -> T | None:
        with self._change:
            self._change.wait_for(lambda: self._items or self._ended)
            if self._items:
                item = self._items.popleft()
                self._change.notify_all()
                return item
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return None

    def rest(self) -> tuple[list[T], BaseException | None]:
        rest = list(self._items), self._failure
        self._items, self._failure = deque(), None
        return rest
