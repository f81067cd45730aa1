"""`phalanx run --workers 2 --evaluator`: one script trains in two processes, and evaluates in a third."""

import json
import re

import numpy as np
import pytest
from launching import RUN, run, script

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import phalanx
import keras
import numpy as np
here, mode = Path(__file__).parent, sys.argv[1]
resolver = phalanx.cluster_resolver.TFConfigClusterResolver()
x = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
strategy = phalanx.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
STEPS = 8

class Evaluated(keras.callbacks.Callback):
    def on_test_end(self, logs=None):
        step = int(self.model.optimizer.iterations)
        (here / f"evaluated-{step}").touch()
        phalanx.print_on_chief("evaluated", step)
        if mode == "kill" and os.environ["PHALANX_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

class Waits(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        step = STEPS * (epoch + 1)
        if mode == "all" or epoch == 0:
            end = time.monotonic() + 240
            while not (here / f"evaluated-{step}").exists():
                assert time.monotonic() < end, f"nobody has evaluated step {step}"
                time.sleep(0.02)
        if mode == "die" and strategy.topology.worker_index == 1:
            raise RuntimeError("the disk is on fire")

if resolver.task_type == "evaluator":
    follower = phalanx.keras.SidecarEvaluator(model, (x, y), here / "saved", poll_s=0.05, callbacks=[Evaluated()])
    results = {"replicas": strategy.num_replicas_in_sync, "results": follower.start()}
    (here / "results").write_text(json.dumps(results))
else:
    callbacks = [phalanx.keras.ModelCheckpoint(here / "saved"), Waits()]
    model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    loss = model.evaluate(x, y, verbose=0)
    if strategy.extended.should_checkpoint:
        (here / "loss").write_text(json.dumps([strategy.num_replicas_in_sync, loss]))
"""
SERVERS = """
import phalanx
import keras
import numpy as np
strategy = phalanx.ParameterServerStrategy(workers=1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
print("loss", model.evaluate(np.ones((8, 4)), np.zeros((8, 1)), verbose=0))
strategy.close()
"""


def launch(folder, mode):
    """Runs the script as two workers and an evaluator; returns the exit code, the output and the report."""
    return run(*RUN, 2, "--evaluator", script(folder, SCRIPT), mode)


@pytest.mark.cover(["mode"], {"kill"})
@pytest.mark.parametrize("mode", ["all", "kill"])
def test_evaluator_evaluates_to_the_end(tmp_path, mode):
    """Every checkpoint is evaluated in one process of its own, the last also by one that was killed and started again."""
    code, out, report = launch(tmp_path, mode)
    printed = out + report
    assert code == 0, printed
    found = json.loads((tmp_path / "results").read_text())
    replicas, loss = json.loads((tmp_path / "loss").read_text())
    assert (found["replicas"], replicas) == (1, 2), printed
    steps = [result["step"] for result in found["results"]]
    if mode == "all":
        assert steps == [8, 16, 24, 32], printed
    else:
        assert "evaluator 0 was killed by SIGKILL" in report, printed
        assert "It alone restarts in 1 s: 1 of 10." in report, printed
        assert steps[-1] == 32, printed
        assert "[evaluator 0] evaluated 8\n" in out, printed
    np.testing.assert_allclose(found["results"][-1]["loss"], loss, rtol=1e-5)
    assert "PeerLostError" not in printed


def test_training_that_dies_ends_its_evaluator(tmp_path):
    """The exit code and the report are those of the worker; the evaluator does not wait for more."""
    code, out, report = launch(tmp_path, "die")
    printed = out + report
    assert code == 1, printed
    # If worker 0 is quicker to end, its watch still names worker 1.
    assert re.search(r"^worker 1 (failed first: it )?exited with code 1, ", report, re.MULTILINE), printed
    assert report.endswith("evaluator 0 was ended by the launcher (SIGTERM).\n"), printed
    # It may learn from the launcher's file that training has failed, and end by itself, before the signal ends it.
    assert [file.name for file in tmp_path.glob("evaluated-*")] == ["evaluated-8"], printed


def test_parameter_servers_of_an_evaluator_are_its_own(tmp_path):
    """The evaluator of a cluster with parameter servers waits for none of them, and evaluates with a server of its own."""
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    config = {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
    code, out, err = run(script(tmp_path, SERVERS), TF_CONFIG=json.dumps(config))
    assert (code, out) == (0, "loss 16.0\n"), out + err
