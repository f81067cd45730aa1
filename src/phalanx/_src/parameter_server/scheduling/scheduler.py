# SPDX-License-Identifier: Apache-2.0
"""The workers of a strategy, and the queue of their steps."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from phalanx._src.parameter_server.processes.ray import RayCluster
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx._src.parameter_server.scheduling.progress import Status
from phalanx._src.parameter_server.scheduling.queue import Closure, ClosureQueue, RemoteValue, stopped
from phalanx._src.parameter_server.scheduling.replaceable_worker import ReplaceableWorker, WorkerLost, WorkerState
from phalanx._src.parameter_server.scheduling.steps import StepCache, name_of
from phalanx._src.parameter_server.scheduling.supervisor import MOST_LOSSES, Supervisor, Work, lost_again
from phalanx._src.parameter_server.scheduling.values import PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from phalanx._src.parameter_server.variables.homes import Homes
from phalanx._src.tracing.records import current_recording
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx._src.typed_jax import shape_dtype
from phalanx.typing import PyTree


class Scheduler:
    """Starts the workers of a strategy and gives them steps until it is stopped.

    Args:
      strategy: the strategy under which steps are traced.
      homes: the placement of the strategy's variables on parameter servers.
      cluster: the processes in which the workers run.
      timeout_s: time in seconds that a worker may stay silent, or may take for one step.
      waits: whether an update waits for the updates of other workers, as it does if staleness is bounded.

    Raises:
      StartupError: a worker exited during its start.
    """

    def __init__(
        self, strategy: AbstractStrategy, homes: Homes, cluster: RayCluster, *, timeout_s: float, waits: bool
    ) -> None:
        self._homes, self._servers, self._names = homes, homes.servers, itertools.count()
        self._queue = ClosureQueue(wake=self._wake if waits else None)
        self._steps = StepCache(strategy, homes, lambda: self._platforms)  # Known once the workers have started.
        self._workers = [
            ReplaceableWorker(i, cluster, homes.servers, timeout_s=timeout_s, waits=waits, queue=self._queue)
            for i in range(cluster.workers)
        ]
        self._supervisors = [
            Supervisor(worker, cluster.workers, self._queue, self._steps, waits=waits) for worker in self._workers
        ]
        # Waits until all workers have started.
        self._platforms = sorted({worker.platform() for worker in self._workers})
        # Before any step runs: with bounded staleness, an update waits for the workers that have entered.
        self._servers.tell(ParameterServer.enter, [worker.pusher for worker in self._workers])
        for supervisor in self._supervisors:
            supervisor.begin()
        # At exit, finalizers run from newest to oldest, so the queue stops before the cluster ends.
        self._stop = weakref.finalize(strategy, self._queue.stop)

    def stop(self) -> None:
        """Cancels all steps. The threads of the workers end when the steps in flight have ended."""
        self._stop()

    def run(self, fn: Callable[..., Any], args: PyTree, kwargs: PyTree) -> PyTree:
        """Runs a replica function on some worker and returns its return value."""
        return self.schedule(fn, args, kwargs, is_run=True).get()

    def schedule(self, fn: Callable[..., Any], args: PyTree, kwargs: PyTree, *, is_run: bool = False) -> RemoteValue:
        """Puts a step into the queue.

        Args:
          fn: the function, or with `is_run` the replica function for `Strategy.run`.
          args: its arguments.
          kwargs: its keyword arguments.
          is_run: whether `fn` is a replica function.

        Returns:
          The value that the step will return.
        """
        # Tracing asks the servers, which have ended if the queue is stopped.
        if self._queue.is_stopped:
            raise stopped("coordinator.schedule(...)")
        recording = current_recording()
        step, inputs, resources = self._steps.step(fn, args, kwargs, recording, is_run=is_run)
        if not step.programs:
            # Traced in the thread of the caller, because Keras keeps settings such as the dtype policy per thread.
            self._steps.program(step, fn, self._specs(resources), recording)
        closure = Closure(Work(step, fn, inputs, resources, recording))
        self._homes.note_step()
        self._queue.put(closure)
        return closure.outcome

    def join(self) -> None:
        """Waits until no step is queued or in flight. Raises the first error of a step."""
        self._queue.join()

    def done(self) -> bool:
        """Returns whether no step is queued or in flight. Raises the first error of a step."""
        return self._queue.done()

    def dataset(self, source: object, make: Callable[[], Any]) -> PerWorkerDataset:
        """Returns a dataset that each worker creates with `make()`. Messages name it after `source`."""
        return PerWorkerDataset(lambda: PerWorkerIterator(next(self._names), source, make, self._drop), self.spec_of)

    def values(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Returns the value that `fn()` returns on each worker."""
        return PerWorkerValues(next(self._names), fn, fn, self._drop)

    def status(self) -> Status:
        """Returns the current progress of the steps."""
        # The first server decides about each update, so its numbers are those of all servers.
        ((updates, staleness, _),) = self._servers.ask(ParameterServer.statistics, (0,))
        return Status(
            workers=len(self._workers),
            alive=sum(worker.state is WorkerState.WORKING for worker in self._workers),
            queued=len(self._queue),
            in_flight=self._queue.num_in_flight,
            done=self.num_done,
            again=sum(s.num_again for s in self._supervisors),
            updates=updates,
            staleness=dict(sorted(staleness.items())),
        )

    @property
    def num_done(self) -> int:
        """The number of finished steps."""
        return sum(s.num_steps for s in self._supervisors)

    def spec_of(self, resource: PerWorkerValues) -> PyTree:
        """Returns a pytree of the shapes and dtypes of some worker's next batch, which stays in the dataset."""
        (((tree, leaves),),) = self._specs([resource])
        return tree.unflatten([shape_dtype(x.shape, x.dtype) for x in leaves])

    def _specs(self, resources: Sequence[PerWorkerValues]) -> PyTree:
        if not resources:
            return ()
        losses: list[str] = []
        while True:
            # A worker that is lost would have to be replaced first.
            for worker in sorted(self._workers, key=lambda each: each.state is not WorkerState.WORKING):
                try:
                    return worker.specs(resources)
                except WorkerLost as e:
                    losses.append(str(e))
                    if len(losses) == MOST_LOSSES:
                        names = ", ".join(f"`{name_of(r.given)}`" for r in resources)
                        raise lost_again(f"per-worker datasets and values {names}", losses) from e

    def _wake(self) -> None:
        for worker in self._workers:
            worker.wake()

    def _drop(self, name: int) -> None:
        for worker in self._workers:
            worker.drop(name)
