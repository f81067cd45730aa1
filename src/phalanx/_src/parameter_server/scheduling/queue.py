# SPDX-License-Identifier: Apache-2.0
"""The queue of closures between the threads that schedule steps and the threads of workers. Needs neither JAX nor Ray.

The states of a closure, until its value is known:

    QUEUED ──get──> IN FLIGHT ──finish──> values
      ^                 │ └─────fail────> its own error
      └────put_back─────┘

The states of the queue:

    OPEN ──fail──> CANCELLING ──nothing is in flight any more──> FAILED ──the error is raised──> OPEN
    any state ──stop──> STOPPED

| state      | closures                 | put                    | join                   | done      | get   |
|------------|--------------------------|------------------------|------------------------|-----------|-------|
| OPEN       | queued, in flight        | waits for room         | waits until none left  | none left | waits |
| CANCELLING | in flight                | waits                  | waits                  | False     | waits |
| FAILED     | none                     | raises the first error | raises the first error | raises it | waits |
| STOPPED    | in flight, but cancelled | raises                 | raises                 | none left | None  |

The first error cancels all queued closures. Closures in flight run to their end and are then cancelled too, unless they
raise their own error. Their steps may still write variables, so the first error is raised only after they have ended:
the caller must not start again before that. Exactly one call raises the error, and the queue is open again. If the
queue stops before the error was raised, the error is still raised once.

If the queue has a `wake`, a caller waits for closures to end and no closure is queued, then the threads that wait in `get`
rest, because the waiting caller schedules nothing. They wake up before the next closure is queued.

One lock protects all state. Each wait is for a condition on the state, and every change of the state notifies the
waiters.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Any, NoReturn, final

import numpy as np
from typing_extensions import override

from phalanx.errors import CancelledError, InvalidArgumentError
from phalanx.typing import PyTree

CAPACITY = 256 * 1024
"""The number of queued closures at which `ClosureQueue.put` blocks."""

_LOOK_S = 1.0


class RemoteValue(ABC):
    """A handle of the future return value of a scheduled step. `ClusterCoordinator.schedule` returns it.

    Its methods may be called in any thread, outside of scheduled steps.

    Source: tf.distribute.coordinator.RemoteValue.

    Example:
      >>> closure = Closure("a step")
      >>> closure.outcome.settle({"loss": 0.5})
      >>> value: RemoteValue = closure.outcome
      >>> value.fetch()
      {'loss': np.float64(0.5)}
    """

    @abstractmethod
    def get(self) -> PyTree:
        """Waits for the step and returns its return value.

        Raises:
          CancelledError: the step was cancelled, because another step failed or the coordinator was stopped.
          Exception: the error of the step.
        """

    def fetch(self) -> PyTree:
        """Waits for the step and returns its value, with NumPy arrays and numbers. Raises the same errors as `get`."""
        return _to_numpy(self.get())

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise InvalidArgumentError(
            "a RemoteValue was used as an array or a number",
            "the step that returns it may not have run yet.",
            "value.fetch()",
        )

    __float__ = __int__ = __bool__ = __index__ = __complex__ = __getitem__ = __array__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = (
        __array__
    )
    __lt__ = __le__ = __gt__ = __ge__ = __array__

    __jax_array__ = property(__array__)  # JAX may ask whether it exists, and not call it.

    @override
    def __format__(self, spec: str) -> str:
        return self.__array__() if spec else repr(self)


@final
class PendingValue(RemoteValue):
    """The future value of a closure. It is set once: later calls of `settle` have no effect."""

    __slots__ = ("_error", "_is_known", "_traceback", "_values", "_waits", "queue")

    def __init__(self) -> None:
        self._is_known = False
        self.queue: ClosureQueue | None = None
        self._values: Any = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        # Held until the value is known. A lock is smaller than an Event (1.2 KB), and a full queue has 262,144 of them.
        self._waits = threading.Lock()
        self._waits.acquire()

    def settle(self, values: object = None, error: BaseException | None = None) -> None:
        """Sets the value or the error. Only one thread at a time may call it."""
        if self._is_known:
            return
        self._values, self._error = values, error
        self._traceback = None if error is None else error.__traceback__
        self._is_known, self.queue = True, None  # A value outlives its queue.
        self._waits.release()

    @override
    def get(self) -> PyTree:
        queue = self.queue
        # Taken and released at once, because several callers may wait for one value.
        with self._waits if queue is None else queue.awaited(self._waits):
            pass
        if self._error is not None:
            # Resets the traceback, because each raise of the same error would extend it.
            raise self._error.with_traceback(self._traceback)
        return self._values


@dataclass(frozen=True, eq=False)
class Closure:
    """A unit of work that any worker may run.

    Args:
      work: describes the work. The queue does not inspect it.
      outcome: the future value of the work.
    """

    work: Any
    outcome: PendingValue = field(default_factory=PendingValue)


class _State(Enum):
    OPEN = auto()
    CANCELLING = auto()
    FAILED = auto()
    STOPPED = auto()


@final
class ClosureQueue:
    """A first-in, first-out queue of closures. The table in the docstring of this module describes its states.

    A thread that gets a closure must end it exactly once, with `finish`, `fail` or `put_back`.

    Args:
      capacity: number of queued closures at which `put` blocks.
      wake: called before a closure is queued if threads rest. None if they need not rest.

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

    def __init__(self, capacity: int = CAPACITY, wake: Callable[[], None] | None = None) -> None:
        if capacity < 1:
            raise InvalidArgumentError(f"capacity={capacity}", "must be at least 1.", f"capacity={CAPACITY}")
        self._capacity = capacity
        self._queued: deque[Closure] = deque()
        self._in_flight: set[Closure] = set()
        self._state = _State.OPEN
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # Callers of `get` wait for it.
        self._change = threading.Condition(self._lock)  # Callers of `put` and `join` wait for it.
        self._wake, self._num_waiting, self._is_asked, self._some_rest = wake, 0, False, False

    def put(self, closure: Closure) -> None:
        """Waits until there is room, then queues a closure.

        Raises:
          BaseException: the first error of a closure that has not been raised yet. `closure` is not queued.
          CancelledError: the queue is stopped.
        """
        with self._lock:
            self._wait_until(lambda: len(self._queued) < self._capacity, "coordinator.schedule(...)")
            self._is_asked = False
            # Before the closure is queued, because the servers must expect the update of a worker that takes it.
            if self._some_rest and self._wake is not None:
                self._wake()
                self._some_rest = False
            closure.outcome.queue = self
            self._queued.append(closure)
            self._work.notify()

    def join(self) -> None:
        """Waits until no closure is queued or in flight. Raises the same errors as `put`."""
        with self._lock:
            self._wait_until(lambda: self._is_idle, "coordinator.join()")

    def done(self) -> bool:
        """Returns whether no closure is queued or in flight, without waiting. Raises the first error, like `put`."""
        with self._lock:
            if self._state is not _State.CANCELLING:
                self._raise_first_error()
            # A caller that polls `done` in a loop waits too, although no thread of it waits here.
            self._is_asked = True
            self._tell_to_rest()
            return self._is_idle

    @contextmanager
    def awaited(self, lock: AbstractContextManager[Any]) -> Iterator[None]:
        """Holds `lock`. Counts this thread as waiting for closures while it waits for the lock."""
        with self._lock:
            self._num_waiting += 1
            self._tell_to_rest()
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._num_waiting -= 1

    def get(self, rest: Callable[[], None] = lambda: None) -> Closure | None:
        """Waits for the next closure and returns it, or None if the queue is stopped. Called by the threads of workers.

        Args:
          rest: called, perhaps repeatedly, if the queue is empty and a caller waits for closures to end.
        """
        with self._lock:
            while not self._queued and self._state is not _State.STOPPED:
                if self._wake is not None and (self._num_waiting or self._is_asked):
                    self._some_rest = True
                    rest()
                self._work.wait()
            if self._state is _State.STOPPED:
                return None
            if len(self._queued) == self._capacity:  # Only then a caller of `put` may wait for room.
                self._change.notify_all()
            closure = self._queued.popleft()
            self._in_flight.add(closure)
            return closure

    def get_more(self, most: int) -> list[Closure]:
        """Returns up to `most` queued closures, without waiting. Called by threads that already have a closure."""
        with self._lock:
            closures = [self._queued.popleft() for _ in range(min(most, len(self._queued)))]
            if closures:
                self._in_flight.update(closures)
                self._change.notify_all()
            return closures

    def __len__(self) -> int:
        """Returns the number of queued closures."""
        return len(self._queued)

    @property
    def num_in_flight(self) -> int:
        """The number of closures in flight."""
        return len(self._in_flight)

    def finish(self, closure: Closure, values: object) -> None:
        """Ends a closure that has returned `values`."""
        with self._lock:
            if self._state is _State.OPEN:
                closure.outcome.settle(values)
            else:
                self._cancel([closure])
            self._leave(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Ends a closure that has raised `error`. The first error cancels all queued closures."""
        with self._lock:
            closure.outcome.settle(error=error)
            if self._state is _State.OPEN:
                self._state, self._error = _State.CANCELLING, error
                self._cancel(self._queued)
                self._queued.clear()
            self._leave(closure)

    def put_back(self, closure: Closure) -> None:
        """Puts a closure whose worker was lost at the head of the queue.

        Does not wait for room: if all consumers waited, none would be left to make room.
        """
        with self._lock:
            if self._state is _State.OPEN:
                self._queued.appendleft(closure)
                self._work.notify()
            else:
                self._cancel([closure])
            self._leave(closure)

    def stop(self) -> None:
        """Cancels all closures immediately, including those in flight, and releases all threads that wait."""
        with self._lock:
            self._state = _State.STOPPED
            self._cancel([*self._queued, *self._in_flight])
            self._queued.clear()
            self._work.notify_all()
            self._change.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether the queue was stopped."""
        return self._state is _State.STOPPED

    @property
    def _is_idle(self) -> bool:
        return not self._queued and not self._in_flight

    def _tell_to_rest(self) -> None:
        # Waking thousands of threads takes longer than most steps, so no thread wakes up unless it has to rest.
        if self._wake is not None:
            self._work.notify_all()

    def _leave(self, closure: Closure) -> None:
        self._in_flight.remove(closure)
        if self._is_idle:
            if self._state is _State.CANCELLING:
                self._state = _State.FAILED
            self._change.notify_all()

    def _cancel(self, closures: Iterable[Closure]) -> None:
        error = stopped("a scheduled step") if self._state is _State.STOPPED else _cancelled_by(self._error)
        for closure in closures:
            closure.outcome.settle(error=error)

    def _wait_until(self, is_ready: Callable[[], bool], call: str) -> None:
        """Waits until the queue is open and `is_ready()` is true, or until there is an error to raise."""

        def is_over() -> bool:
            return self._state in (_State.FAILED, _State.STOPPED) or (self._state is _State.OPEN and is_ready())

        if not is_over():
            with self.awaited(self._lock):
                # With a limit: a Ctrl-C between Python's last look for signals and an endless wait would have no effect.
                while not self._change.wait_for(is_over, _LOOK_S):
                    pass
        self._raise_first_error()
        if self._state is _State.STOPPED:
            raise stopped(call)

    def _raise_first_error(self) -> None:
        if self._state is _State.FAILED:
            self._state = _State.OPEN
        error, self._error = self._error, None
        if error is not None:
            raise error


def _cancelled_by(cause: BaseException | None) -> CancelledError:
    error = CancelledError(
        "a scheduled step",
        f"it was cancelled because another step failed first: {type(cause).__name__}: {cause}",
        "call coordinator.schedule(step, ...) again after coordinator.join() has raised that error",
    )
    error.__cause__ = cause
    return error


def stopped(call: str) -> CancelledError:
    """Returns the error of a call, or of a step, after the queue was stopped."""
    return CancelledError(
        call,
        "the coordinator was stopped, which cancels all unfinished steps.",
        "call coordinator.join() before strategy.close(), or create another strategy and coordinator",
    )


def _to_numpy(nest: PyTree) -> PyTree:
    """Converts arrays and numbers in dicts, tuples and lists to NumPy. Other objects stay unchanged."""
    if isinstance(nest, dict):
        return {key: _to_numpy(value) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(_to_numpy, nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map(_to_numpy, nest))
    if isinstance(nest, int | float | complex) or hasattr(nest, "__array__"):
        return np.asarray(nest)[()]
    return nest
