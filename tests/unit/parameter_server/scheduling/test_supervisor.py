"""Supervises a worker whose replacements start late or never, without a cluster."""

import threading
from types import SimpleNamespace

import pytest

from phalanx._src.parameter_server.remote.plans import Pusher, StepReport
from phalanx._src.parameter_server.scheduling.queue import Closure, ClosureQueue
from phalanx._src.parameter_server.scheduling.replaceable_worker import WorkerLost, WorkerState
from phalanx._src.parameter_server.scheduling.supervisor import MOST_LOSSES, Supervisor, Work
from phalanx.errors import WorkerLostError

DEADLINE_S = 300.0


class WorkerOfALostMachine:
    """It dies in its first step. So does the first worker in its place, and the second starts when the machine is back."""

    def __init__(self):
        self.pusher, self.state, self.starts = Pusher(1, 0), WorkerState.STARTING, 0
        self.waits, self.is_back = threading.Event(), threading.Event()

    def rest(self):
        pass

    def make(self, resources):
        pass

    def call(self, method, *args):
        self.state = WorkerState.LOST
        raise WorkerLost("it has died")

    def replace(self):
        if self.state is WorkerState.LOST:
            self.starts += 1
            if self.starts == 1:
                raise WorkerLost("its machine is lost")
            self.waits.set()
            self.is_back.wait(DEADLINE_S)


def test_steps_do_not_wait_for_a_worker_whose_machine_is_lost():
    """The other workers run them, also if a second replacement has to start because the first was lost too."""
    worker, queue = WorkerOfALostMachine(), ClosureQueue()
    supervisor = Supervisor(worker, 2, queue, steps=SimpleNamespace(), waits=False)
    step = SimpleNamespace(number=0, seeds=())
    queue.put(Closure(Work(step, len, (), [], None)))
    supervisor.begin()
    try:
        assert worker.waits.wait(DEADLINE_S)
        assert (len(queue), queue.num_in_flight) == (1, 0)
    finally:
        queue.stop()
        worker.is_back.set()


class WorkerThatOneStepKills:
    """Each call with that step among its tasks ends it. A replacement starts at once."""

    def __init__(self, killer):
        self.pusher, self.state, self.killer = Pusher(1, 0), WorkerState.STARTING, killer

    def rest(self):
        pass

    def make(self, resources):
        pass

    def replace(self):
        pass

    def call(self, method, tasks):
        if any(task.step == self.killer for task in tasks):
            raise WorkerLost("it has died")
        return StepReport([(0, [])] * len(tasks))


def test_only_the_step_that_ends_its_workers_fails():
    """Although many are sent at once, and it is not the first of them."""
    worker, queue = WorkerThatOneStepKills(9), ClosureQueue()
    supervisor = Supervisor(worker, 1, queue, steps=SimpleNamespace(), waits=False)
    supervisor._step_s = 1e-4
    closures = []
    for number in range(20):
        step = SimpleNamespace(number=number, seeds=(), finish=lambda *_: None)
        closures.append(Closure(Work(step, lambda: None, (), [], None)))
        queue.put(closures[-1])
    supervisor.begin()
    with pytest.raises(WorkerLostError, match="3 workers in a row were lost with it"):
        queue.join()
    queue.stop()
    losses = [len(closure.work.losses) for closure in closures]
    assert losses.index(max(losses)) == 9
    assert sorted(losses)[-2:] == [1, MOST_LOSSES]
    assert supervisor.num_steps >= 9
