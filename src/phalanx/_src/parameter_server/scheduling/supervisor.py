# SPDX-License-Identifier: Apache-2.0
"""Supervises one worker: gives it steps, and replaces it when it is lost.

STARTING ──it answers──> WORKING ──it dies or is silent──> LOST ──another worker starts──> STARTING
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

from phalanx._src.parameter_server.processes.calls import Lost, Peer, Reply, Stalled
from phalanx._src.parameter_server.processes.ray import RayCluster, load_ray
from phalanx._src.parameter_server.remote.plans import Pusher, StepCall
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx._src.parameter_server.remote.worker import Worker
from phalanx._src.parameter_server.scheduling.queue import Closure, ClosureQueue
from phalanx._src.parameter_server.scheduling.steps import ScheduledStep, StepCache, name_of
from phalanx._src.parameter_server.scheduling.values import PerWorkerIterator, PerWorkerValues
from phalanx._src.parameter_server.variables.client import Servers, not_started
from phalanx._src.tracing.records import Recording
from phalanx.errors import InvalidArgumentError, ServerLostError, WorkerLostError, shown
from phalanx.typing import PyTree

R = TypeVar("R")
P = ParamSpec("P")

_log = logging.getLogger("phalanx")

_START_S = 3600.0
MOST_LOSSES = 3
"""Number of workers that may be lost in a row with one step or dataset, before the step or dataset fails."""

_AT_ONCE_S = 0.2
_MOST_AT_ONCE = 64


class WorkerState(Enum):
    """The states of a worker."""

    STARTING = "starting"
    WORKING = "working"
    LOST = "lost"


class WorkerLost(Exception):
    """The worker died or stopped responding. Another worker may run its steps."""


@dataclass(frozen=True)
class Work:
    """One call of a scheduled step.

    Args:
      step: the step.
      fn: the function of the step.
      inputs: the arrays among the arguments.
      resources: the per-worker datasets and values among the arguments.
      recording: what the thread records that has scheduled the step.
      losses: one message per worker that was lost while it ran this call.
    """

    step: ScheduledStep
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    resources: list[PerWorkerValues]
    recording: Recording
    losses: list[str] = field(default_factory=list)


class Supervisor:
    """Supervises one worker.

    Args:
      index: index of the worker.
      cluster: the processes of the strategy, in which a replacement of a lost worker starts.
      servers: the parameter servers.
      queue: the queue from which the worker gets its steps.
      steps: the programs of the steps.
      timeout_s: time in seconds that the worker may stay silent, or may take for one call.
      waits: whether an update waits for the updates of other workers, as it does if staleness is bounded.

    Attributes:
      state: the state of the worker.
      num_steps: number of finished steps.
      num_lost: number of workers with this index that were lost.
      num_again: number of steps that had to be given to another worker.
    """

    def __init__(
        self,
        index: int,
        cluster: RayCluster,
        servers: Servers,
        queue: ClosureQueue,
        steps: StepCache,
        *,
        timeout_s: float,
        waits: bool,
    ) -> None:
        self._ray, self._cluster, self._servers, self._queue, self._steps = load_ray(), cluster, servers, queue, steps
        self._timeout_s, self._waits = timeout_s, waits
        self.pusher = Pusher(index, servers.next_life(index))
        self.state, self.num_steps, self.num_lost, self.num_again = WorkerState.STARTING, 0, 0, 0
        self._made: dict[int, Any] = {}
        self._dropped: list[int] = []
        self._making = threading.RLock()
        self._left: Reply[None] | None = None
        self._step_s = _AT_ONCE_S
        self._peer = self._start()
        self._thread = threading.Thread(target=self._serve, name=f"phalanx-worker-{index}", daemon=True)

    def platform(self) -> str:
        """Returns the JAX platform of the worker, for example "cpu". Waits until the worker has started.

        Raises:
          StartupError: the worker exited during its start.
        """
        try:
            (sign,) = self._servers.calls.answers([self._peer.ask(Worker.ping)])
        except Lost as e:
            raise not_started(e) from e
        return str(sign.platform)

    def begin(self) -> None:
        """Starts the thread that gives the worker its steps."""
        self.state = WorkerState.WORKING
        self._thread.start()

    def rest(self) -> None:
        """Tells the servers not to wait for updates of this worker. Has an effect only if staleness is bounded."""
        if self._waits and self._left is None:
            self._left = self._servers.peers[0].ask(ParameterServer.leave, self.pusher)

    def wake(self) -> None:
        """Tells the servers to expect updates of this worker again."""
        if self._left is not None:
            self._servers.answers([self._left])
            self._servers.tell(ParameterServer.enter, [self.pusher])
            self._left = None

    def specs(self, resources: Sequence[PerWorkerValues]) -> PyTree:
        """Returns the shapes of the next batch of each resource. May be called in any thread.

        Raises:
          WorkerLost: the worker is lost.
          WorkerLostError: the dataset of the worker makes no progress.
        """
        self.replace()
        self._make(resources)
        return tuple(self._call(Worker.specs, [r.name for r in resources]))

    def value(self, resource: PerWorkerValues) -> Any:
        """Returns a per-worker value of this worker. May be called in any thread."""
        self._make([resource])
        return self._call(Worker.value, resource.name)

    def drop(self, name: int) -> None:
        """Marks a resource as no longer needed."""
        # Called by a finalizer, which may run in any thread and must not wait for the worker.
        self._dropped.append(name)

    def _serve(self) -> None:
        while self._serve_some():
            pass

    def _serve_some(self) -> bool:
        """Gives the worker its next steps. Returns whether there may be more.

        A separate function, so that no local variable keeps arrays of a step alive while the thread waits for the next
        one.
        """
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
        """Returns how many more steps to send at once: few enough to leave work for others and to return soon."""
        if self._waits:
            return 0
        fair = len(self._queue) // (2 * self._cluster.workers)
        return max(0, min(fair, int(_AT_ONCE_S / self._step_s), _MOST_AT_ONCE) - 1)

    def _do(self, closures: list[Closure]) -> None:
        """Runs all steps on the worker and removes their closures from the list."""
        while closures:
            self._some(closures)

    def _lose(self, closures: Sequence[Closure], why: WorkerLost) -> None:
        """Puts the steps of a lost worker back into the queue. Fails the first step if it has cost too many workers."""
        self.num_again += len(closures)
        losses = closures[0].work.losses
        losses.append(str(why))
        if len(losses) < MOST_LOSSES:
            self._put_back(closures)
        else:
            self._queue.fail(closures[0], lost_again(_described(closures[0].work), losses))
            self._put_back(closures[1:])

    def _some(self, closures: list[Closure]) -> None:
        """Runs as many steps as the worker can in one call, and removes their closures from the list.

        Raises:
          WorkerLost: the worker could not run any of them.
          Exception: the error of the next step.
        """
        tasks = []
        for closure in closures:
            work: Work = closure.work
            self._make(work.resources)
            tasks.append(
                StepCall(
                    work.step.number,
                    work.inputs,
                    tuple(r.name for r in work.resources),
                    self._steps.seeds(work.step) if work.step.seeds else (),
                )
            )
        began = time.perf_counter()
        report = self._call(Worker.run, tasks)
        if report.results:
            # Never zero: the time divides the number of steps to send at once.
            self._step_s = max(1e-4, (time.perf_counter() - began) / len(report.results))
        for variant, arrays in report.results:
            work = closures[0].work
            self._queue.finish(closures[0], work.step.finish(variant, arrays, work.recording))
            self.num_steps += 1
            del closures[0]
        if report.unknown is not None:
            self._teach(closures[0].work, report.unknown)
        elif report.error is not None:
            raise report.error
        elif report.has_lost_server or report.is_fenced:
            self._go_on()

    def _teach(self, work: Work, specs: PyTree) -> None:
        program = self._steps.program(work.step, work.fn, specs, work.recording)
        self._call(Worker.learn, work.step.number, specs, program)

    def _go_on(self) -> None:
        """Reconnects the worker after the loss of a parameter server, as a new pusher on the current servers."""
        self._servers.recover([self.pusher])
        self._enter()
        self._call(Worker.meet, self.pusher, self._servers.actors)

    def _enter(self) -> None:
        # The servers reject what the old worker still sends: its steps are given to another one.
        old, self.pusher = self.pusher, Pusher(self.pusher.worker, self.pusher.life + 1)
        self._servers.forget(old)
        self._servers.tell(ParameterServer.enter, [self.pusher])
        self._left = None

    def _try_to_replace(self) -> None:
        """Starts another worker if this one is lost. If the start fails, the next step tries again."""
        if not self._queue.is_stopped:
            with suppress(Exception):
                self.replace()

    def replace(self) -> None:
        """Starts another worker if this one is lost, and waits until it has started. May be called in any thread.

        Raises:
          WorkerLost: the new worker is lost too.
          ServerLostError: a parameter server is lost too.
        """
        with self._making:
            if self.state is not WorkerState.LOST:
                return
            self._cluster.end(self._peer.actor)
            self._enter()
            # A new process has no datasets and values yet. `_make` sends them again.
            self._made = {}
            self.state = WorkerState.STARTING
            self._peer = self._start()
            self._call(Worker.ping)
            self.state = WorkerState.WORKING

    def _start(self) -> Peer[Worker]:
        index = self.pusher.worker
        # `run` and `make` occupy one thread each. `ping`, `specs` and `value` need threads that are free.
        actor = self._cluster.actor(Worker, "worker", index, self.pusher, self._servers.actors, threads=8)
        return Peer(self._ray, actor, f"worker {index}", self._timeout_s, _START_S)

    def _make(self, resources: Sequence[PerWorkerValues]) -> None:
        with self._making:
            for resource in resources:
                if resource.name not in self._made:
                    self._make_one(resource)
                    self._made[resource.name] = True
            if dropped := [name for name in self._dropped if self._made.pop(name, None)]:
                self._dropped = [n for n in self._dropped if n not in dropped]
                self._call(Worker.drop, dropped)

    def _make_one(self, resource: PerWorkerValues) -> None:
        try:
            described = f"`{name_of(resource.given)}`"
            self._call(
                Worker.make,
                resource.name,
                self._sent(resource),
                described[:80],
                isinstance(resource, PerWorkerIterator),
            )
        except self._ray.exceptions.RaySystemError as e:
            reason = str(e).strip().splitlines()[-1]
            raise InvalidArgumentError(
                _asked(resource),
                f"worker {self.pusher.worker} cannot load it: {reason}",
                "define it in the script itself, or install its module on the machines of the workers",
            ) from e

    def _sent(self, resource: PerWorkerValues) -> Any:
        """Returns a Ray reference to the function that creates a resource."""
        try:
            return self._ray.put(resource.fn)
        except Exception as e:  # Pickling may raise any error. Ray adds a description of what cannot be pickled.
            raise InvalidArgumentError(
                _asked(resource),
                f"it cannot be pickled: {e.__cause__ or e}",
                "pass a function that creates it on the worker, and opens files and locks there",
            ) from e

    def _call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method of the worker and waits for its result.

        Raises:
          WorkerLost: the worker died or stopped responding.
          WorkerLostError: the worker responds, but the call makes no progress.
          ServerLostError: a parameter server, for which the worker may be waiting, stopped responding.
        """
        peer, servers = self._peer, self._servers
        reply = peer.ask(method, *args, **kwargs)
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
                        f"worker_timeout_s={2 * self._timeout_s:.0f} or more if it needs the time; "
                        "otherwise look for an infinite loop, or for something that the function waits for",
                    ) from e
                raise WorkerLost(f"{e} while it ran `{method.__name__}`") from e

    def _require_servers(self, peer: Peer[Worker]) -> None:
        """Restarts silent servers. If that fails, gives up the worker, which may wait for the servers forever."""
        try:
            self._servers.recover([])
        except ServerLostError:
            self._note_loss(peer, None)
            raise

    def _note_loss(self, peer: Peer[Worker], why: Lost | None) -> None:
        with self._making:
            # Several threads call the worker. Each notices the loss, and one of them may have replaced it already.
            if peer is not self._peer or self.state is WorkerState.LOST:
                return
            self.state = WorkerState.LOST
            if why is not None and not self._queue.is_stopped:
                self.num_lost += 1
                _log.warning(
                    "worker:%d was lost. A new worker starts in its place and runs its steps again.",
                    self.pusher.worker,
                )

    def _put_back(self, closures: Sequence[Closure]) -> None:
        # Each goes to the head of the queue, so that the last one put back runs first.
        for closure in reversed(closures):
            self._queue.put_back(closure)


def _asked(resource: PerWorkerValues) -> str:
    return f"the per-worker dataset or value {shown(resource.given, 80)}"


def _described(work: Work) -> str:
    resources = " and ".join(f"`{name_of(r.given)}`" for r in work.resources)
    return f"a scheduled step of `{name_of(work.fn)}`" + (f" with {resources}" if resources else "")


def lost_again(call: str, losses: Sequence[str]) -> WorkerLostError:
    """Returns the error for a step or dataset with which every worker was lost."""
    return WorkerLostError(
        call,
        f"{len(losses)} workers in a row were lost with it. The last one: {losses[-1]}.",
        "call the function in this process to see why it fails; add memory if a worker was killed for lack of it",
    )
