"""Lines that tell the user of a script what it does."""

import json
import logging

import keras
import numpy as np
import pytest
from tests import forks

import phalanx
from phalanx.errors import SlipWarning

DEVICES = ["cpu:0", "cpu:1"]
LINE = "Phalanx: 2 replicas on cpu:0, cpu:1\n"


def enter(strategy, times=1):
    for _ in range(times):
        with strategy.scope():
            pass


def unconfigure(monkeypatch):
    """Makes logging as in a script that does not configure it. Not a fixture, because pytest configures it for each test."""
    monkeypatch.setattr(logging.root, "handlers", [])


def test_script_says_what_it_trains_on(capsys, monkeypatch):
    """Once, at the first scope."""
    unconfigure(monkeypatch)
    enter(phalanx.MirroredStrategy(DEVICES), times=2)
    assert capsys.readouterr() == ("", LINE)
    enter(phalanx.OneDeviceStrategy("cpu:1"))
    assert capsys.readouterr() == ("", "Phalanx: 1 replica on cpu:1\n")


@pytest.mark.parametrize(
    "step",
    [
        lambda s, data: s.run(lambda: 0),
        lambda s, data: phalanx.function(lambda: s.run(lambda: 0))(),
        lambda s, data: s.run_steps(lambda batch: batch, data, 2),
    ],
)
def test_program_without_a_scope_says_what_it_trains_on(capsys, monkeypatch, step):
    """Once, at the first step: a program of JAX arrays needs no scope."""
    unconfigure(monkeypatch)
    strategy = phalanx.MirroredStrategy(DEVICES)
    data = iter(strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=2))
    step(strategy, data)
    step(strategy, data)
    enter(strategy)
    assert capsys.readouterr().err == LINE


def test_program_that_configures_logging(monkeypatch, capsys, caplog):
    """It decides what becomes of the notes: nothing, or records."""
    unconfigure(monkeypatch)
    monkeypatch.setattr(logging.getLogger("phalanx"), "level", logging.WARNING)
    enter(phalanx.MirroredStrategy(DEVICES))
    with caplog.at_level(logging.INFO, "phalanx"):
        monkeypatch.setattr(logging.root, "handlers", [caplog.handler])
        enter(phalanx.MirroredStrategy(DEVICES))
    assert capsys.readouterr().err == ""
    assert caplog.record_tuples == [("phalanx", logging.INFO, "2 replicas on cpu:0, cpu:1")]


def test_library_that_adds_a_handler(monkeypatch, capsys, caplog):
    """As Grain does, without a level at which the handler shows records of level INFO."""
    monkeypatch.setattr(logging.root, "handlers", [caplog.handler])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    enter(phalanx.MirroredStrategy(DEVICES))
    assert (capsys.readouterr().err, caplog.record_tuples) == (LINE, [])


@pytest.mark.parametrize(("index", "line"), [(0, LINE), (1, "")])
def test_only_the_chief_of_a_cluster_tells(capsys, monkeypatch, index, line):
    """Other workers would repeat it."""
    unconfigure(monkeypatch)
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.warns(SlipWarning, match="each worker trains alone"):
        enter(phalanx.MirroredStrategy(DEVICES))
    assert capsys.readouterr().err == line


ONE_CPU = """
import warnings
warnings.simplefilter("error")
import phalanx
for strategy in (phalanx.MirroredStrategy(), phalanx.MirroredStrategy(["cpu:0"])):
    strategy.scope()
"""


@pytest.mark.slow
def test_one_device_is_no_mistake(run_python):
    """There is a note how to get a second one, unless the device was chosen."""
    first, how, second = run_python(ONE_CPU, forks.run, JAX_NUM_CPU_DEVICES="1").splitlines()
    assert first == second == "Phalanx: 1 replica on cpu:0"
    assert "phalanx.set_virtual_cpu_devices(2) at the top of the script makes two" in how


def test_resumed_training_says_where(tmp_path, capsys, monkeypatch):
    """Epoch and batch as Keras counts them, if the checkpoint has the loop. No line if there is nothing to resume."""
    unconfigure(monkeypatch)
    strategy = phalanx.MirroredStrategy(DEVICES)

    def resume(**objects):
        dataset = strategy.experimental_distribute_dataset(np.arange(6.0), batch_size=2)
        steps = phalanx.elastic.steps(lambda batch: batch, dataset, epochs=3)
        checkpoint = phalanx.train.Checkpoint(**(objects or {"steps": steps}))
        manager = phalanx.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=9)
        manager.restore_or_initialize()
        return steps, manager

    steps, manager = resume()
    for number, place in enumerate(("", " in epoch 1 after batch 1", " in epoch 1 after batch 2"), start=1):
        manager.save()
        next(steps)
        manager.sync()
        resume()
        assert capsys.readouterr().err == f"Phalanx: resumed{place} from {tmp_path}/ckpt-{number}\n"
    resume(other=keras.Variable(1))
    # After the warning that the two programs differ.
    assert capsys.readouterr().err.endswith(f"\nPhalanx: resumed from {tmp_path}/ckpt-3\n")


def test_resumed_fit_says_where(tmp_path, capsys, monkeypatch):
    """The epoch and the batch that Keras's progress bar shows."""
    unconfigure(monkeypatch)
    x = np.zeros((6, 1), np.float32)

    def fit(*callbacks):
        with phalanx.OneDeviceStrategy("cpu:0").scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        backup = phalanx.keras.BackupAndRestore(tmp_path, save_freq=1, delete_checkpoint=False)
        model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[backup, *callbacks])

    def stop(batch, logs):
        if batch == 2:  # Before the backup, which is called last.
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(keras.callbacks.LambdaCallback(on_train_batch_end=stop))
    capsys.readouterr()
    fit()
    assert f"Phalanx: resumed in epoch 1 after batch 2 from {tmp_path}/backup-2\n" in capsys.readouterr().err
    fit()
    assert f"Phalanx: resumed in epoch 3 after batch 3 from {tmp_path}/backup-9\n" in capsys.readouterr().err
