"""Exit codes, and the report that names the culprit."""

import subprocess
import traceback
from dataclasses import replace

import pytest

from phalanx._src.launch.outcome import TOO_FEW, Ending, Outcome, in_words, report, stack_of
from phalanx._src.launch.output import KeptLine


def lines(text, *, is_error=True):
    """What a worker has printed on one stream."""
    return tuple(KeptLine(line, is_error) for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1, 75, 255, -1, -9, -15])
def test_exit_code_is_that_of_a_shell(code):
    """The code is the one that a shell has for the same process."""
    script = f"sh -c 'kill -{-code} $$'; exit $?" if code < 0 else f"exit {code}"
    shell = subprocess.run(["sh", "-c", script], check=False).returncode
    assert Outcome((Ending("worker 0", code, 1.0),)).exit_code == shell


def test_first_by_time():
    outcome = Outcome(
        (
            Ending("worker 0", 4, 2.0),
            Ending("worker 1", 0, 0.5),
            Ending("worker 2", -9, 1.0),
            Ending("worker 3", -15, 0.9, is_told=True),
        )
    )
    assert (outcome.culprit.name, outcome.exit_code) == ("worker 2", 137)
    assert report(Outcome((Ending("worker 0", 0, 1.0),))) == ""


def test_report_names_the_culprit_first():
    """Who, how, when; its last lines; and the others."""
    told = Ending("worker 1", -15, 1.3, is_told=True)
    text = report(Outcome((Ending("worker 0", 3, 1.25, last=lines("one\ntwo")), told, Ending("worker 2", 0, 0.2))))
    assert text == (
        "worker 0 failed first: it exited with code 3, 1.2 s after the start.\n"
        "Its last lines:\n  | one\n  | two\n"
        "  worker 1 was ended by the launcher (SIGTERM)\n"
        "  worker 2 exited with code 0"
    )


def test_report_of_a_training_that_was_saved():
    """It is no failure, so nobody is blamed and no last line is shown."""
    saved, told = Ending("worker 0", 42, 2.0, last=lines("one")), Ending("worker 1", -15, 2.5, is_told=True)
    outcome = Outcome((saved, told))
    assert outcome.exit_code == 42
    assert report(outcome) == (
        "worker 0 exited with code 42 (it was asked to exit, and saved first), 2.0 s after the start. "
        "The next start continues from there.\n  worker 1 was ended by the launcher (SIGTERM)"
    )


def test_training_that_ends_before_its_end():
    """Without a failure of its own processes, the launcher has a code of its own, and the evaluator's does not count."""
    told, evaluator = Ending("worker 0", -15, 1.3, is_told=True), Ending("evaluator 0", 3, 1.0)
    outcome = Outcome((told,), unfinished="too few workers are left", evaluator=evaluator)
    assert (outcome.exit_code, outcome.is_success) == (TOO_FEW, False)
    assert report(outcome).startswith("Training stopped early: too few workers are left.\n  worker 0 was ended")
    failed = Outcome((told, Ending("worker 1", 3, 1.0)), unfinished="too few workers are left")
    assert failed.exit_code == 3
    assert "stopped early" not in report(failed)


def test_report_of_finally_blocks():
    """A worker that ran its `finally` blocks after the launcher's SIGTERM has the code 143, and was ended by it."""
    told, culprit = Ending("worker 0", 143, 1.3, is_told=True), Ending("worker 1", 143, 1.2)
    text = report(Outcome((told, culprit)))
    assert text.startswith("worker 1 failed first: it exited with code 143 (it was ended by SIGTERM), 1.2 s after")
    assert text.endswith("\n  worker 0 was ended by the launcher (SIGTERM)")


def test_report_of_a_signal_after_a_failure():
    """Ctrl-C while the others end does not hide who failed; the exit code is that of Ctrl-C."""
    outcome = Outcome((Ending("worker 0", 3, 1.0), Ending("worker 1", -9, 1.3, is_told=True)), signal=2)
    assert outcome.exit_code == 130
    assert report(outcome).startswith("worker 0 failed first: ")
    assert "\nThe launcher was ended by SIGINT.\n  worker 1 was ended by the launcher (SIGKILL)" in report(outcome)


SAID = "\nPhalanx: rank {} (host:1) is stuck after step 7; rank 0 (host:0) has been waiting in step 8 for 9 s.\nHINT: x"


def test_report_of_a_stall():
    """All end because one stands still: it is named, with its own lines, whoever ended first."""
    first = Ending("worker 0", 75, 9.1, last=lines("mine" + SAID.format(1)))
    stopped = Ending("worker 1", -9, 9.4, is_told=True, is_stopped=True, rank=1, last=lines("its own"))
    outcome = Outcome((first, stopped))
    assert (outcome.culprit, outcome.exit_code) == (stopped, 75)
    assert report(outcome) == (
        "The cluster could not continue: rank 1 (host:1) is stuck after step 7; rank 0 (host:0) has been waiting in step 8 for 9 s.\n"
        "worker 1 was stopped (SIGSTOP) and was ended by the launcher (SIGKILL), 9.4 s after the start.\n"
        "Its last lines:\n  | its own\n"
        "  worker 0 exited with code 75 (it saw no progress)"
    )


def test_killed_process_that_ends_after_the_one_that_names_it():
    """The exit code is that of the process that is named, although another one ended before it."""
    said = "Phalanx: rank 1 (host:1) exited without an error message (killed or crashed)."
    outcome = Outcome((Ending("worker 0", 1, 7.3, last=lines(said)), Ending("worker 1", -9, 7.4, rank=1)))
    assert (outcome.culprit.name, outcome.exit_code) == ("worker 1", 137)
    # One that has not failed by itself has no such code.
    assert Outcome((outcome.endings[0], Ending("worker 1", 0, 7.4, rank=1))).exit_code == 1


