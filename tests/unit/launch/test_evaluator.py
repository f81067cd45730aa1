"""An evaluator beside the workers: it starts again alone, learns of the end, and does not outlive the launcher."""

import re
import sys

import pytest

from phalanx._src.cluster.spec import ClusterSpec, Task, tf_config
from phalanx._src.launch.evaluator import Patience
from phalanx._src.launch.plan import ProcessSpec
from phalanx._src.launch.supervise import run_group

pytestmark = pytest.mark.slow

QUICK = Patience(first_pause_s=0.01, max_restarts=3)
# Ends once the launcher says that the training has ended.
FOLLOWS = """
from phalanx._src.cluster.processes.training import has_ended
def follow():
    while not has_ended():
        time.sleep(0.01)
    print(Path(os.environ["PHALANX_TRAINING_ENDED"]).read_text())
"""
SLEEP = "pause()\n"


def of_evaluator(source):
    """A script of which only the evaluator runs this part."""
    return FOLLOWS + "if job == 'evaluator':\n" + "".join(f"    {line}\n" for line in source.splitlines())


@pytest.mark.parametrize(
    ("limits", "pauses"),
    [(Patience(), [1, 2, 4, 8, 16, 30, 30]), (Patience(first_pause_s=0.5, longest_pause_s=1), [0.5, 1, 1])],
)
def test_pauses_double_up_to_a_limit(limits, pauses):
    """Each pause is twice the one before it."""
    assert [limits.pause_s(restart) for restart in range(1, len(pauses) + 1)] == pauses


def test_evaluator_learns_that_training_succeeded(launch):
    """It runs beside the workers until they have ended, and leaves no file; the workers are told no end."""
    source = "note('up')\nprint(has_ended(), restart, len(addresses))\nfollow()\nprint('done')\nsys.exit()"
    launched = launch(of_evaluator(source) + "wait_for('up')\nprint(has_ended())\n", evaluator=True)
    assert (launched.outcome.exit_code, launched.outcome.evaluator.code) == (0, 0)
    assert launched.lines_of(0, "evaluator") == ["False 0 2", "succeeded", "done"]
    assert launched.lines_of(0) == launched.lines_of(1) == ["None"]
    assert launched.reports == ["The workers have ended. evaluator 0 has 600 s to finish."]


def test_evaluator_that_ends_early_is_not_started_again(launch):
    """It may be done before the workers, which go on; nobody waits for it."""
    source = of_evaluator("print('once')\nnote('pid', os.getpid())\nsys.exit()")
    launched = launch(source + "wait_for_end_of('pid')\ntime.sleep(0.5)", evaluator=True, patience=QUICK)
    assert (launched.outcome.exit_code, launched.reports) == (0, [])
    assert launched.lines_of(0, "evaluator") == ["once"]


def test_evaluator_that_fails_starts_again_alone(launch):
    """The workers go on, and each failure is one line. After the training it starts again too, and finishes."""
    source = (
        "print('start', restart)\nif restart == 0:\n    sys.exit(3)\n"
        "if restart == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nnote('up')\nfollow()\nsys.exit(3 - restart)"
    )
    launched = launch(of_evaluator(source) + "print('worker', restart)\nwait_for('up')", evaluator=True, patience=QUICK)
    assert (launched.outcome.exit_code, launched.outcome.evaluator.code) == (0, 0)
    starts = ["start 0", "start 1", "start 2", "succeeded", "start 3", "succeeded"]
    assert launched.lines_of(0, "evaluator") == starts
    assert launched.lines_of(1) == ["worker 0"]
    assert launched.reports == [
        "evaluator 0 exited with code 3. It alone restarts in 0.01 s: 1 of 3.",
        "evaluator 0 was killed by SIGKILL (probably out of memory, or kill -9). It alone restarts in 0.02 s: 2 of 3.",
        "The workers have ended. evaluator 0 has 600 s to finish.",
        "evaluator 0 exited with code 1. It alone restarts in 0.04 s: 3 of 3.",
    ]


def test_evaluator_that_fails_for_good(launch):
    """The workers go on to their end; the exit code is that of the evaluator, and the reports say so."""
    source = of_evaluator("sys.exit(7)") + "wait_for('said2')\nprint('end')"
    launched = launch(source, evaluator=True, patience=Patience(first_pause_s=0.01, max_restarts=1))
    assert (launched.outcome.exit_code, launched.outcome.culprit) == (7, None)
    assert launched.lines_of(0) == launched.lines_of(1) == ["end"]
    assert launched.reports[1:] == [
        "evaluator 0 exited with code 7. It does not start again after 1 restarts.",
        "The workers have succeeded, but evaluator 0 exited with code 7.",
    ]


def test_failure_of_the_evaluator_hides_no_failure_of_a_worker(launch):
    source = of_evaluator("sys.exit(7)") + "wait_for('said1')\nsys.exit(4)"
    launched = launch(source, workers=1, evaluator=True, patience=Patience(max_restarts=0))
    assert launched.outcome.exit_code == 4
    assert launched.reports[0] == "evaluator 0 exited with code 7. It does not start again after 0 restarts."
    assert launched.reports[1].startswith("worker 0 failed first: it exited with code 4")
    assert len(launched.reports) == 2


def test_evaluator_in_a_pause_at_the_end(launch):
    """If the time is over before the next start, the failure counts."""
    source = of_evaluator("sys.exit(7)") + "wait_for('said1')"
    launched = launch(source, evaluator=True, patience=Patience(grace_s=0.1, first_pause_s=300, longest_pause_s=300))
    assert launched.outcome.exit_code == 7
    assert launched.reports[1:] == [
        "The workers have ended. evaluator 0 has 0.1 s to finish.",
        "evaluator 0 has not finished after 0.1 s.",
        "The workers have succeeded, but evaluator 0 exited with code 7.",
    ]


