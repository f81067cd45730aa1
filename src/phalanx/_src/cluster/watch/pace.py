# SPDX-License-Identifier: Apache-2.0
"""The pace of the processes of a cluster: how long their steps take, and for which process the others wait.

All processes leave a step together, so the one that needs the most time until its next step comes last, and the others wait for it
there. Each process measures this time by its own clock, and sends some of its measurements to rank 0. Uses the standard library only.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

REPORT = "PHALANX_REPORT"
"""The environment variable with which `phalanx run --report` asks rank 0 for a table of the step times at the end."""

# A report is sent once per second. Rank 0 reads those of all processes.
_PER_REPORT = 16
_KEPT = 4096
_PENDING = 1024
# A wait must exceed both, or it counts as noise: seconds, and a share of the time from step to step.
_LEAST_S = 0.001
_SHARE = 0.05

Sample = tuple[int, int, float, float]
"""Number of the step, and of the collective operation; the time to it from the one before, and if it is a step, from the step before; in seconds."""


@dataclass(frozen=True)
class StepTimes:
    """The times of the steps of one process of a cluster.

    Attributes:
      rank: its rank.
      median_s: median of the time from one step to the next, in seconds.
      p99_s: 99th percentile of this time, in seconds.
      waited_for: share of the steps at which the others waited for this process, from 0 to 1.
      waited_s: how long they waited then on average, in seconds.
    """

    rank: int
    median_s: float
    p99_s: float
    waited_for: float
    waited_s: float


@final
class Stopwatch:
    """Measures the collective operations of this process. Times are those of `time.monotonic`.

    Attributes:
      last_s: duration of the last operation that has ended, in seconds. 0 before the first.

    Example:
      >>> watch = Stopwatch()
      >>> for step, began_s in enumerate([1.0, 2.0, 4.0]):
      ...     watch.begin(step, step, began_s, is_step=True)
      ...     watch.end(began_s + 0.5)
      >>> watch.take()
      [(1, 1, 0.5, 1.0), (2, 2, 1.5, 2.0)]
    """

    def __init__(self) -> None:
        self._began_s = self.last_s = 0.0
        self._ended_s: float | None = None
        self._step_s: float | None = None
        self._samples: deque[Sample] = deque(maxlen=_KEPT)

    def begin(self, step: int, turn: int, now_s: float, *, is_step: bool) -> None:
        """Notes that an operation begins, in which all processes wait for each other."""
        if self._ended_s is not None:
            # 0 stands for the first step, and for an operation that is not a step.
            cycle_s = now_s - self._step_s if is_step and self._step_s is not None else 0.0
            self._samples.append((step, turn, now_s - self._ended_s, cycle_s))
        self._began_s = now_s
        if is_step:
            self._step_s = now_s

    def end(self, now_s: float) -> None:
        """Notes that the operation has ended."""
        self._ended_s, self.last_s = now_s, now_s - self._began_s

    def cancel(self) -> None:
        """Notes that the operation has failed, so that nothing is known about the time around it."""
        self._ended_s = self._step_s = None

    def take(self) -> list[Sample]:
        """Returns the samples since the last call, thinned out by steps, which other processes of the same pace do in the same way."""
        # The main thread may append more samples during this loop.
        samples = [self._samples.popleft() for _ in range(len(self._samples))]
        every = 1
        while len(samples) > every * _PER_REPORT:
            # Powers of two: of two processes that keep different shares, one keeps all steps of the other.
            every *= 2
        return [sample for sample in samples if _scattered(sample[0]) < (1 << 32) // every]


def _scattered(step: int) -> int:
    """Returns a number of 32 bits, so that a choice of steps by it meets what happens at every fourth step as often as it should."""
    return step * 0x9E3779B1 & 0xFFFFFFFF  # The golden ratio times 2**32.


@final
class Paces:
    """The measurements of all processes, on rank 0.

    Args:
      size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self._cycles: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(size)]
        self._pending: dict[int, dict[int, float]] = {}
        self._waits, self._waited_s = [0] * size, [0.0] * size
        self._compared = 0

    def hear(self, rank: int, samples: Sequence[Sequence[float]]) -> None:
        """Notes samples of a process."""
        for _, turn, before_s, cycle_s in samples:
            if cycle_s:
                self._cycles[rank].append(cycle_s)
            arrivals = self._pending.setdefault(int(turn), {})
            arrivals[rank] = before_s
            if len(arrivals) == len(self._cycles):
                del self._pending[int(turn)]
                self._compare(arrivals, cycle_s)
        while len(self._pending) > _PENDING:
            # The oldest: a process that thins out its samples more than another one never sends it.
            del self._pending[next(iter(self._pending))]

    def _compare(self, arrivals: Mapping[int, float], cycle_s: float) -> None:
        self._compared += cycle_s > 0
        last = max(arrivals, key=lambda rank: arrivals[rank])
        earlier_s = [before_s for rank, before_s in arrivals.items() if rank != last]
        waited_s = arrivals[last] - statistics.median(earlier_s) if earlier_s else 0.0
        if waited_s > max(_LEAST_S, _SHARE * cycle_s):
            self._waits[last] += 1
            self._waited_s[last] += waited_s

    def step_times(self) -> list[StepTimes]:
        """Returns the step times of all processes that have sent any, by rank."""
        times = []
        for rank, cycles in enumerate(self._cycles):
            if cycles:
                ordered, waits = sorted(cycles), self._waits[rank]
                p99_s = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
                # Waits before an exchange between two steps count too, so there may be more of them than steps.
                share = min(1.0, waits / self._compared) if self._compared else 0.0
                mean_s = self._waited_s[rank] / waits if waits else 0.0
                times.append(StepTimes(rank, statistics.median(ordered), p99_s, share, mean_s))
        return times


def table_of(times: Sequence[StepTimes], places: Mapping[int, str]) -> str:
    """Returns the step times as lines of text.

    Example:
      >>> print(table_of([StepTimes(0, 0.0123, 0.05, 0.25, 0.004)], {0: "rank 0 (127.0.0.1:4001)"}))
      process                  median ms  p99 ms  others waited for it
      rank 0 (127.0.0.1:4001)       12.3    50.0  at 25% of the steps, 4.0 ms each
    """
    width = max([len("process"), *(len(places[t.rank]) for t in times)])
    lines = [f"{'process':{width}}  median ms  p99 ms  others waited for it"]
    for t in times:
        waits = f"at {t.waited_for:.0%} of the steps, {1e3 * t.waited_s:.1f} ms each" if t.waited_for else "never"
        lines.append(f"{places[t.rank]:{width}}  {1e3 * t.median_s:9.1f}  {1e3 * t.p99_s:6.1f}  {waits}")
    return "\n".join(lines)
