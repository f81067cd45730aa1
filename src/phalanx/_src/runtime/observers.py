# SPDX-License-Identifier: Apache-2.0
"""The one way to see what this process runs: steps, programs, their parts, and waits for batches. Uses the standard library only.

Profiles, benchmarks, predictions, summaries and preemption handlers observe. Without an observer of an event, it costs one look.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final


class Observer:
    """Observes what this process runs. A subclass overrides the methods of the events that it needs."""

    def before_step(self, arguments: Any) -> None:
        """Called before each step of a custom loop, with all its arguments."""

    def before_program(self, call: Any) -> None:
        """Called before each compiled program runs, with its `programs.program.Call`."""

    def after_own_part(self, replica: int, rows: int) -> None:
        """Called when a replica of this process has computed all that it can without other replicas.

        Called while the program runs, in any thread, and only by programs that are traced while the observer is there.

        Args:
          replica: the number of the replica.
          rows: the number of rows of its batch.
        """

    def after_replica_step(self, replica: int) -> None:
        """Called when a step of a replica of this process has ended. See `after_own_part`."""

    def after_wait(self, began_s: float, ended_s: float) -> None:
        """Called when a batch has arrived for which the process waited.

        Args:
          began_s: start of the wait in seconds, in `time.monotonic`.
          ended_s: its end.
        """


@final
class Observers:
    """The observers of this process, by event.

    Attributes:
      of_steps: those of the beginning of a step.
      of_programs: those of the beginning of a program.
      of_replicas: those of the parts of a replica's step.
      of_waits: those of waits.
    """

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self._sort()

    def _sort(self) -> None:
        # New tuples, so that observers can come and go while an event is reported.
        self.of_steps = self._overriding("before_step")
        self.of_programs = self._overriding("before_program")
        self.of_replicas = self._overriding("after_own_part", "after_replica_step")
        self.of_waits = self._overriding("after_wait")

    def _overriding(self, *names: str) -> tuple[Observer, ...]:
        return tuple(
            x for x in self._all if any(getattr(type(x), name) is not getattr(Observer, name) for name in names)
        )

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._all)

    def add(self, observer: Observer) -> None:
        """Reports events to an observer from now on."""
        self._all = (*self._all, observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Reports no more events to an observer."""
        self._all = tuple(x for x in self._all if x is not observer)
        self._sort()

    @contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        """Returns a context in which events are reported to an observer."""
        self.add(observer)
        try:
            yield
        finally:
            self.remove(observer)


observers = Observers()
"""The observers of this process."""
