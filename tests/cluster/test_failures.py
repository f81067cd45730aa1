"""Processes that fail in the middle of the training, under the launcher: who is named, and where."""

import re
from contextlib import ExitStack

import pytest
from launching import RUN, end_of, script, started

STALL_S = 10
TRAIN = """
import ctypes, os, signal, sys, time
import keras
import phalanx
options = phalanx.experimental.CommunicationOptions(timeout_seconds=float(sys.argv[1]))
strategy = phalanx.MultiWorkerMirroredStrategy(communication_options=options)
with strategy.scope():
    total = keras.Variable(0.0, aggregation="sum")
@phalanx.function
def step():
    return strategy.reduce("SUM", strategy.run(lambda: STEP), axis=None)
for number in range(1000):
    step()
    time.sleep(0.01)
    if number == 20 and strategy.cluster_resolver.task_id == int(sys.argv[2]):
        print("worker", sys.argv[2], "at step 20", flush=True)
        exec(sys.argv[3])
"""
LOST = "[worker {}] phalanx.errors.PeerLostError: rank {} (127.0.0.1:"


def start(folder, culprit, code, step="total.assign_add(1.0)"):
    """Starts two workers of which one does something at step 20."""
    return started(*RUN, 2, script(folder, TRAIN.replace("STEP", step)), STALL_S, culprit, code)


def run(*arguments):
    """Does the same, and returns the exit code, the output and the report."""
    with start(*arguments) as process:
        return end_of(process)


NO_WORD = "exited without an error message (killed or crashed)"
CASES = {
    "killed": (1, "os.kill(os.getpid(), 9)", 137, NO_WORD),
    "crashes": (1, "ctypes.string_at(0)", 139, NO_WORD),
    "raises": (0, "raise ValueError('a bad row.')", 1, "failed with ValueError: a bad row"),
}


@pytest.mark.cover(
    ["step", "case"],
    {("total.assign_add(1.0)", "raises"), ("total + 1.0", "killed"), ("total.assign_add(1.0)", "crashes")},
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", ["total.assign_add(1.0)", "total + 1.0"], ids=["writes", "reads"])
def test_death_of_one_worker_is_named_by_the_other(tmp_path, case, step):
    """The launcher ends with its code; the other one raises one error, which names it."""
    culprit, code, status, how = CASES[case]
    ended, out, report = run(tmp_path, culprit, code, step)
    assert ended == status, out + report
    # On a busy machine the one that is at fault may end after the other, which then says who it is.
    assert re.search(
        rf"^worker {culprit} failed first: |^The cluster could not continue: rank {culprit} ", report, re.M
    )
    assert LOST.format(1 - culprit, culprit) in out
    assert f") {how}: no step can run without it.\n[worker {1 - culprit}] HINT: phalanx run" in out
    assert out.count(f"[worker {1 - culprit}] Traceback (most recent call last):") == 1
    assert "StateLostError" not in out
    assert f"worker {1 - culprit} exited with code 1" in report


def test_one_leaves_without_a_word(tmp_path):
    """It has not failed, as its exit code says; the report names it nevertheless."""
    ended, out, report = run(tmp_path, 1, "print('bye'); os._exit(0)")
    assert ended == 1, out + report
    assert re.match(rf"The cluster could not continue: rank 1 \(127.0.0.1:\d+\) {re.escape(NO_WORD)}.\n", report)
    assert re.search(
        r"\nworker 1 exited with code 0, .* after the start.\nIts last lines:\n(  \| .*\n)*  \| bye\n", report
    )


STANDS = {
    "sleeps": ("time.sleep(600)", "is stuck after step 21; rank 0 (127.0.0.1:"),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "has been silent for 10 s, since step 21: "),
    "exits early": ("sys.exit()", "finished its program after step 21; rank 0 (127.0.0.1:"),
}


@pytest.fixture(scope="module")
def groups_that_stand(tmp_path_factory):
    """The groups of all cases, which wait for the end of the time limit together."""
    with ExitStack() as stack:
        yield {
            case: stack.enter_context(start(tmp_path_factory.mktemp("stands"), 1, code))
            for case, (code, _) in STANDS.items()
        }


@pytest.mark.parametrize("case", STANDS)
def test_one_stands_still(groups_that_stand, case):
    """All that can write their stacks and end; the launcher's report names the one that stands, the step, and its lines."""
    _, how = STANDS[case]
    ended, out, report = end_of(groups_that_stand[case])
    assert ended == 75, out + report
    assert re.match(r"The cluster could not continue: rank 1 \(127.0.0.1:\d+\) ", report)
    assert how in report
    assert "it saw no progress" in report
    # How it ended itself is not sure: JAX may abort it once the first process is gone.
    assert re.search(r"\nworker 1 .*, \S+ s after the start.\nIts last lines", report)
    assert "\n  | worker 1 at step 20" in report
    assert "[worker 0] Thread MainThread (most recent call last):" in out
    assert case != "sleeps" or '  |     exec(sys.argv[3])\n  |   File "<string>", line 1' in report
