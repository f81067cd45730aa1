# SPDX-License-Identifier: Apache-2.0
"""The queue of closures, between those who schedule steps and the threads of the workers. It needs no JAX and no Ray.

A closure, until its value is known:

    QUEUED ──get──> IN FLIGHT ──finish──> values
      ^                 │ └─────fail────> its own error
      └────put_back─────┘

The queue:

    OPEN ──fail──> CANCELLING ──nothing is in flight any more──> FAILED ──the error is raised──> OPEN
    each ──stop──> STOPPED

| state      | closures                     | put                    | join                        | done      | get       |
|------------|------------------------------|------------------------|-----------------------------|-----------|-----------|
| OPEN       | queued, in flight            | waits for room         | waits until there are none  | are none? | waits     |
| CANCELLING | in flight                    | waits                  | waits                       | False     | waits     |
| FAILED     | none                         | raises the first error | raises the first error      | raises it | waits     |
| STOPPED    | in flight, but cancelled     | raises                 | raises                      | are none? | None      |

The first error cancels what is queued. What is in flight then comes to its end, and is cancelled too, unless it has an
error of its own. Its steps may still write, so nobody hears of the first error, and begins anew, before they have ended.
Exactly one call raises it, and the queue is as new. An error that nobody has heard of when the queue stops is still raised once.

Where somebody waits for closures to end and none is queued, those who wait in `get` are told to rest: who waits schedules nothing
meanwhile. Before the next closure is queued they are woken.

All state is under one lock. Each wait is for a condition that depends on the state, and whatever changes the state wakes it.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NoReturn, final

import numpy as np
from typing_extensions import override

from phalanx.errors import CancelledError, InvalidArgumentError

CAPACITY = 256 * 1024
"""How many closures may wait before `ClosureQueue.put` does."""


class RemoteValue(ABC):
    """What a scheduled step will return. `ClusterCoordinator.schedule` makes it; it may be asked in any thread.

    Source: tf.distribute.coordinator.RemoteValue.

    Example:
      >>> closure = Closure("a step")
      >>> closure.outcome.settle({"loss": 0.5})
      >>> value: RemoteValue = closure.outcome
      >>> value.fetch()
      {'loss': np.float64(0.5)}
    """

    @abstractmethod
    def get(self) -> Any:
        """Returns what the step returned, as soon as it has.

        Raises:
          CancelledError: the step will not run to its end, for another one has failed, or the coordinator was stopped.
          Exception: what the step raised.
        """

    def fetch(self) -> Any:
        """Returns what the step returned, with NumPy arrays and numbers, as soon as it has. Raises what `get` raises."""
        return _to_numpy(self.get())

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgumentError(
            "a RemoteValue as an array or a number", "the step that returns it may not have run yet.", "value.fetch()"
        )

    __float__ = __int__ = __array__


@final
class Outcome(RemoteValue):
    """The value of a closure. The first word on it counts."""

    __slots__ = ("_error", "_is_known", "_traceback", "_values", "_waits", "queue")

    def __init__(self) -> None:
        self._is_known = False
        self.queue: ClosureQueue | None = None
        self._values: Any = None
        self._error: BaseException | None = None
        self._traceback: Any = None
        # Held until the value is known. An Event has 1.2 KB, and a full queue as many of them as it has closures.
        self._waits = threading.Lock()
        self._waits.acquire()

    def settle(self, values: Any = None, error: BaseException | None = None) -> None:
        """Says what has become of the closure; only one thread at a time may."""
        if self._is_known:
            return
        self._values, self._error = values, error
        self._traceback = None if error is None else error.__traceback__
        self._is_known, self.queue = True, None
        self._waits.release()

    @override
    def get(self) -> Any:
        queue = self.queue
        with self._waits if queue is None else queue.awaited(self._waits):
            pass
        if self._error is not None:
            # Each raise would add to the traceback of the last.
            raise self._error.with_traceback(self._traceback)
        return self._values


@dataclass(frozen=True, eq=False)
class Closure:
    """Work that any worker may do.

    Args:
      work: what to do; the queue does not look into it.
      outcome: what becomes of it.
    """

    work: Any
    outcome: Outcome = field(default_factory=Outcome)


class _State(Enum):
    OPEN = auto()
    CANCELLING = auto()
    FAILED = auto()
    STOPPED = auto()


@final
class ClosureQueue:
    """Closures on their way to the workers, in the order in which they were put. See the table of this module.

    Who got a closure ends it, once: with `finish`, `fail`, or `put_back`.

    Args:
      capacity: how many may wait.
      wake: is called before a closure is queued where some rest.

    Raises:
      InvalidArgumentError: `capacity` is less than 1.

    Example:
      >>> queue = ClosureQueue()
      >>> queue.put(Closure("a step"))
      >>> closure = queue.get()
      >>> queue.finish(closure, len(closure.work))
      >>> queue.done(), closure.outcome.get()
      (True, 6)
    """

    def __init__(self, capacity: int = CAPACITY, wake: Callable[[], None] = lambda: None) -> None:
        if capacity < 1:
            raise InvalidArgumentError(f"capacity={capacity}", "must be at least 1.", f"capacity={CAPACITY}")
        self._capacity = capacity
        self._queued: deque[Closure] = deque()
        self._in_flight: set[Closure] = set()
        self._state = _State.OPEN
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # Those in `get` wait for it,
        self._change = threading.Condition(self._lock)  # and those in `put` and `join` for this.
        self._wake, self._num_waiting, self._is_asked, self._some_rest = wake, 0, False, False

    def put(self, closure: Closure) -> None:
        """Queues a closure, as soon as there is room.

        Raises:
          BaseException: the first error of a closure that nobody has heard of yet. This one is not queued then.
          CancelledError: the queue is stopped.
        """
        with self._lock:
            self._wait_until(lambda: len(self._queued) < self._capacity, "coordinator.schedule(...)")
            self._is_asked = False
            if self._some_rest:
                self._wake()
                self._some_rest = False
            closure.outcome.queue = self
            self._queued.append(closure)
            self._work.notify()

    def join(self) -> None:
        """Returns when nothing is queued or in flight. Raises what `put` raises."""
        with self._lock:
            self._wait_until(lambda: self._is_idle, "coordinator.join()")

    def done(self) -> bool:
        """Returns whether nothing is queued or in flight, without waiting. Raises the first error as `put` does."""
        with self._lock:
            if self._state is not _State.CANCELLING:
                self._raise_first_error()
            self._is_asked = True
            self._work.notify_all()
            return self._is_idle

    @contextmanager
    def awaited(self, lock: Any) -> Iterator[None]:
        """Holds a lock, which may have to be waited for until closures end."""
        with self._lock:
            self._num_waiting += 1
            self._work.notify_all()
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._num_waiting -= 1

    def get(self, rest: Callable[[], None] = lambda: None) -> Closure | None:
        """Returns the next closure, as soon as there is one, or None when the queue is stopped; for threads of workers.

        Args:
          rest: is called, maybe more than once, where there is none and somebody waits for closures to end.
        """
        with self._lock:
            while not self._queued and self._state is not _State.STOPPED:
                if self._num_waiting or self._is_asked:
                    self._some_rest = True
                    rest()
                self._work.wait()
            if self._state is _State.STOPPED:
                return None
            if len(self._queued) == self._capacity:
                self._change.notify_all()
            closure = self._queued.popleft()
            self._in_flight.add(closure)
            return closure

    def get_more(self, most: int) -> list[Closure]:
        """Returns further closures that are there already, for who has one."""
        with self._lock:
            closures = [self._queued.popleft() for _ in range(min(most, len(self._queued)))]
            if closures:
                self._in_flight.update(closures)
                self._change.notify_all()
            return closures

    def __len__(self) -> int:
        """How many closures wait."""
        return len(self._queued)

    @property
    def num_in_flight(self) -> int:
        """How many are being worked on."""
        return len(self._in_flight)

    def finish(self, closure: Closure, values: Any) -> None:
        """Ends a closure that has run."""
        with self._lock:
            if self._state is _State.OPEN:
                closure.outcome.settle(values)
            else:
                self._cancel([closure])
            self._leave(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Ends a closure that has raised. If it is the first, it cancels what is queued."""
        with self._lock:
            closure.outcome.settle(error=error)
            if self._state is _State.OPEN:
                self._state, self._error = _State.CANCELLING, error
                self._cancel(self._queued)
                self._queued.clear()
            self._leave(closure)

    def put_back(self, closure: Closure) -> None:
        """Ends a closure whose worker was lost: it is the next that another one gets.

        It never waits for room: if all consumers did, there would be none.
        """
        with self._lock:
            if self._state is _State.OPEN:
                self._queued.appendleft(closure)
                self._work.notify()
            else:
                self._cancel([closure])
            self._leave(closure)

    def stop(self) -> None:
        """Cancels all closures, those in flight at once, and lets everybody go who waits for the queue or for a value."""
        with self._lock:
            self._state = _State.STOPPED
            self._cancel([*self._queued, *self._in_flight])
            self._queued.clear()
            self._work.notify_all()
            self._change.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped."""
        return self._state is _State.STOPPED

    @property
    def _is_idle(self) -> bool:
        return not self._queued and not self._in_flight

    def _leave(self, closure: Closure) -> None:
        self._in_flight.remove(closure)
        if self._is_idle:
            if self._state is _State.CANCELLING:
                self._state = _State.FAILED
            self._change.notify_all()

    def _cancel(self, closures: Iterable[Closure]) -> None:
        error = _stopped("a scheduled step") if self._state is _State.STOPPED else _cancelled_by(self._error)
        for closure in closures:
            closure.outcome.settle(error=error)

    def _wait_until(self, is_ready: Callable[[], bool], asked: str) -> None:
        """Until the queue is open and ready, or there is an error to raise."""

        def is_over() -> bool:
            return self._state in (_State.FAILED, _State.STOPPED) or (self._state is _State.OPEN and is_ready())

        if not is_over():
            with self.awaited(self._lock):
                self._change.wait_for(is_over)
        self._raise_first_error()
        if self._state is _State.STOPPED:
            raise _stopped(asked)

    def _raise_first_error(self) -> None:
        if self._state is _State.FAILED:
            self._state = _State.OPEN
        error, self._error = self._error, None
        if error is not None:
            raise error


def _cancelled_by(cause: BaseException | None) -> CancelledError:
    error = CancelledError(
        "a scheduled step",
        f"it was cancelled, for another one failed first: {type(cause).__name__}: {cause}",
        "coordinator.schedule(step, ...) once more, after coordinator.join() has raised that error",
    )
    error.__cause__ = cause
    return error


def _stopped(asked: str) -> CancelledError:
    return CancelledError(
        asked,
        "the coordinator was stopped, and what had not ended then is cancelled.",
        "coordinator.join() before strategy.close(); then another ParameterServerStrategy, and its ClusterCoordinator",
    )


def _to_numpy(nest: Any) -> Any:
    """Structures of other kinds than these, and what is no array or number, stay as they are."""
    if isinstance(nest, dict):
        return {key: _to_numpy(value) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(_to_numpy, nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map(_to_numpy, nest))
    if isinstance(nest, int | float | complex) or hasattr(nest, "__array__"):
        return np.asarray(nest)[()]
    return nest
