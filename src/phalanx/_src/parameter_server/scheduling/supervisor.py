# SPDX-License-Identifier: Apache-2.0
"""Supervises one worker: gives it steps, and the steps of a lost worker to others."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from phalanx._src.parameter_server.remote.plans import Pushed, StepCall
from phalanx._src.parameter_server.remote.worker import Worker
from phalanx._src.parameter_server.scheduling.queue import Closure, ClosureQueue
from phalanx._src.parameter_server.scheduling.replaceable_worker import ReplaceableWorker, WorkerLost, WorkerState
from phalanx._src.parameter_server.scheduling.steps import ScheduledStep, StepCache, name_of
from phalanx._src.parameter_server.scheduling.values import PerWorkerValues
from phalanx._src.tracing.records import Recording
from phalanx.errors import WorkerLostError
from phalanx.typing import PyTree

MOST_LOSSES = 3
"""Number of workers that may be lost in a row with one step or dataset, before the step or dataset fails."""

_AT_ONCE_S = 0.2
_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Work:
    """One call of a scheduled step.

    Args:
      step: the step.
      fn: the function of the step.
      inputs: the arrays among the arguments.
      resources: the per-worker datasets and values among the arguments.
      recording: what the thread records that has scheduled the step.
      losses: one message per worker that was lost while it ran this call, alone or with others.
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
      worker: the worker.
      workers: number of workers that share the queue.
      queue: the queue from which the worker gets its steps.
      steps: the programs of the steps.
      waits: whether an update waits for the updates of other workers, as it does if staleness is bounded.

    Attributes:
      worker: the worker.
      num_steps: number of finished steps.
      num_again: number of steps that had to be given to another worker.
    """

    def __init__(
        self, worker: ReplaceableWorker, workers: int, queue: ClosureQueue, steps: StepCache, *, waits: bool
    ) -> None:
        self.worker, self._workers, self._queue, self._steps, self._waits = worker, workers, queue, steps, waits
        self.num_steps = self.num_again = 0
        self._step_s = _AT_ONCE_S
        index = worker.pusher.worker
        self._thread = threading.Thread(target=self._serve, name=f"phalanx-worker-{index}", daemon=True)

    def begin(self) -> None:
        """Starts the thread that gives the worker its steps."""
        self.worker.state = WorkerState.WORKING
        self._thread.start()

    def _serve(self) -> None:
        while self._serve_some():
            pass

    def _serve_some(self) -> bool:
        """Gives the worker its next steps. Returns whether there may be more.

        A separate function, so that no local variable keeps arrays of a step alive while the thread waits for the next
        one.
        """
        closure = self._queue.get(self.worker.rest)
        if closure is None:
            return False
        closures = [closure]
        try:
            self.worker.replace()
            # Not before the worker runs: while it starts, other workers can take these steps.
            closures += self._queue.get_more(self._share(closure.work))
            while closures:
                self._some(closures)
        except WorkerLost as e:
            self._lose(closures, e)
        except Exception as e:
            self._queue.fail(closures[0], e)
            self._put_back(closures[1:])  # The first error has cancelled them, so that no worker runs them.
        self._try_to_replace()
        return True

    def _share(self, work: Work) -> int:
        """Returns how many more steps to send at once: few enough to leave work for others and to return soon."""
        # A step that was running when a worker was lost runs alone, so that no other one is blamed for it.
        if self._waits or work.losses:
            return 0
        fair = len(self._queue) // (2 * self._workers)
        return max(0, min(fair, int(_AT_ONCE_S / self._step_s), _MOST_AT_ONCE) - 1)

    def _lose(self, closures: list[Closure], why: WorkerLost) -> None:
        """Puts the steps of a lost worker back into the queue. Fails the first step if it has cost too many workers."""
        self.num_again += len(closures)
        for closure in closures:
            closure.work.losses.append(str(why))
        losses = closures[0].work.losses
        if len(losses) >= MOST_LOSSES:
            closure = closures.pop(0)
            self._queue.fail(closure, lost_again(_described(closure.work), losses))
        self._put_back(closures)

    def _some(self, closures: list[Closure]) -> None:
        """Runs as many steps as the worker can in one call, and removes their closures from the list.

        Raises:
          WorkerLost: the worker could not run any of them.
          Exception: the error of the next step.
        """
        tasks = []
        for closure in closures:
            work: Work = closure.work
            self.worker.make(work.resources)
            tasks.append(
                StepCall(
                    work.step.number,
                    work.inputs,
                    tuple(r.name for r in work.resources),
                    self._steps.seeds(work.step) if work.step.seeds else (),
                )
            )
        began = time.perf_counter()
        report = self.worker.call(Worker.run, tasks)
        if report.results:
            # Never zero: the time divides the number of steps to send at once.
            self._step_s = max(1e-4, (time.perf_counter() - began) / len(report.results))
        for variant, arrays in report.results:
            self._finish(closures, variant, arrays)
        if report.unknown is not None:
            self._teach(closures[0].work, report.unknown)
        elif report.error is not None:
            raise report.error
        elif report.has_lost_server or report.is_fenced:
            self._reconnect(closures, report.pushed)

    def _finish(self, closures: list[Closure], variant: int, arrays: Sequence[Any]) -> None:
        work = closures[0].work
        self._queue.finish(closures[0], work.step.finish(variant, arrays, work.recording))
        self.num_steps += 1
        del closures[0]  # In place: if a later call fails, the caller puts back what is left.

    def _teach(self, work: Work, specs: PyTree) -> None:
        program = self._steps.program(work.step, work.fn, specs, work.recording)
        self.worker.call(Worker.learn, work.step.number, specs, program)

    def _reconnect(self, closures: list[Closure], pushed: Pushed | None) -> None:
        """Reconnects the worker after the loss of a parameter server.

        Args:
          closures: the steps that were not finished.
          pushed: a push of the first of them without an answer.
        """
        last_push = self.worker.renew()
        # Only the answer was lost: the step must not run again. `renew` has dropped a push that was still undecided.
        if pushed is not None and last_push >= pushed.number:
            self._finish(closures, pushed.variant, pushed.arrays)
        self.worker.meet()

    def _try_to_replace(self) -> None:
        """Starts another worker if this one is lost, while no step waits for it. If all starts fail, the next step tries again."""
        with suppress(Exception):
            for _ in range(MOST_LOSSES):
                with suppress(WorkerLost):
                    if not self._queue.is_stopped:
                        self.worker.replace()
                    return

    def _put_back(self, closures: Sequence[Closure]) -> None:
        # Each goes to the head of the queue, so that the last one put back runs first.
        for closure in reversed(closures):
            self._queue.put_back(closure)


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
