# SPDX-License-Identifier: Apache-2.0
"""Two workers that are killed or stopped at random times while they do 2,000 tiny steps, round after round.

Each round is drawn from its number: how many servers, the bound of the staleness, and after which steps which worker is
killed or stopped. All steps must have been done; the counter that each of them increments must lie between their number and
that with those that were given to another worker; and no process may remain.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

from benchmarks.parent import call_in_child
from benchmarks.processes import descendants, is_alive
from benchmarks.report import Report

_STEPS, _WORKERS, _TIMEOUT_S = 2_000, 2, 2.0
_LIMIT_S, _LEFT_S = 600, 30.0
_COLUMNS = ("round", "ps", "max_staleness", "at", "how", "counter", "again", "lost", "s", "faults")


@dataclass(frozen=True)
class _Round:
    """What happens in a round.

    Args:
      number: from which all of it is drawn.
      ps: how many servers there are.
      max_staleness: the bound.
      at: after which steps something happens, one for each worker.
      how: the names of the signals that they get.
    """

    number: int
    ps: int
    max_staleness: int | None
    at: tuple[int, ...]
    how: tuple[str, ...]

    @classmethod
    def drawn(cls, number: int) -> Self:
        """Returns the round of this number."""
        rng = random.Random(number)
        at = tuple(rng.randrange(_STEPS // 2) for _ in range(_WORKERS))
        how = tuple(rng.choice(("SIGKILL", "SIGSTOP")) for _ in range(_WORKERS))
        return cls(number, rng.choice((1, 2)), rng.choice((None, None, 0, 3)), at, how)


def run(*, quick: bool, rounds: int = 30, seed: int = 0) -> Report:
    """Plays the rounds, each in a process of its own.

    Args:
      quick: three rounds.
      rounds: how many.
      seed: the number of the first one.
    """
    title = f"{_STEPS} steps while each of {_WORKERS} workers is killed or stopped once"
    report = Report("parameter_server_soak", title, _COLUMNS)
    for number in range(seed, seed + (3 if quick else rounds)):
        played = _Round.drawn(number)
        found = call_in_child("benchmarks.parameter_server_soak:play", _LIMIT_S, devices=1, **asdict(played))
        faults = "; ".join(_faults(found)) or "as it should be"
        seen = [found[name] for name in ("counter", "again", "lost", "seconds")]
        report.add([*map(str, asdict(played).values()), *seen, faults], **asdict(played), **found, faults=faults)
    return report


def _faults(found: dict[str, Any]) -> Iterator[str]:
    """Yields what was not as it should be."""
    if found["results"] != _STEPS:
        yield f"{found['results']} steps have a result"
    if not _STEPS <= found["counter"] <= _STEPS + found["again"]:
        yield f"the counter is {found['counter']}, with {found['again']} steps done again"
    if found["lost"] < 1:
        yield "nobody was lost"
    if found["left"]:
        yield f"processes are left: {found['left']}"


def play(number: int, ps: int, max_staleness: int | None, at: list[int], how: list[str]) -> dict[str, Any]:
    """In a child: does all steps, and returns what became of them."""
    import keras

    import phalanx

    began = time.monotonic()
    strategy = phalanx.ParameterServerStrategy(
        workers=_WORKERS, ps=ps, max_staleness=max_staleness, worker_timeout_s=_TIMEOUT_S
    )
    coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counters = [keras.Variable(0, dtype="int32", trainable=False, aggregation="sum") for _ in range(4)]

    def step(x: Any) -> Any:
        for counter in counters:
            counter.assign_add(1)
        return x + 1

    workers = [actor for actor in strategy.cluster.actors if actor not in strategy.homes.servers.actors]
    # Not before the strategy, which has Ray ask for a token.
    import ray

    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in workers])
    values = [coordinator.schedule(step, args=(i,)) for i in range(_STEPS)]
    for after, name, pid in sorted(zip(at, how, pids, strict=True)):
        values[after].fetch()
        os.kill(pid, signal.Signals[name])
    coordinator.join()
    results = [int(x) for x in coordinator.fetch(values)]
    status, counts = coordinator.status(), [int(c.numpy()) for c in counters]
    processes = descendants()
    strategy.close()
    return {
        "results": sum(x == i + 1 for i, x in enumerate(results)),
        # All are incremented by each step: a push that counted on one server only would show.
        "counter": counts[0] if len(set(counts)) == 1 else -1,
        "again": status.again,
        "lost": len(set(pids) - {p for p in pids if is_alive(p)}),
        "left": _left(processes),
        "seconds": time.monotonic() - began,
    }


def _left(processes: set[int]) -> list[int]:
    deadline = time.monotonic() + _LEFT_S
    while (left := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