def test_evaluator_goes_on_while_the_group_restarts(launch):
    """It is one process for all starts of the workers."""
    source = of_evaluator("print('start')\nnote('up')\nfollow()\nsys.exit()")
    launched = launch(source + "wait_for('up')\nsys.exit(2 - restart)", evaluator=True, max_restarts=2)
    assert launched.outcome.exit_code == 0
    assert launched.lines_of(0, "evaluator") == ["start", "succeeded"]


def test_training_that_fails_ends_the_evaluator(launch):
    """It is told that the training has failed, and is ended like the others."""
    source = "def end(*_):\n    follow()\n    sys.exit(5)\nsignal.signal(signal.SIGTERM, end)\nnote('up')\n" + SLEEP
    launched = launch(of_evaluator(source) + "wait_for('up')\nsys.exit(4)", workers=1, evaluator=True)
    assert (launched.outcome.exit_code, launched.outcome.evaluator.code) == (4, 5)
    assert launched.lines_of(0, "evaluator") == ["failed"]
    report, last = launched.reports
    assert report.startswith("worker 0 failed first: it exited with code 4")
    assert last == "evaluator 0 exited with code 5 after it was asked to exit."


def test_evaluator_that_never_finishes_is_ended(launch):
    """After its time it is ended; the training has succeeded all the same."""
    source = of_evaluator("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('up')\n" + SLEEP)
    launched = launch(source + "wait_for('up')", evaluator=True, patience=Patience(grace_s=0.3), grace_s=0.2)
    assert launched.outcome.exit_code == 0
    assert launched.reports == [
        "The workers have ended. evaluator 0 has 0.3 s to finish.",
        "evaluator 0 has not finished after 0.3 s.",
        "evaluator 0 was ended by the launcher (SIGKILL).",
    ]


CLEANS_UP = "def clean_up(*_):\n    print('cleaned up')\n    sys.exit()\nsignal.signal(signal.SIGTERM, clean_up)\n"


def test_signal_ends_the_evaluator_with_the_workers(launch):
    """A signal to the launcher during the training reaches the evaluator too, once."""
    source = "note('up')\n" + SLEEP
    kill = f"if job == 'worker':\n    wait_for('up')\n    os.kill(launcher, signal.SIGINT)\n    {SLEEP}"
    launched = launch(f"{CLEANS_UP}{kill}{source}", workers=1, evaluator=True, max_restarts=3)
    assert launched.outcome.exit_code == 130
    assert launched.lines_of(0, "evaluator") == ["cleaned up"]
    assert launched.reports == [
        "The launcher was ended by SIGINT.\n  worker 0 exited with code 0 after it was asked to exit",
        "evaluator 0 exited with code 0 after it was asked to exit.",
    ]


def test_signal_while_the_evaluator_finishes(launch):
    """Nobody waits any longer after a signal."""
    source = CLEANS_UP + of_evaluator("follow()\nos.kill(launcher, signal.SIGTERM)\n" + SLEEP)
    launched = launch(source, evaluator=True)
    assert launched.outcome.exit_code == 143
    assert launched.lines_of(0, "evaluator") == ["succeeded", "cleaned up"]
    assert launched.reports[1:] == [
        "The launcher was ended by SIGTERM.",
        "evaluator 0 exited with code 0 after it was asked to exit.",
    ]


def test_children_of_a_failed_evaluator_are_ended(launch, needs_proc):
    """What it has started does not run on beside its successor; a fixture looks for what is left at the end."""
    child = "'import signal; signal.pause()'"
    source = (
        f"if restart == 0:\n    child = subprocess.Popen([sys.executable, '-c', {child}], start_new_session=True)\n"
        "    note('child', child.pid)\n    sys.exit(1)\n"
        "stat = Path('/proc', wait_for('child'), 'stat')\n"
        "print(stat.exists() and stat.read_text().split()[2] != 'Z')\nnote('up')\nsys.exit()"
    )
    launched = launch(of_evaluator(source) + "wait_for('up')", evaluator=True, patience=QUICK)
    assert (launched.outcome.exit_code, launched.lines_of(0, "evaluator")) == (0, ["False"])


def specs_with(command, environment, worker):
    """A worker that runs some Python code, and an evaluator with some command."""
    cluster = ClusterSpec({"worker": ["127.0.0.1:4001"]})
    tasks = (Task("worker", 0), (sys.executable, "-c", worker)), (Task("evaluator", 0), command)
    return [ProcessSpec(t, argv, {**environment, "TF_CONFIG": tf_config(cluster, t)}) for t, argv in tasks]


def test_evaluator_that_cannot_be_started(environment, tmp_path):
    """It is no reason to end the workers; the launcher tries again, and says why it cannot."""
    said, command = [], str(tmp_path / "command")

    def say(text):
        said.append(text)
        if len(said) == 4:
            (tmp_path / "said").touch()

    worker = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'said').exists(): time.sleep(0.01)"
    outcome = run_group(
        lambda _: specs_with((command,), environment, worker),
        word_s=0.0,
        patience=Patience(first_pause_s=0.01, max_restarts=1),
        say=say,
    )
    assert outcome.exit_code == 126
    assert said[0] == said[2]
    assert re.match(rf"the command of evaluator 0: {command}: cannot be started: .*No such file", said[0])
    assert said[1] == "evaluator 0 exited with code 126. It alone restarts in 0.01 s: 1 of 1."
    assert said[3] == "evaluator 0 exited with code 126. It does not start again after 1 restarts."
