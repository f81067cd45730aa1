# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of bounded staleness: when each update is applied.

The staleness of an update is the number of other updates that were applied since its worker pulled the values. An update waits
while it would make the staleness of a running step exceed the bound. Updates that cannot wait longer are applied as one, with
the mean of their gradients. With a bound of 0, these are the updates of all workers, which is synchronous training.

Source: stale synchronous parallel, Ho et al. 2013 (NeurIPS), with a bound on updates instead of iterations.
"""

from collections import Counter
from collections.abc import Iterable

from phalanx._src.parameter_server.remote.plans import Push, Pusher


class Clock:
    """Counts updates and decides which are next. Calls must not overlap.

    Args:
      max_staleness: largest staleness, in updates. None for no bound.

    Attributes:
      version: number of applied updates.
      staleness: histogram, from staleness to number of steps.

    Example:
      >>> clock = Clock(max_staleness=0)
      >>> a, b = Pusher(0, 0), Pusher(1, 0)
      >>> clock.enter([a, b])
      >>> clock.push(Push(a, 0, pulled=0)), clock.ready()
      (None, [])
      >>> clock.push(Push(b, 0, pulled=0)), len(clock.ready()), clock.version
      (None, 2, 1)
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        self._bound = max_staleness
        self.version = 0
        self.staleness: Counter[int] = Counter()
        # Per active worker, the version that it pulled for its running step. None if it has not pulled yet.
        self._computing: dict[Pusher, int | None] = {}
        self._pending: list[Push] = []

    def enter(self, pushers: Iterable[Pusher]) -> None:
        """Registers workers whose next step the clock must wait for."""
        for pusher in pushers:
            self._computing.setdefault(pusher, None)

    def leave(self, pusher: Pusher) -> None:
        """Removes a worker until it pulls again. Its pending pushes stay."""
        self._computing.pop(pusher, None)

    def release(self, pusher: Pusher) -> None:
        """Records that the running step of a worker is over: it was applied, or it will not push."""
        if pusher in self._computing:
            self._computing[pusher] = None

    def forget(self, pusher: Pusher) -> None:
        """Removes a lost worker, and drops its pending pushes."""
        self.leave(pusher)
        self._pending = [p for p in self._pending if p.pusher != pusher]

    def clear(self) -> None:
        """Drops all pending pushes."""
        self._pending.clear()

    def pull(self, pusher: Pusher) -> int:
        """Registers that a worker pulls now, and returns the version of the values."""
        self._computing[pusher] = self.version
        return self.version

    def push(self, push: Push) -> None:
        """Adds a pending push."""
        self._pending.append(push)

    def ready(self) -> list[Push]:
        """Removes and returns the pushes to apply next, as one update. Returns an empty list if all must wait."""
        if not self._pending:
            return []
        if self._bound is None:
            chosen = self._pending[:1]
        else:
            waiting = {p.pusher for p in self._pending}
            # A worker that has not pulled yet will get the current version.
            pulled = [self.version if v is None else v for p, v in self._computing.items() if p not in waiting]
            # The next update would make the step of one of these workers too stale, so it waits for that worker.
            if any(self.version + 1 - v > self._bound for v in pulled):
                return []
            # A push that is as stale as the bound allows must be part of the next update. Without any, the oldest goes alone.
            oldest = min(p.pulled for p in self._pending)
            last = [p for p in self._pending if self.version - p.pulled >= self._bound]
            chosen = last or [next(p for p in self._pending if p.pulled == oldest)]
        # By identity: pushes hold arrays, and `==` of these is not a bool.
        self._pending = [p for p in self._pending if not any(p is c for c in chosen)]
        self.staleness.update(self.version - p.pulled for p in chosen)
        for push in chosen:
            self.release(push.pusher)
        self.version += 1
        return chosen
