# SPDX-License-Identifier: Apache-2.0
"""The thread that gives one worker its steps, and replaces it when it is lost.

STARTING ──it answers──> WORKING ──dies, or is silent──> LOST ──another is started──> STARTING
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from phalanx.coordinator.queue import Closure, ClosureQueue
from phalanx.coordinator.steps import Step, Steps, name_of
from phalanx.coordinator.values import PerWorkerIterator, PerWorkerValues
from phalanx.errors import InvalidArgumentError, ServerLostError, WorkerLostError, shown
from phalanx.servers.calls import Lost, Peer, Stalled
from phalanx.servers.client import not_started
from phalanx.servers.ray import load_ray
from phalanx.servers.remote.plans import Pusher, Report, Task
from phalanx.servers.remote.worker import Worker
from phalanx.strategies.parameter_server import ParameterServerStrategy

_log = logging.getLogger("phalanx")

_START_S = 3600.0
MOST_LOSSES = 3
"""How many workers in a row may be lost with one step, or one dataset."""

_AT_ONCE_S = 0.2
_MOST_AT_ONCE = 64


class State(Enum):
    """Of a worker."""

    STARTING = "starting"
    WORKING = "working"
    LOST = "lost"


class WorkerLost(Exception):
    """The worker has died, or gives no sign of life: what it was to do may be given to another one."""


@dataclass(frozen=True)
class Work:
    """A scheduled step.

    Args:
      step: which.
      fn: the function.
      inputs: its arrays.
      resources: the workers' own datasets and values among its arguments.
      losses: how each worker was lost that was at it.
    """

    step: Step
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    resources: list[PerWorkerValues]
    losses: list[str] = field(default_factory=list)


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
        self._peer = self._start()
        self._thread = threading.Thread(target=self._serve, name=f"phalanx-worker-{index}", daemon=True)

    def platform(self) -> str:
        """Returns on what the worker computes, as soon as it has started.

        Raises:
          StartupError: it has ended instead.
        """
        try:
            (sign,) = self._strategy.homes.servers.calls.answers([self._peer.ask("ping")])
        except Lost as e:
            raise not_started(e) from e
        return str(sign.platform)

    def begin(self, steps: Steps) -> None:
        """Starts to give the worker its steps."""
        self._steps, self.state = steps, State.WORKING
        self._thread.start()

    def rest(self) -> None:
        """Hears that no step is to be expected of the worker: where updates wait for each other's, none waits for its."""
        if self._strategy.max_staleness is not None and self._left is None:
            self._left = self._strategy.homes.servers.peers[0].ask("leave", self.pusher)

    def wake(self) -> None:
        """Hears that steps are to be expected again."""
        if self._left is not None:
            self._strategy.homes.servers.answers([self._left])
            self._strategy.homes.servers.tell("enter", [self.pusher])
            self._left = None

    def specs(self, resources: Sequence[PerWorkerValues]) -> Any:
        """Returns the shapes of the next batches of some resources; in any thread.

        Raises:
          WorkerLost: it is not there.
          WorkerLostError: its dataset does not get on.
        """
        self.replace()
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
        closures = [closure]
        try:
            self.replace()
            closures += self._queue.get_more(self._share())
            self._do(closures)
        except WorkerLost as e:
            self._lose(closures, e)
        except Exception as e:
            self._queue.fail(closures[0], e)
            self._put_back(closures[1:])
        self._try_to_replace()
        return True

    def _share(self) -> int:
        """Returns how many more steps to take at once: few enough for the others to have work, and for results to come soon."""
        if self._strategy.max_staleness is not None:
            return 0
        fair = len(self._queue) // (2 * self._strategy.cluster.workers)
        return max(0, min(fair, int(_AT_ONCE_S / self._step_s), _MOST_AT_ONCE) - 1)

    def _do(self, closures: list[Closure]) -> None:
        """Has steps done, and takes their closures out of the list."""
        while closures:
            self._some(closures)

    def _lose(self, closures: Sequence[Closure], why: WorkerLost) -> None:
        """Gives the steps of a worker that was lost to others, unless too many were lost with the first one."""
        self.num_again += len(closures)
        losses = closures[0].work.losses
        losses.append(str(why))
        if len(losses) < MOST_LOSSES:
            self._put_back(closures)
        else:
            self._queue.fail(closures[0], lost_again(_described(closures[0].work), losses))
            self._put_back(closures[1:])

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
        servers = self._strategy.homes.servers
        servers.recover([self.pusher])
        self._enter()
        self._call("meet", self.pusher, servers.actors)

    def _enter(self) -> None:
        servers = self._strategy.homes.servers
        old, self.pusher = self.pusher, Pusher(self.pusher.worker, self.pusher.life + 1)
        servers.forget(old)
        servers.tell("enter", [self.pusher])
        self._left = None

    def _try_to_replace(self) -> None:
        """Starts another worker if this one is lost; if that fails, the next step tries again."""
        if not self._queue.is_stopped:
            with suppress(Exception):
                self.replace()

    def replace(self) -> None:
        """Starts another worker if this one is lost, for as long as it takes; in any thread.

        Raises:
          WorkerLost: the other one is lost too.
          ServerLostError: a parameter server is lost too.
        """
        with self._making:
            if self.state is not State.LOST:
                return
            self._strategy.cluster.end(self._peer.actor)
            self._enter()
            self._made = {}
            self.state = State.STARTING
            self._peer = self._start()
            self._call("ping")
            self.state = State.WORKING

    def _start(self) -> Peer:
        strategy, index = self._strategy, self.pusher.worker
        # One thread for `run`, one for `make`, and the others for `ping`, `specs` and `value`.
        actor = strategy.cluster.actor(Worker, "worker", index, self.pusher, strategy.homes.servers.actors, threads=8)
        return Peer(self._ray, actor, f"worker {index}", strategy.worker_timeout_s, _START_S)

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
            described = f"`{name_of(resource.given)}`"
            self._call(
                "make", resource.name, self._sent(resource), described[:80], isinstance(resource, PerWorkerIterator)
            )
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
        """Calls a method of the worker, and waits for it.

        Raises:
          WorkerLost: the worker has died, or gives no sign of life.
          WorkerLostError: it is alive, and does not get on.
          ServerLostError: a parameter server, for which it may wait, gives no sign of life.
        """
        peer, servers = self._peer, self._strategy.homes.servers
        reply = peer.ask(method, *args)
        while True:
            try:
                (answer,) = servers.calls.answers([reply], servers.peers)
                return answer
            except Lost as e:
                if e.peer is not peer:
                    self._require_servers(peer)
                    continue
                self._note_loss(peer, e)
                if isinstance(e, Stalled):
                    raise WorkerLostError(
                        str(peer),
                        f"it {e.found}.",
                        f"worker_timeout_s={2 * self._strategy.worker_timeout_s:.0f}, or more, if it takes so long; "
                        "else look for a loop that does not end, or for what the function waits for",
                    ) from e
                raise WorkerLost(f"{e} while it was at `{method}`") from e

    def _require_servers(self, peer: Peer) -> None:
        """Restarts servers that are silent; if that cannot be, the worker may wait for them for ever, and is given up."""
        try:
            self._strategy.homes.servers.recover([])
        except ServerLostError:
            self._note_loss(peer, None)
            raise

    def _note_loss(self, peer: Peer, why: Lost | None) -> None:
        with self._making:
            if peer is not self._peer or self.state is State.LOST:
                return
            self.state = State.LOST
            if why is not None and not self._queue.is_stopped:
                self.num_lost += 1
                _log.warning(
                    "worker:%d was lost. Another is started in its place, and its steps are done again.",
                    self.pusher.worker,
                )

    def _put_back(self, closures: Sequence[Closure]) -> None:
        for closure in reversed(closures):
            self._queue.put_back(closure)


def _asked(resource: PerWorkerValues) -> str:
    return f"a worker's dataset or value of {shown(resource.given, 80)}"


def _described(work: Work) -> str:
    resources = " and ".join(f"`{name_of(r.given)}`" for r in work.resources)
    return f"a scheduled step of `{name_of(work.fn)}`" + (f" with {resources}" if resources else "")


def lost_again(asked: str, losses: Sequence[str]) -> WorkerLostError:
    """Returns the error of what takes every worker along that tries it."""
    return WorkerLostError(
        asked,
        f"{len(losses)} workers in a row were lost with it; the last: {losses[-1]}.",
        "call the dataset function in this process, to see what ends it; more memory if a worker was killed for want of it",
    )