def test_last_verdict_counts():
    """The verdict of who failed first, and the last one; one of another cluster's ranks names nobody."""
    ends = [("worker 0", 75, 9.2, 2), ("worker 1", 75, 9.1, 0), ("worker 2", 75, 9.3, 1)]
    named = [
        Ending(*of, rank=own, last=lines(SAID.format(2) + SAID.format(rank))) for own, (*of, rank) in enumerate(ends)
    ]
    assert Outcome(tuple(named)).culprit.name == "worker 0"
    stranger = Ending("worker 0", 75, 9.1, rank=0, last=lines(SAID.format(1)))
    assert Outcome((stranger,)).culprit is stranger


def test_process_that_raises_the_failure_of_another():
    """It may end before that one, which is to blame."""
    last = lines(
        "Traceback (most recent call last):\nphalanx.errors.PeerLostError: rank 1 (a:1) failed with KeyError: 'x'."
    )
    raised, failed = Ending("worker 0", 1, 2.0, rank=0, last=last), Ending("worker 1", 3, 2.1, rank=1)
    outcome = Outcome((raised, failed))
    assert (outcome.culprit, outcome.exit_code) == (failed, 3)
    assert report(outcome).startswith(
        "The cluster could not continue: rank 1 (a:1) failed with KeyError: 'x'.\nworker 1 exited with code 3, 2.1 s after"
    )


def test_stalled_process_that_is_aborted_later():
    """Why it could not end by itself says nothing; that the others have seen no progress does."""
    verdict = lines("Phalanx: rank 1 (a:1) is stuck after step 3; rank 0 (b:1) has been waiting in step 4 for 15 s.")
    waited, stuck = Ending("worker 0", 75, 20.0, rank=0, last=verdict), Ending("worker 1", -6, 20.4, rank=1)
    assert Outcome((waited, stuck)).exit_code == 75
    assert Outcome((waited, replace(stuck, after_s=19.0))).exit_code == 134
    assert Outcome((replace(waited, code=1), stuck)).exit_code == 134


def test_verdict_on_a_process_of_another_machine():
    """The second machine has the ranks 2 and 3, and another launcher reports the process that rank 2 misses."""
    first = Ending("worker 2", 75, 9.1, rank=2, last=lines(SAID.format(1)))
    told = Ending("worker 3", -15, 9.2, is_told=True, rank=3, last=lines("its own"))
    outcome = Outcome((first, told))
    assert outcome.culprit is first
    assert report(outcome).startswith("worker 2 failed first: it exited with code 75 (it saw no progress)")
    assert Outcome((replace(first, last=lines(SAID.format(3))), told)).culprit is told


def test_few_lines_are_shown():
    text = report(Outcome((Ending("worker 0", 3, 1.0, last=lines("\n".join(f"line {i}" for i in range(30)))),)))
    assert [line for line in text.splitlines() if "|" in line] == [f"  | line {i}" for i in range(10, 30)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with code 1"),
        (75, "exited with code 75 (it saw no progress)"),
        (-9, "was killed by SIGKILL (probably out of memory, or kill -9)"),
        (-6, "was killed by SIGABRT (abort: a fatal error in native code)"),
        (-11, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),
    ],
)
def test_codes_and_signals_have_names(code, words):
    assert in_words(code) == words


def chained(kind):
    """The text of two exceptions, one because of the other."""
    try:
        try:
            raise KeyError("first")
        except KeyError as e:
            if kind == "context":
                raise ValueError("second")  # noqa: B904
            raise ValueError("second") from e
    except ValueError:
        return traceback.format_exc()


@pytest.mark.parametrize("kind", ["cause", "context"])
def test_stack_with_its_cause(kind):
    """An exception is shown with those that caused it, however they are joined."""
    assert "\n".join(stack_of(lines("Epoch 1\n" + chained(kind)))) == chained(kind).strip()


def test_last_stack_counts():
    """An exception that was printed and survived is not the one that ended the process."""
    survived = "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\n"
    found = stack_of(lines(survived + "going on\n" + chained("cause")))
    assert "\n".join(found) == chained("cause").strip()


CRASH = "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n  File 'a', line 1 in f"
THREADS = "Thread 0x02 (most recent call first):\n  File 'b'\n\nThread 0x01 (most recent call first):\n  File 'a'"


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("no stack\nat all", ""),
        ("one\n" + CRASH, CRASH),
        (chained("cause") + CRASH, CRASH),
        ("stalled\n" + THREADS, THREADS),
        (chained("cause") + THREADS, THREADS),
        (THREADS + "\n" + "Traceback (most recent call last):\nX: y", "Traceback (most recent call last):\nX: y"),
    ],
)
def test_stack_of_crash_is_found(text, stack):
    """The stack is that of the crash, of all threads, or of the exception, whichever ended the process."""
    assert "\n".join(stack_of(lines(text))) == stack


def test_stack_is_of_one_stream():
    """Lines of the other stream do not stand in a stack; a stack on the output counts where the errors have none."""
    stack = "Traceback (most recent call last):\n  File 'a'\nKeyError: 1"
    mixed = [line for pair in zip(lines(stack), lines("x\ny\nz", is_error=False), strict=True) for line in pair]
    assert stack_of(mixed) == stack.splitlines()
    assert stack_of(lines(stack, is_error=False)) == stack.splitlines()
