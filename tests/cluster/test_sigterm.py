"""SIGTERM to workers: handlers and `finally` blocks run, in loops and in `fit`, and nobody waits for one that ends."""

import os
import re
import signal

import pytest
from launching import RUN, end_of, script, started
from tests.waiting import wait_until

COMMON = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
rank, here = int(os.environ["TF_CONFIG"].rpartition(":")[2].strip(" }")), Path(__file__).parent
def write(name):
    time.sleep(0.5)  # As long as a small checkpoint takes.
    (here / f"{name}{rank}").write_text(str(os.getpid()))
HANDLER
import keras
import phalanx
strategy = phalanx.MultiWorkerMirroredStrategy()
"""
LOOP = """
with strategy.scope():
    total = keras.Variable(0.0, aggregation="sum")
@phalanx.function
def step():
    return strategy.reduce("SUM", strategy.run(lambda: total.assign_add(1.0)), axis=None)
try:
    for number in range(100_000):
        step()
        if number == 5:
            (here / f"runs{rank}").write_text(str(os.getpid()))
        if stop:
            write("stopped")
            sys.exit(0)
finally:
    write("finally")
"""
FIT = """
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
class Runs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        (here / f"runs{rank}").write_text(str(os.getpid()))
try:
    x = np.ones((64, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, epochs=100_000, verbose=0, callbacks=[Runs()])
finally:
    write("finally")
"""
NONE = "stop = False"
FLAG = """
stop = False
def flag(*_):
    global stop
    stop = True
signal.signal(signal.SIGTERM, flag)
"""


def run(folder, source, handler, whom):
    """Sends SIGTERM to a rank, to all or to the launcher once all train; returns exit code, output and report."""
    files = [folder / f"runs{rank}" for rank in range(2)]
    train = script(folder, COMMON.replace("HANDLER", handler) + source)
    with started(*RUN, 2, "--grace-seconds", 60, train) as process:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), process)
        pids = [int(file.read_text()) for file in files]
        for pid in {"0": pids[:1], "1": pids[1:], "all": pids, "launcher": [process.pid]}[whom]:
            os.kill(pid, signal.SIGTERM)
        return end_of(process)


@pytest.mark.cover(["whom", "source"], {("1", FIT), ("launcher", LOOP)})
@pytest.mark.parametrize("source", [LOOP, FIT], ids=["loop", "fit"])
@pytest.mark.parametrize("whom", ["0", "1", "all", "launcher"])
def test_finally_blocks_run(tmp_path, source, whom):
    """Without a handler SIGTERM ends the process after its `finally` blocks; the other one gets out of its step too."""
    code, out, report = run(tmp_path, source, NONE, whom)
    assert code == 143 or (whom == "all" and code), out + report
    assert [(tmp_path / f"finally{rank}").exists() for rank in range(2)] == [True, True], out + report
    assert "preemption_notifier" not in out
    assert "Fatal Python error" not in out
    if whom in "01":
        assert f"worker {whom} failed first: it exited with code 143 (it was ended by SIGTERM)" in report
        assert re.search(rf"PeerLostError: rank {whom} \(127.0.0.1:\d+\) was ended by SIGTERM: no step", out)


@pytest.mark.cover(["whom"], {"1", "launcher"})
@pytest.mark.parametrize("whom", ["0", "1", "launcher"])
def test_handlers_of_the_user_run(tmp_path, whom):
    """A handler that was set before the cluster stays; where one worker stops by it, the other gets out of its step."""
    code, out, report = run(tmp_path, LOOP, FLAG, whom)
    stopped = [(tmp_path / f"stopped{rank}").exists() for rank in range(2)]
    assert any(stopped) if whom == "launcher" else stopped == [whom == "0", whom == "1"], out + report
    assert [(tmp_path / f"finally{rank}").exists() for rank in range(2)] == [True, True], out + report
    assert code == 143 if whom == "launcher" else code in (1, 75)
    assert "Fatal Python error" not in out
