# SPDX-License-Identifier: Apache-2.0
"""The scheduler, its queue and one supervisor per worker, with workers that are simulated, for `benchmarks.scale`.

Everything in `phalanx.coordinator` is real. Only Ray, the parameter servers and the workers are simulated: a call of a worker
takes the time of its steps, and no time of the processor.
"""

import resource
import time
from collections.abc import Sequence
from typing import Any, cast

from phalanx._src.parameter_server.processes.calls import Calls, Sign
from phalanx._src.parameter_server.processes.ray import load_ray
from phalanx._src.parameter_server.remote.plans import StepCall, StepReport
from phalanx._src.parameter_server.scheduling.scheduler import Scheduler
from phalanx._src.parameter_server.variables.ledger import Ledger


def measure(workers: int, closures: int, rounds: int, fetches: int, step_s: float) -> dict[str, float]:
    """In a child: schedules steps that read no variable.

    Args:
      workers: number of simulated workers.
      closures: number of steps without duration.
      rounds: number of steps per worker with a duration of `step_s`.
      fetches: number of steps without duration whose value is fetched before the next step is scheduled.
      step_s: duration of a step, in seconds.

    Returns:
      Seconds, seconds of the processor, and bytes.
    """
    import phalanx

    cluster = _Cluster(workers)
    bytes_before, began_s = _peak_bytes(), time.perf_counter()
    homes = cast(Any, _Homes(_Servers()))
    scheduler = Scheduler(phalanx.get_strategy(), homes, cast(Any, cluster), timeout_s=60.0, waits=False)
    start_s = time.perf_counter() - began_s
    scheduler.schedule(_step, (), {}).get()  # Traces it.
    bytes_each = (_peak_bytes() - bytes_before) / workers

    took_s, cpu_s = _timed(scheduler, closures)
    fetch_s, _ = _fetched(scheduler, fetches)
    cluster.step_s = step_s
    busy_s, busy_cpu_s = _timed(scheduler, rounds * workers)
    scheduler.stop()
    return {
        "start_s": start_s,
        "bytes_each": bytes_each,
        "closures_per_s": closures / took_s,
        "cpu_s_each": cpu_s / closures,
        "fetch_s": fetch_s / fetches,
        "busy_share": rounds * step_s / busy_s,
        "busy_cpu_s_each": busy_cpu_s / (rounds * workers),
    }


def _step() -> None:
    pass


def _timed(scheduler: Scheduler, count: int) -> tuple[float, float]:
    began_s, cpu_before_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        scheduler.schedule(_step, (), {})
    scheduler.join()
    return time.perf_counter() - began_s, time.process_time() - cpu_before_s


def _fetched(scheduler: Scheduler, count: int) -> tuple[float, float]:
    began_s, cpu_before_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        scheduler.schedule(_step, (), {}).fetch()
    return time.perf_counter() - began_s, time.process_time() - cpu_before_s


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _Method:
    """A method of a simulated worker, with Ray's way to call it. A reference is the result and the time that it takes."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *args: Any) -> tuple[Any, float]:
        return self._function(*args)


class _Worker:
    """A simulated worker."""

    def __init__(self, cluster: "_Cluster") -> None:
        self._cluster = cluster
        self.ping, self.run = _Method(self._ping), _Method(self._run)

    def _ping(self) -> tuple[Sign, float]:
        return Sign("cpu", 0, "simulated"), 0.0

    def _run(self, tasks: Sequence[StepCall]) -> tuple[StepReport, float]:
        return StepReport([(0, []) for _ in tasks]), len(tasks) * self._cluster.step_s


class _Cluster:
    """Starts simulated workers. Their steps take `step_s` seconds."""

    def __init__(self, workers: int) -> None:
        self.workers, self.step_s = workers, 0.0

    def actor(self, *_: Any, **__: Any) -> _Worker:
        return _Worker(self)


class _Ray:
    """Waits for simulated workers."""

    exceptions = load_ray().exceptions

    def get(self, references: Sequence[tuple[Any, float]], timeout: float) -> list[Any]:
        if duration_s := max(seconds for _, seconds in references):
            time.sleep(duration_s)
        return [result for result, _ in references]


class _Servers:
    """Stands for parameter servers. Steps without variables need none."""

    def __init__(self) -> None:
        self.calls = Calls(cast(Any, _Ray()))
        self.peers: list[Any] = []
        self.actors: list[Any] = []

    def tell(self, *_: Any) -> None:
        """Does nothing."""


class _Homes:
    """Stands for the placement of variables, of which there are none."""

    def __init__(self, servers: _Servers) -> None:
        self.servers, self.ledger, self.updates = servers, Ledger(0), _Updates()

    def note_step(self) -> None:
        """Does nothing."""

    def take_in(self, variables: Sequence[Any]) -> None:
        """Checks that there are none."""
        assert not variables


class _Updates:
    """Stands for the updates of optimizers, of which there are none."""

    def clips(self, update: Any) -> bool:
        return False
