"""Elastic groups of real processes, which meet without JAX: what is reported when some are lost, and when the group is."""

import os
import signal
import sys
from dataclasses import replace

import pytest
from tests.waiting import DEADLINE_S

from phalanx._src.cluster.connections.secret import TOKEN, new_token
from phalanx._src.cluster.spec import Task
from phalanx._src.launch.elastic import group
from phalanx._src.launch.elastic.group import ElasticGroup
from phalanx._src.launch.elastic.launchers import Launchers
from phalanx._src.launch.elastic.rendezvous import Rendezvous
from phalanx._src.launch.evaluator import Patience
from phalanx._src.launch.outcome import TOO_FEW, Outcome, report
from phalanx._src.launch.output import Sink
from phalanx._src.launch.plan import ALONE, Machines, ProcessSpec, free_ports
from phalanx._src.launch.processes import WorkerProcess
from phalanx._src.launch.relay import Relay
from phalanx._src.launch.signals import Signals
from phalanx._src.launch.supervise import run_group
from phalanx.errors import StartupError

pytestmark = pytest.mark.slow


def addresses(count):
    return tuple(f"127.0.0.1:{port}" for port in free_ports(count))


MEETS = """
import os, sys, time
from phalanx._src.cluster.watch import membership
own = membership.own()
def meet(step):
    return own.meet(call=0, progress=[step])
def wait_for(count):
    while not os.path.exists(f"{os.environ['SAID']}{count}"):
        time.sleep(0.01)
meet(0)
"""


@pytest.fixture
def run(tmp_path, no_service):
    """Runs processes to the end of the group, and returns its outcome and what was said. They may wait for that."""

    def run(script, *, least, workers, patience, machines=ALONE, start=WorkerProcess, **variables):
        environment = {**os.environ, TOKEN: new_token(), "SAID": f"{tmp_path}/said", **variables}
        environment.pop("TF_CONFIG", None)
        specs = [
            ProcessSpec(Task("worker", i), (sys.executable, "-c", MEETS + script), environment) for i in range(workers)
        ]
        said = []

        def say(text):
            said.append(text)
            (tmp_path / f"said{len(said)}").touch()

        with Signals() as signals, open(os.devnull, "wb", buffering=0) as nowhere:
            relay = Relay(signals, Sink(nowhere.fileno()))
            workers = ElasticGroup(specs, least, relay, patience=patience, say=say, machines=machines, start=start)
            try:
                workers.start()
                workers.run()
            finally:
                workers.end(5.0)
        return Outcome(workers.endings(), unfinished=workers.unfinished), said

    return run


def test_report_names_the_loss_that_ended_the_group(run):
    """Not the one before it, after which the others went on."""
    outcome, said = run(
        "own.number == 1 and sys.exit(3)\n"
        "wait_for(1)\n"
        "meet(1)\n"
        "wait_for(3 if own.number == 0 else 2)\n"
        "sys.exit(4 + own.number)",
        least=1,
        workers=3,
        patience=Patience(first_pause_s=30.0),
    )
    assert outcome.exit_code == 6, said
    assert report(outcome).startswith("worker 2 failed first: it exited with code 6"), report(outcome)
    assert "worker 1 exited with code 3; the others continued" in report(outcome)
    assert "worker 0 exited with code 4\n" in report(outcome)
    assert said[:3] == [
        "worker 1 exited with code 3.",
        "Generation 2: workers 0, 2 continue.",
        "worker 2 exited with code 6.",
    ]


def test_place_stays_empty_after_failures_without_a_step(run):
    """If too few processes are left for good, the group ends with the exit code of the last one that was lost."""
    outcome, said = run(
        "own.number == 1 and sys.exit(3)\nwhile True:\n    meet(0)",
        least=2,
        workers=2,
        patience=Patience(first_pause_s=0.1, max_restarts=2),
    )
    assert outcome.exit_code == 3, said
    assert said.count("worker 1 exited with code 3.") == said.count("worker 1 starts again.") == 2
    # The rendezvous reports at the same time that too few are left.
    empty = "worker 1 exited with code 3. It has failed 3 times without a step of the group, so it is not replaced."
    assert said.count(empty) == 1
    assert said.index(empty) > max(i for i, text in enumerate(said) if text == "worker 1 starts again.")
    assert report(outcome).startswith("worker 1 failed first: it exited with code 3")


