# SPDX-License-Identifier: Apache-2.0
"""The thread that gives one worker its steps, and replaces it when it is lost.

STARTING ──it answers──> WORKING ──dies, or is silent──> LOST ──another is started──> STARTING
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from phalanx.coordinator.queue import Closure, ClosureQueue
from phalanx.coordinator.steps import Step, Steps
from phalanx.coordinator.values import PerWorkerIterator, PerWorkerValues
from phalanx.errors import InvalidArgumentError
from phalanx.parameters.plans import Pusher, Report, Task
from phalanx.parameters.worker import Worker
from phalanx.runtime.ray import load_ray
from phalanx.strategies.parameter_server import ParameterServerStrategy

_log = logging.getLogger("phalanx")

_START_S = 3600.0
_AT_ONCE_S = 0.2
_MOST_AT_ONCE = 64


class State(Enum):
    """Of a worker."""

    STARTING = "starting"
    WORKING = "working"
    LOST = "lost"


@dataclass(frozen=True)
class Work:
    """A scheduled step.

    Args:
      step: which.
      fn: the function.
      inputs: its arrays.
      resources: the workers' own datasets and values among its arguments.
    """

    step: Step
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    resources: list[PerWorkerValues]


class WorkerLost(Exception):
    """The worker has died, or gives no sign of life."""


class Supervisor:
    """Supervises one worker.

    Args:
      index: its number.
      strategy: whose worker it is.
      queue: where its steps come from.
      steps: their programs.

    Attributes:
      state: of the worker.
      num_steps: how many steps were done.
      num_lost: how many workers of this number were lost.
    """

    def __init__(self, index: int, strategy: ParameterServerStrategy, queue: ClosureQueue) -> None:
        self._ray, self._strategy, self._queue = load_ray(), strategy, queue
        self._steps: Steps | None = None
        self.pusher = Pusher(index, 0)
        self.state, self.num_steps, self.num_lost, self.num_again = State.STARTING, 0, 0, 0
        self._made: dict[int, Any] = {}
        self._dropped: list[int] = []
        self._making = threading.RLock()
        self._left: Any = None
        self._step_s = _AT_ONCE_S
        self._actor = self._start()
        self._thread = threading.Thread(target=self._serve, name=f"phalanx-worker-{index}", daemon=True)

    def platform(self) -> str:
        """Returns on what the worker computes, as soon as it has started."""
        return str(self._wait(self._actor.ping.remote(), _START_S))

    def begin(self, steps: Steps) -> None:
        """Starts to give the worker its steps."""
        self._steps, self.state = steps, State.WORKING
        self._thread.start()

    def rest(self) -> None:
        """Hears that no step is to be expected of the worker: where updates wait for each other's, none waits for its."""
        if self._strategy.max_staleness is not None and self._left is None:
            self._left = self._strategy.homes.servers[0].leave.remote(self.pusher)

    def wake(self) -> None:
        """Hears that steps are to be expected again."""
        if self._left is not None:
            self._strategy.homes.answers([self._left])
            self._strategy.homes.tell("enter", [self.pusher])
            self._left = None

    def specs(self, resources: Sequence[PerWorkerValues]) -> Any:
        """Returns the shapes of the next batches of some resources; in any thread.

        Raises:
          WorkerLost: it is not there.
        """
        self._make(resources)
        return tuple(self._call("specs", [r.name for r in resources]))

    def value(self, resource: PerWorkerValues) -> Any:
        """Returns a value of the worker's own; in any thread."""
        self._make([resource])
        return self._call("value", resource.name)

    def drop(self, name: int) -> None:
        """Hears that a resource is not needed any more."""
        self._dropped.append(name)

    def _serve(self) -> None:
        while self._serve_some():
            pass

    def _serve_some(self) -> bool:
        """Gives the worker its next steps; returns whether there may be more. Between two calls nothing is held of them."""
        closure = self._queue.get(self.rest)
        if closure is None:
            return False
        actor, closures = self._actor, [closure, *self._queue.get_more(self._share())]
        try:
            self._do(closures)
        except WorkerLost:
            self._try_to_replace(actor)
        return True

    def _share(self) -> int:
        """Returns how many more steps to take at once: few enough for the others to have work, and for results to come soon."""
        if self._strategy.max_staleness is not None:
            return 0
        fair = len(self._queue) // (2 * self._strategy.cluster.workers)
        return max(0, min(fair, int(_AT_ONCE_S / self._step_s), _MOST_AT_ONCE) - 1)

    def _do(self, closures: list[Closure]) -> None:
        """Has steps done, and ends their closures."""
        left = list(closures)
        try:
            while left:
                self._some(left)
        except WorkerLost:
            self.num_again += len(left)
            self._put_back(left)
            raise
        except Exception as e:
            self._queue.fail(left[0], e)
            self._put_back(left[1:])

    def _some(self, closures: list[Closure]) -> None:
        """Has as many steps done as the worker can, and takes these closures out of the list.

        Raises:
          WorkerLost: it cannot any.
          Exception: what the next step raises.
        """
        assert self._steps is not None
        tasks = []
        for closure in closures:
            work: Work = closure.work
            self._make(work.resources)
            tasks.append(
                Task(
                    work.step.number,
                    work.inputs,
                    tuple(r.name for r in work.resources),
                    self._steps.seeds(work.step) if work.step.seeds else (),
                )
            )
        began = time.perf_counter()
        report: Report = self._call("run", tasks)
        if report.results:
            self._step_s = max(1e-4, (time.perf_counter() - began) / len(report.results))
        for closure, (variant, arrays) in zip(closures, report.results, strict=False):
            self._queue.finish(closure, closure.work.step.outputs[variant].join(arrays, []))
        self.num_steps += len(report.results)
        del closures[: len(report.results)]
        if report.unknown is not None:
            self._teach(closures[0].work, report.unknown)
        elif report.error is not None:
            raise report.error
        elif report.has_lost_server or report.is_fenced:
            self._go_on()

    def _teach(self, work: Work, specs: Any) -> None:
        assert self._steps is not None
        program = self._steps.program(work.step, work.fn, specs)
        self._call("learn", work.step.number, specs, program)

    def _go_on(self) -> None:
        """Goes on after a parameter server was lost: with those that are there now, as another pusher."""
        homes = self._strategy.homes
        homes.recover([self.pusher])
        self._enter()
        self._call("meet", self.pusher, homes.servers)

    def _enter(self) -> None:
        homes = self._strategy.homes
        old, self.pusher = self.pusher, Pusher(self.pusher.worker, self.pusher.life + 1)
        homes.forget(old)
        homes.tell("enter", [self.pusher])
        self._left = None

    def _try_to_replace(self, actor: Any) -> None:
        """Starts another worker; where that fails, the next step fails."""
        if self._queue.is_stopped:
            return
        try:
            self.replace(actor)
        except Exception as e:
            closure = self._queue.get(self.rest)
            if closure is not None:
                self._queue.fail(closure, e)

    def replace(self, actor: Any = None) -> None:
        """Starts another worker in the place of one that is lost, for as long as it takes; in any thread.

        Raises:
          ServerLostError: a parameter server is lost too.
        """
        with self._making:
            if actor is not None and actor is not self._actor:
                return
            self.state, self.num_lost = State.LOST, self.num_lost + 1
            _log.warning(
                "worker:%d was lost. Another is started in its place, and its steps are done again.", self.pusher.worker
            )
            self._strategy.cluster.end(self._actor)
            self._enter()
            self._made = {}
            self.state = State.STARTING
            self._actor = self._start()
            with suppress(WorkerLost):  # The next step that it is given finds out.
                self._wait(self._actor.ping.remote(), _START_S)
                self.state = State.WORKING

    def _start(self) -> Any:
        cluster = self._strategy.cluster
        return cluster.actor(Worker, "worker", self.pusher.worker, self.pusher, self._strategy.homes.servers, threads=3)

    def _make(self, resources: Sequence[PerWorkerValues]) -> None:
        with self._making:
            for resource in resources:
                if resource.name not in self._made:
                    self._make_one(resource)
                    self._made[resource.name] = True
            if dropped := [name for name in self._dropped if self._made.pop(name, None)]:
                self._dropped = [n for n in self._dropped if n not in dropped]
                self._call("drop", dropped)

    def _make_one(self, resource: PerWorkerValues) -> None:
        try:
            self._call("make", resource.name, self._sent(resource), isinstance(resource, PerWorkerIterator))
        except self._ray.exceptions.RaySystemError as e:
            found = str(e).strip().splitlines()[-1]
            raise InvalidArgumentError(
                _asked(resource),
                f"worker {self.pusher.worker} cannot load it: {found}",
                "define it in the script itself, or install its module where the workers run",
            ) from e

    def _sent(self, resource: PerWorkerValues) -> Any:
        """Returns what makes a resource on its way to the worker."""
        try:
            return self._ray.put(resource.fn)
        except Exception as e:  # Whatever pickling raises, with Ray's account of what was found where.
            raise InvalidArgumentError(
                _asked(resource),
                f"it cannot be pickled: {e.__cause__ or e}",
                "a function that makes it on the worker, and opens files, locks and the like there",
            ) from e

    def _call(self, method: str, *args: Any) -> Any:
        """Calls a method of the worker, and waits for as long as it gives a sign of life."""
        reply = getattr(self._actor, method).remote(*args)
        while True:
            done, _ = self._ray.wait([reply], timeout=self._strategy.worker_timeout_s)
            if done:
                return self._wait(reply, None)
            self._wait(self._actor.ping.remote(), self._strategy.worker_timeout_s)

    def _wait(self, reply: Any, timeout_s: float | None) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reply, timeout=timeout_s)
        except (exceptions.RayActorError, exceptions.GetTimeoutError) as e:
            raise WorkerLost from e
        except exceptions.RayTaskError as e:
            raise _cause_of(e, self.pusher.worker) from None

    def _put_back(self, closures: Sequence[Closure]) -> None:
        for closure in reversed(closures):
            self._queue.put_back(closure)


def _asked(resource: PerWorkerValues) -> str:
    return f"a worker's dataset or value of {resource.given!r:.80}"


def _cause_of(error: Any, worker: int) -> BaseException:
    """Returns what was raised on a worker, with the traceback from there."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        return error  # type: ignore[no-any-return]
    cause.add_note(f"On worker {worker}:\n{error}")
    return cause
