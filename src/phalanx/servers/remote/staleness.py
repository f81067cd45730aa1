# SPDX-License-Identifier: Apache-2.0
"""Which updates count when: bounded staleness, as arithmetic.

The staleness of an update is how many others were applied since its worker took the values that it was computed with. An
update waits as long as it would make that of a step that is still being computed greater than the bound. Those that
cannot wait any longer are applied as one, by the mean of their gradients: with a bound of 0 all workers' together, which is
synchronous training.

Source: stale synchronous parallel, Ho et al. 2013 (NeurIPS), with its bound on updates instead of on iterations.
"""

from collections import Counter
from collections.abc import Iterable

from phalanx.servers.remote.plans import Push, Pusher


class Clock:
    """Counts the updates, and says which is next. Calls must not overlap.

    Args:
      max_staleness: the bound; None for none.

    Attributes:
      version: how many updates were applied.
      staleness: of how many steps it was how great.

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
        self._computing: dict[Pusher, int | None] = {}
        self._pending: list[Push] = []

    def enter(self, pushers: Iterable[Pusher]) -> None:
        """Hears that a step of these workers is to be expected."""
        for pusher in pushers:
            self._computing.setdefault(pusher, None)

    def leave(self, pusher: Pusher) -> None:
        """Hears that none of this worker is, until it pulls again; what it has pushed stays."""
        self._computing.pop(pusher, None)

    def release(self, pusher: Pusher) -> None:
        """Hears that a step will not push, for it has failed."""
        if pusher in self._computing:
            self._computing[pusher] = None

    def forget(self, pusher: Pusher) -> None:
        """Hears that a worker is lost, and with it what has not been applied yet."""
        self.leave(pusher)
        self._pending = [p for p in self._pending if p.pusher != pusher]

    def clear(self) -> None:
        """Drops what has not been applied."""
        self._pending.clear()

    def pull(self, pusher: Pusher) -> int:
        """Returns the version of the values that a worker takes now."""
        self._computing[pusher] = self.version
        return self.version

    def push(self, push: Push) -> None:
        """Takes an update that is to be applied."""
        self._pending.append(push)

    def ready(self) -> list[Push]:
        """Returns what is to be applied next, as one update; nothing where all have to wait."""
        if not self._pending:
            return []
        if self._bound is None:
            chosen = self._pending[:1]
        else:
            waiting = {p.pusher for p in self._pending}
            pulled = [self.version if v is None else v for p, v in self._computing.items() if p not in waiting]
            if any(self.version + 1 - v > self._bound for v in pulled):
                return []
            oldest = min(p.pulled for p in self._pending)
            last = [p for p in self._pending if self.version - p.pulled >= self._bound]
            chosen = last or [next(p for p in self._pending if p.pulled == oldest)]
        self._pending = [p for p in self._pending if not any(p is c for c in chosen)]
        self.staleness.update(self.version - p.pulled for p in chosen)
        for push in chosen:
            self.release(push.pusher)
        self.version += 1
        return chosen