def test_accused_worker_is_ended(run):
    """The others continue without it."""
    outcome, said = run(
        "own.number == 0 and own.accuse([1], 'it stands still')\nown.number == 1 and time.sleep(60)\nmeet(1)",
        least=1,
        workers=2,
        patience=Patience(first_pause_s=30.0),
    )
    assert said[0] == "Ending worker 1: it stands still."
    assert "worker 1 was killed by SIGKILL (probably out of memory, or kill -9)." in said
    assert outcome.exit_code == 0, report(outcome)


def test_worker_without_a_place_is_told_of_the_end(run):
    """It would wait for one although the training is over."""

    class WithoutPlace(WorkerProcess):
        has_place = False

        @property
        def pid(self):
            return super().pid if self.has_place or self.spec.task.index == 0 else None

        def tell(self, number):
            self.has_place = True
            super().tell(number)

    outcome, said = run(
        "own.number == 1 and time.sleep(60)",
        least=1,
        workers=2,
        patience=Patience(first_pause_s=30.0),
        start=WithoutPlace,
    )
    assert outcome.exit_code == 0, said
    assert [(each.code, each.is_told) for each in outcome.endings] == [(0, False), (-signal.SIGTERM, True)]


def test_worker_that_ends_between_two_looks_has_finished(run, tmp_path):
    """The launcher must not count it as lost because it has not seen yet how it ended."""
    ends = tmp_path / "ends"

    class EndsAfterLook(WorkerProcess):
        @property
        def is_alive(self):
            alive = super().is_alive
            by = sys._getframe(1).f_code.co_filename
            if alive and self.spec.task.index == 0 and ends.exists() and by == group.__file__:
                ends.with_name("look").touch()
                self._process.wait(DEADLINE_S)
            return alive

    outcome, said = run(
        "import pathlib\nends = pathlib.Path(os.environ['ENDS'])\n"
        "own.number == 0 and ends.touch()\n"
        "while not ends.with_name('look').exists():\n    time.sleep(0.01)\n"
        "own.number == 1 and time.sleep(0.3)",
        least=2,
        workers=2,
        patience=Patience(first_pause_s=30.0),
        start=EndsAfterLook,
        ENDS=str(ends),
    )
    assert (outcome.exit_code, outcome.unfinished) == (0, ""), (report(outcome), said)


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(0)", TOO_FEW), ("own.finish()\nos._exit(0)", 0), ("own.close()", TOO_FEW)]
)
def test_exit_code_of_processes_that_leave_a_training(run, end, code):
    """Exit code 0 in the midst of a training run does not mean that it has finished. After it, it does."""
    outcome, said = run(f"own.begin()\n{end}", least=1, workers=2, patience=Patience(first_pause_s=30.0))
    assert outcome.exit_code == code, said
    assert outcome.unfinished == ("all workers of the last generation have ended" if code else "")


def test_worker_that_leaves_a_training_is_replaced(run):
    """As one that was killed."""
    script = (
        "own.begin()\n"
        "if own.number == 1 and not os.path.exists(os.environ['SAID'] + '2'):\n    os._exit(0)\n"
        "wait_for(2)\n"
        "own.number == 0 and meet(1)\n"
        "own.finish()"
    )
    outcome, said = run(script, least=1, workers=2, patience=Patience(first_pause_s=0.0))
    assert said[:2] == ["worker 1 exited with code 0 in the midst of the training.", "worker 1 starts again."]
    assert outcome.exit_code == 0, said


