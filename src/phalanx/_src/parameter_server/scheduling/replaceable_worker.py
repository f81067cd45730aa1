# SPDX-License-Identifier: Apache-2.0
"""The process of a worker, and the one that takes its place when it is lost.

STARTING ──it answers──> WORKING ──it dies or is silent──> LOST ──another worker starts──> STARTING
"""

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar, final

from phalanx._src.parameter_server.processes.calls import Lost, Peer, Reply, Stalled
from phalanx._src.parameter_server.processes.ray import RayCluster, load_ray
from phalanx._src.parameter_server.remote.plans import Pusher
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx._src.parameter_server.remote.worker import Worker
from phalanx._src.parameter_server.scheduling.queue import ClosureQueue
from phalanx._src.parameter_server.scheduling.steps import name_of
from phalanx._src.parameter_server.scheduling.values import PerWorkerIterator, PerWorkerValues
from phalanx._src.parameter_server.variables.client import Servers, not_started
from phalanx.errors import InvalidArgumentError, ServerLostError, WorkerLostError, shown
from phalanx.typing import PyTree

R = TypeVar("R")
P = ParamSpec("P")

_log = logging.getLogger("phalanx")

_START_S = 3600.0
"""Time in seconds that a worker may take to start."""


class WorkerState(Enum):
    """The states of a worker."""

    STARTING = "starting"
    WORKING = "working"
    LOST = "lost"


class WorkerLost(Exception):
    """The worker died or stopped responding. Another worker may run its steps."""


@final
class ReplaceableWorker:
    """One worker, with its datasets and values. May be called in any thread.

    Args:
      index: index of the worker.
      cluster: the processes of the strategy, in which a replacement of a lost worker starts.
      servers: the parameter servers.
      timeout_s: time in seconds that the worker may stay silent, or may take for one call.
      waits: whether an update waits for the updates of other workers, as it does if staleness is bounded.
      queue: the queue of steps. Once it is stopped, a loss is no news.

    Attributes:
      pusher: names the worker on the servers.
      state: the state of the worker.
    """

    def __init__(
        self, index: int, cluster: RayCluster, servers: Servers, *, timeout_s: float, waits: bool, queue: ClosureQueue
    ) -> None:
        self._ray, self._cluster, self._servers = load_ray(), cluster, servers
        self._timeout_s, self._waits, self._queue = timeout_s, waits, queue
        self.pusher = Pusher(index, servers.next_life(index))
        self.state = WorkerState.STARTING
        self._made: dict[int, Any] = {}
        self._dropped: list[int] = []
        self._making = threading.RLock()  # A call inside may note the loss of the worker.
        self._left: Reply[None] | None = None
        self._peer = self._start()

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

    def rest(self) -> None:
        """Tells the servers not to wait for updates of this worker. Has an effect only if staleness is bounded."""
        if self._waits and self._left is None:
            # The queue holds its lock during this call, so it does not wait for the answer.
            self._left = self._servers.peers[0].ask(ParameterServer.leave, self.pusher)

    def wake(self) -> None:
        """Tells the servers to expect updates of this worker again."""
        if self._left is not None:
            # A server runs calls in several threads, so `enter` could overtake a `leave` without an answer.
            self._servers.answers([self._left])
            self._servers.tell(ParameterServer.enter, [self.pusher])
            self._left = None

    def specs(self, resources: Sequence[PerWorkerValues]) -> PyTree:
        """Returns the shapes of the next batch of each resource.

        Raises:
          WorkerLost: the worker is lost.
          WorkerLostError: the dataset of the worker makes no progress.
        """
        self.replace()
        self.make(resources)
        return tuple(self.call(Worker.specs, [r.name for r in resources]))

    def drop(self, name: int) -> None:
        """Marks a resource as no longer needed."""
        # Called by a finalizer, which may run in any thread and must not wait for the worker.
        self._dropped.append(name)

    def renew(self) -> int:
        """Makes the worker a new pusher on the current servers, after the loss of one.

        Returns:
          The number of the last push of the old pusher that was applied; -1 if there was none.
        """
        old = self.pusher
        self._servers.recover([old])
        self._enter()
        # The servers have forgotten the old pusher, so none of its pushes is applied from now on, and the number is final.
        return self._servers.ask(ParameterServer.last_push, (0, old))[0]

    def meet(self) -> None:
        """Connects the worker with the current servers. Raises what `call` raises."""
        self.call(Worker.meet, self.pusher, self._servers.actors)

    def _enter(self) -> None:
        # The servers reject what the old worker still sends: its steps are given to another one.
        old, self.pusher = self.pusher, Pusher(self.pusher.worker, self.pusher.life + 1)
        self._servers.forget(old)
        self._servers.tell(ParameterServer.enter, [self.pusher])
        self._left = None

    def replace(self) -> None:
        """Starts another worker if this one is lost, and waits until it has started. May be called in any thread.

        Raises:
          WorkerLost: the new worker is lost too.
          ServerLostError: a parameter server is lost too.
        """
        with self._making:
            if self.state is not WorkerState.LOST:
                return
            self._cluster.end(self._peer.actor)  # A silent worker may still be running.
            self._enter()
            # A new process has no datasets and values yet. `_make` sends them again.
            self._made = {}
            self.state = WorkerState.STARTING
            self._peer = self._start()
            # Only a process that answers is counted as alive.
            self.call(Worker.ping)
            self.state = WorkerState.WORKING

    def _start(self) -> Peer[Worker]:
        index = self.pusher.worker
        # `run` and `make` occupy one thread each. `ping`, `specs` and `value` need threads that are free.
        actor = self._cluster.actor(Worker, "worker", index, self.pusher, self._servers.actors, threads=8)
        return Peer(self._ray, actor, f"worker {index}", self._timeout_s, _START_S)

    def make(self, resources: Sequence[PerWorkerValues]) -> None:
        """Creates datasets and values on the worker, unless it has them, and deletes those that are no longer needed."""
        with self._making:
            for resource in resources:
                if resource.name not in self._made:
                    self._make_one(resource)
                    self._made[resource.name] = True
            if dropped := [name for name in self._dropped if self._made.pop(name, None)]:
                self._dropped = [n for n in self._dropped if n not in dropped]
                self.call(Worker.drop, dropped)

    def _make_one(self, resource: PerWorkerValues) -> None:
        try:
            described = f"`{name_of(resource.given)}`"
            self.call(
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
                f"define it in the script itself, or {self._cluster.import_hint}",
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

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
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
                _log.warning(
                    "worker:%d was lost. A new worker starts in its place and runs its steps again.", self.pusher.worker
                )


def _asked(resource: PerWorkerValues) -> str:
    return f"the per-worker dataset or value {shown(resource.given, 80)}"
