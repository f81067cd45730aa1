"""Processes that fail in the middle of the training, under the launcher: who is named, where, and how soon."""

import os
import re
import subprocess
import sys
import time

import pytest

STALL_S = 10
DEADLINE_S = 90.0
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
    strategy.run(lambda: total.assign_add(1.0))
for number in range(1000):
    step()
    time.sleep(0.01)
    if number == 20 and strategy.cluster_resolver.task_id == int(sys.argv[2]):
        print("worker", sys.argv[2], "at", time.time(), flush=True)
        exec(sys.argv[3])
"""
LOST = "PeerLostError: a step that needs all processes: rank {} (127.0.0.1:"


def run(folder, culprit, code):
    """Runs two workers of which one does something at step 20; returns the exit code, the output, the report, the seconds after."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-c", "from phalanx.launch.cli import main; main()", "run", "--workers", "2", script]
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PHALANX_CPU_DEVICES")}
    process = subprocess.Popen(
        [*map(str, command), str(STALL_S), str(culprit), code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    (at,) = re.findall(r"worker \d at (\S+)", out) or [time.time()]
    return process.returncode, out, err, time.time() - float(at)


CASES = {
    "killed": (1, "os.kill(os.getpid(), 9)", 137, "has ended without a word: it was killed, or has crashed"),
    "crashes": (1, "ctypes.string_at(0)", 139, "has ended without a word: it was killed, or has crashed"),
    "raises": (0, "raise ValueError('a bad row')", 1, "has ended by ValueError: a bad row"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_dies(tmp_path, case):
    """The launcher ends with its code; the other one raises an error that names it."""
    culprit, code, status, how = CASES[case]
    ended, out, report, seconds = run(tmp_path, culprit, code)
    assert ended == status, out + report
    assert f"worker {culprit} failed first: " in report
    assert LOST.format(culprit) in out
    assert how in out
    assert f"worker {1 - culprit} exited with code 1" in report
    assert seconds < 30


STANDS = {
    "sleeps": ("time.sleep(600)", "stands still after step 21, and rank 0 (127.0.0.1:", "time.sleep(600)"),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "has said nothing for 10 s, since step ", None),
    "exits early": ("sys.exit()", "has ended its program after step 21, and rank 0 (127.0.0.1:", None),
}


@pytest.mark.parametrize("case", STANDS)
def test_one_stands_still(tmp_path, case):
    """All that can write their stacks and end; the launcher's report names the one that stands, and the step."""
    code, how, line = STANDS[case]
    ended, out, report, seconds = run(tmp_path, 1, code)
    assert ended == 75, out + report
    assert "it saw no progress" in report
    assert "Phalanx: rank 1 (127.0.0.1:" in report
    assert how in report
    assert "Thread MainThread (most recent call last):" in report
    assert line is None or '[worker 1]     exec(sys.argv[3])\n[worker 1]   File "<string>", line 1' in out
    assert seconds < 30