def test_launchers_of_other_numbers_are_refused(no_service):
    """Each would count other workers."""
    machines = Machines(1, addresses(2))
    environment = {**os.environ, TOKEN: new_token()}
    spec = ProcessSpec(Task("worker", 0), (sys.executable, "-c", ""), environment)
    first = replace(machines, index=0)
    rendezvous = Rendezvous(2, environment, lambda *_: None, lambda _: None, first, terms="--workers 1:4 on 2 machines")
    rendezvous.start()
    message = "it has --workers 1:4 on 2 machines, and this machine --workers 2:2 on 2 machines.\nHINT: the same --work"
    with pytest.raises(StartupError, match=message):
        run_group(lambda _: [spec], least_workers=2, machines=machines)
    rendezvous.end()


def test_signal_ends_the_wait_for_the_first_machine():
    """At once, and not after the time that the first machine has."""
    machines = Machines(1, addresses(2))
    spec = ProcessSpec(Task("worker", 0), (sys.executable, "-c", ""), {**os.environ, TOKEN: new_token()})
    said = []

    def plan(restart):
        os.kill(os.getpid(), signal.SIGTERM)
        return [spec]

    outcome = run_group(plan, least_workers=2, machines=machines, say=said.append)
    assert (outcome.exit_code, said) == (143, ["The launcher was ended by SIGTERM."])


def test_machine_that_never_comes(run):
    """The workers of this one have done nothing wrong, so the group has an exit code of its own, and a reason."""
    machines = Machines(0, addresses(2))
    patience = Patience(first_pause_s=30.0)
    outcome, said = run("", least=2, workers=1, patience=patience, machines=machines, PHALANX_START_TIMEOUT_S="0.1")
    assert outcome.exit_code == TOO_FEW, said
    why = "too few workers are left, 1 of at least 2, after 0.1 s without phalanx run on the machines of these tasks: 1"
    assert report(outcome).startswith(f"Training stopped early: {why}.\n")


def test_first_machine_that_does_not_come_back(no_service):
    """A launcher whose restart finds no first machine any more has the exit code of that, and does not try again."""
    machines = Machines(1, addresses(2))
    environment = {**os.environ, TOKEN: new_token(), "PHALANX_START_TIMEOUT_S": "0.3"}
    spec = ProcessSpec(Task("worker", 0), (sys.executable, "-c", "raise SystemExit(3)"), environment)
    first, terms = replace(machines, index=0), "--workers 2:2 on 2 machines"
    rendezvous = Rendezvous(2, environment, lambda *_: None, lambda _: None, first, terms=terms)
    rendezvous.start()

    def plan(restart):
        if restart:
            rendezvous.end()
        return [spec]

    said = []
    with open(os.devnull, "wb", buffering=0) as nowhere:
        sink = Sink(nowhere.fileno())
        outcome = run_group(plan, max_restarts=3, least_workers=2, machines=machines, sink=sink, say=said.append)
    assert outcome.exit_code == TOO_FEW, said
    assert said[-2] == "The group starts again: 1 of 3."
    assert said[-1].startswith(f"Training stopped early: the rendezvous at {machines.addresses[0]}: machine 1 could")


def test_machine_that_is_cut_off_does_not_start_again(no_service, monkeypatch):
    """It would begin a training of its own, while the others go on with theirs."""
    monkeypatch.setattr(Launchers, "are_majority", lambda *_: False)
    environment = {**os.environ, TOKEN: new_token(), "PHALANX_START_TIMEOUT_S": "0.3"}
    spec = ProcessSpec(Task("worker", 0), (sys.executable, "-c", MEETS + "time.sleep(600)"), environment)
    said = []
    with open(os.devnull, "wb", buffering=0) as nowhere:
        outcome = run_group(
            lambda _: [spec],
            max_restarts=3,
            least_workers=1,
            machines=Machines(0, addresses(2)),
            sink=Sink(nowhere.fileno()),
            say=said.append,
        )
    assert outcome.exit_code == TOO_FEW, said
    assert said[-1].startswith("Training stopped early: the machines that are left are no majority"), said
    assert not any("starts again" in text for text in said), said
