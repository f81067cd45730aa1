# SPDX-License-Identifier: Apache-2.0
"""The parts of a step, from the moments that each process has recorded. Uses the standard library only."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Moments:
    """The moments of the steps of one process, in seconds of a clock that all processes of the machine share.

    Args:
      rank: its rank.
      num_replicas: number of replicas of all processes.
      num_processes: number of processes that train together.
      rows: rows of a global batch. None if no argument of the step is distributed.
      calls: when programs that train were called.
      waits: intervals in which the process waited for a batch.
      own: per replica of this process, the time in each step at which it had computed all before the first communication.
      ends: per replica of this process, when each step ended.
    """

    rank: int
    num_replicas: int
    num_processes: int
    rows: int | None
    calls: list[float]
    waits: list[tuple[float, float]]
    own: dict[str, list[float]]
    ends: dict[str, list[float]]

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> "Moments":
        """Returns the moments from the contents of a JSON file."""
        return cls(**{**read, "waits": [(began_s, ended_s) for began_s, ended_s in read["waits"]]})

    @property
    def num_steps(self) -> int:
        """The number of steps that have ended on all replicas of this process."""
        return min(map(len, self.ends.values()), default=0)


@dataclass(frozen=True)
class StepParts:
    """The time of a step in seconds, and its parts, which add up to it. Means over the replicas.

    Args:
      input: waiting for a batch while no replica computes.
      host: other code of the process while no replica computes, for example callbacks.
      compute: a replica's own part of the program: all before the first communication.
      wait: waiting for the slowest replica.
      exchange: the rest: communication, and what follows it, such as the update of the weights.
    """

    input: float
    host: float
    compute: float
    wait: float
    exchange: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.input + self.host + self.compute + self.wait + self.exchange


NAMES = tuple(f.name for f in fields(StepParts))


def parts_of(processes: Sequence[Moments], first: int) -> tuple[list[StepParts], dict[int, float]]:
    """Returns the parts of the steps of all processes, and the mean delay of each rank behind the others, in seconds.

    Args:
      processes: the moments of all processes.
      first: the first step to include. There must be a step before it.
    """
    steps, late = list[StepParts](), {p.rank: list[float]() for p in processes}
    for number in range(first, min(p.num_steps for p in processes)):
        latest_s = max(times[number] for p in processes for times in p.own.values())
        parts = [_parts(p, replica, number, latest_s) for p in processes for replica in p.own]
        steps.append(StepParts(*(statistics.mean(getattr(x, name) for x in parts) for name in NAMES)))
        computed_s = {p.rank: max(times[number] for times in p.own.values()) for p in processes}
        for rank, at_s in computed_s.items():
            other_times = [x for r, x in computed_s.items() if r != rank]
            late[rank].append(at_s - statistics.mean(other_times) if other_times else 0.0)
    return steps, {rank: statistics.mean(values) for rank, values in late.items()}


def _parts(process: Moments, replica: str, number: int, latest_s: float) -> StepParts:
    own_s, ends = process.own[replica][number], process.ends[replica]
    before_s, end_s = ends[number - 1], ends[number]
    # The call may have been made while the previous step was still running, or it may cover several steps.
    call = bisect_right(process.calls, own_s) - 1
    began_s = min(max(process.calls[call] if call >= 0 else before_s, before_s), own_s)
    read_s = sum(_overlap(before_s, began_s, *wait) for wait in _within(process.waits, before_s, began_s))
    # A replica without communication may end its step before the slowest one has computed.
    wait_s = max(0.0, min(latest_s, end_s) - own_s)
    return StepParts(read_s, began_s - before_s - read_s, own_s - began_s, wait_s, max(0.0, end_s - own_s - wait_s))


def _within(waits: Sequence[tuple[float, float]], start_s: float, stop_s: float) -> Sequence[tuple[float, float]]:
    """Returns the intervals, which are in order, that may overlap with another one."""
    # An interval that began earlier may reach into this one.
    return waits[max(0, bisect_left(waits, (start_s,)) - 1) : bisect_right(waits, (stop_s,))]


def _overlap(start_s: float, stop_s: float, from_s: float, to_s: float) -> float:
    return max(0.0, min(stop_s, to_s) - max(start_s, from_s))


def in_words(processes: int, devices: int) -> str:
    """Returns numbers of processes, and of devices of each, in words."""
    each = f"{devices} device{'s' * (devices > 1)}"
    return each if processes == 1 else f"{processes} processes of {each}"


@dataclass(frozen=True)
class Result:
    """The result of one training on some devices.

    Args:
      processes: number of processes.
      devices: number of devices per process.
      replicas: number of replicas.
      steps_per_s: steps per second: the median over the rounds.
      rows_per_s: rows of the global batch per second. None if the rows are unknown.
      parts: seconds of each part of a step.
      latest: the rank that the others wait for most.
      rounds: steps per second of each round.
    """

    processes: int
    devices: int
    replicas: int
    steps_per_s: float
    rows_per_s: float | None
    parts: dict[str, float]
    latest: int
    rounds: list[float]

    @property
    def name(self) -> str:
        """The devices in words."""
        return in_words(self.processes, self.devices)

    def efficiency(self, one: "Result") -> float | None:
        """Returns the rows per second and replica, relative to another result."""
        if self.rows_per_s is None or not one.rows_per_s:
            return None
        return self.rows_per_s / self.replicas / (one.rows_per_s / one.replicas)

    @property
    def verdict(self) -> str:
        """What bounds the step, and what to try."""
        step = sum(self.parts.values())
        share = {name: seconds / step for name, seconds in self.parts.items()}
        slowest = "the slowest replica"
        if self.processes > 1:
            # The mean over the processes has the slowest one, which does not wait.
            share["wait"] *= self.processes / (self.processes - 1)
            slowest = f"rank {self.latest}"
        if self.replicas == 1:
            share["compute"] += share.pop("exchange")  # The update of the weights.
        worst = max((name for name in share if name != "compute"), key=lambda name: share[name])
        if share[worst] < _NOTABLE:
            return (
                f"bound by its computation ({share['compute']:.0%} of the step): larger batches or faster devices help."
            )
        about, advice = _ADVICE[worst]
        return f"bound by {about.format(slowest=slowest)} ({share[worst]:.0%} of the step): {advice}"

    def as_json(self) -> dict[str, Any]:
        """Returns the content of a JSON file."""
        return {**asdict(self), "name": self.name, "verdict": self.verdict}


_NOTABLE = 0.15
_ADVICE = {
    "input": (
        "its input",
        "read faster, for example from arrays or with parallel readers; fit reads a slow generator alongside the steps if you distribute its function.",
    ),
    "host": (
        "Python code between the steps",
        "steps_per_execution=16 in compile, or run_steps; fewer callbacks per batch.",
    ),
    "wait": (
        "{slowest}, for which the others wait",
        'replica_weights="auto", or find out what slows it: phalanx run --report.',
    ),
    "exchange": (
        "the exchange between replicas",
        'larger batches per replica; between machines also CommunicationOptions(compression="int8"), or local_updates=DiLoCo(every=100).',
    ),
}
