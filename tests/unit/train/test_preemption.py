"""Preemption in one process: real signals, in custom loops of every form and in `fit`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx.errors import CheckpointError, ContextError, InvalidArgumentError
from phalanx.errors.deferred import failures
from phalanx.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from phalanx.keras import BackupAndRestore
from phalanx.train import Checkpoint, CheckpointManager, latest_checkpoint

DEADLINE_S = 30.0
ROWS = np.arange(48.0, dtype="float32")
BATCH = 4


class Exited(BaseException):
    """Stands for the end of the program."""


def leave():
    """An `exit_fn` that the test can catch."""
    raise Exited


def terminate():
    """Sends SIGTERM to this process, and waits until the thread that hears it has told all."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)


def until_exit(step):
    """Repeats a step until it ends the program."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        step()
        time.sleep(0.01)


class Program:
    """What a program creates each time it starts."""

    def __init__(self, folder, *, exit_fn=leave, save_fn=None, grace_period=None, ask=None):
        self.strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
        with self.strategy.scope():
            self.total = keras.Variable(0.0, aggregation="sum")
            self.step = keras.Variable(0)
        self.iterator = iter(self.strategy.experimental_distribute_dataset(ROWS, batch_size=BATCH))
        checkpoint = Checkpoint(total=self.total, step=self.step, iterator=self.iterator)
        config = TerminationConfig(ask, exit_fn, grace_period, save_fn)
        self.handler = PreemptionCheckpointHandler(self.strategy.cluster_resolver, checkpoint, folder, config)
        self.seen = []

    def replica_step(self, batch):
        """Adds the rows up."""
        self.total.assign_add(batch.sum())

    def train(self, batch):
        """Runs a step, and notes the rows."""
        self.seen += np.concatenate([np.asarray(x) for x in self.strategy.experimental_local_results(batch)]).tolist()
        self.strategy.run(self.replica_step, args=(batch,))

    def by_run(self):
        """The batch is fetched before `run` can save."""
        self.handler.run(self.train, next(self.iterator))
        self.step.assign_add(1)

    def by_run_of_two(self):
        """The batch is one of several arguments."""
        self.handler.run(lambda number, *, batch: self.train(batch), int(self.step), batch=next(self.iterator))
        self.step.assign_add(1)

    def by_iterator(self):
        """The step fetches the batch, as the tutorials of TensorFlow do."""
        self.handler.run(lambda iterator: self.train(next(iterator)), self.iterator)
        self.step.assign_add(1)

    def by_call(self):
        """A call between two steps."""
        self.train(next(self.iterator))
        self.step.assign_add(1)
        self.handler.save_checkpoint_if_preempted()

    def by_scope(self):
        """`strategy.run` itself."""
        with self.handler.watch_preemption_scope():
            self.strategy.run(self.replica_step, args=(next(self.iterator),))
        self.step.assign_add(1)

    def by_function(self):
        """A compiled function that fetches the batch."""
        with self.handler.watch_preemption_scope():
            self.compiled()
        self.step.assign_add(1)

    def by_run_steps(self):
        """Some steps in one program."""
        with self.handler.watch_preemption_scope():
            self.strategy.run_steps(self.replica_step, self.iterator, 2)
        self.step.assign_add(2)

    @property
    def compiled(self):
        """The function of `by_function`."""
        if not hasattr(self, "_compiled"):

            @phalanx.function
            def compiled():
                self.strategy.run(self.replica_step, args=(next(self.iterator),))

            self._compiled = compiled
        return self._compiled


FORMS = ["by_run", "by_run_of_two", "by_iterator", "by_call", "by_scope", "by_function", "by_run_steps"]


@pytest.mark.parametrize("form", FORMS)
def test_goes_on_where_it_was_ended(tmp_path, form):
    """Counter, weights and position in the data agree, so that no row is left out or seen twice."""
    program = Program(tmp_path)
    step = getattr(program, form)
    try:
        for _ in range(3):
            step()
        terminate()
        with pytest.raises(Exited):
            until_exit(step)
    finally:
        program.handler.close()
    first = program
    program = Program(tmp_path)
    try:
        done = int(program.step)
        assert 0 < done < len(ROWS) // BATCH
        assert float(program.total) == ROWS[: done * BATCH].sum()
        assert float(next(program.iterator).values[0][0]) == done * BATCH
        program = Program(tmp_path)
        while int(program.step) < len(ROWS) // BATCH:
            getattr(program, form)()
        assert float(program.total) == ROWS.sum()
        if program.seen:
            assert first.seen[: done * BATCH] + program.seen == ROWS.tolist()
    finally:
        program.handler.close()


def test_nothing_is_saved_without_a_notice(tmp_path):
    """A program that nobody ends leaves no checkpoint, and SIGTERM works as before once the handler is closed."""
    before = signal.getsignal(signal.SIGTERM)
    program = Program(tmp_path)
    for form in FORMS[:3]:
        getattr(program, form)()
    assert signal.getsignal(signal.SIGTERM) != before
    program.handler.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert latest_checkpoint(tmp_path) is None


def test_asks_the_function(tmp_path):
    """A `termination_watcher_fn` that returns True is a notice; what it returned before is none."""
    answers = [False, None, True]
    program = Program(tmp_path, ask=lambda: answers.pop(0))
    try:
        with pytest.raises(Exited):
            until_exit(program.handler.save_checkpoint_if_preempted)
        assert not answers
    finally:
        program.handler.close()


def test_error_of_the_function(tmp_path):
    """It is raised at the next step, in the main thread."""

    def ask():
        raise OSError("no metadata")

    program = Program(tmp_path, ask=ask)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not failures and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(OSError, match="no metadata"):
            program.by_run()
    finally:
        program.handler.close()


def test_trains_on_in_the_grace_period(tmp_path, capfd):
    """One save at once, more steps, and another save before the period ends. A second notice changes nothing."""
    exits = []
    program = Program(tmp_path, exit_fn=lambda: exits.append(int(program.step)), grace_period=3)
    try:
        program.by_call()
        terminate()
        sent = time.monotonic()
        program.by_call()
        assert latest_checkpoint(tmp_path).endswith("ckpt-1")
        assert not exits
        terminate()
        while not exits:
            program.handler.save_checkpoint_if_preempted()
            time.sleep(0.01)
            assert time.monotonic() < sent + DEADLINE_S
        assert latest_checkpoint(tmp_path).endswith("ckpt-2")
        assert exits == [2]
        told = capfd.readouterr().err
        assert (
            "all processes have saved after the same step, because this process received SIGTERM. They train on."
            in told
        )
        assert "because this process has trained to the end of its grace period. They exit." in told
    finally:
        program.handler.close()


def test_saves_by_a_function(tmp_path):
    """`save_fn` replaces the manager, and gets the arguments."""
    saved = []
    program = Program(tmp_path, save_fn=lambda *args, **kwargs: saved.append((args, kwargs)))
    try:
        terminate()
        with pytest.raises(Exited):
            program.handler.save_checkpoint_if_preempted(7, force=True)
        assert saved == [((7,), {"force": True})]
        assert latest_checkpoint(tmp_path) is None
    finally:
        program.handler.close()


def test_saves_with_the_arguments_of_the_manager(tmp_path):
    """A number for the name; and the interval of the manager does not count."""
    step = keras.Variable(0)
    manager = CheckpointManager(Checkpoint(step=step), tmp_path, 5, step_counter=step, checkpoint_interval=100)
    manager.save()
    handler = PreemptionCheckpointHandler(None, manager, tmp_path, TerminationConfig(exit_fn=leave))
    try:
        terminate()
        with pytest.raises(Exited):
            handler.save_checkpoint_if_preempted(checkpoint_number=40)
        assert manager.latest_checkpoint.endswith("ckpt-40")
    finally:
        handler.close()


def test_error_of_the_last_save_is_raised(tmp_path):
    """The process does not exit as if its state were saved."""
    program = Program(tmp_path / "folder")
    (tmp_path / "folder").write_text("not a folder")
    try:
        terminate()
        with pytest.raises(CheckpointError, match="folder"):
            program.handler.save_checkpoint_if_preempted()
    finally:
        program.handler.close()


def test_failed_restore_leaves_sigterm_alone(tmp_path):
    """A handler that cannot be created does not listen."""
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "ckpt-1.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="ckpt-1"):
        Program(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


def test_watcher_keeps_the_message():
    """The message names the process and the reason. A process without others waits for nobody."""
    watcher = PreemptionWatcher()
    try:
        assert watcher.preemption_message is None
        terminate()
        assert watcher.preemption_message == "this process received SIGTERM"
        watcher.block_until_worker_exit()
    finally:
        watcher.close()


def test_places_where_it_cannot_be_used(tmp_path):
    """In a replica function nothing can be saved."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    checkpoint = Checkpoint(step=keras.Variable(0))

    def create():
        PreemptionCheckpointHandler(None, checkpoint, tmp_path)

    with pytest.raises(ContextError, match=r"PreemptionCheckpointHandler\(...\) in a replica function"):
        strategy.run(create)
    program = Program(tmp_path)
    try:
        terminate()
        with pytest.raises(ContextError, match="PreemptionCheckpointHandler in a replica function"):
            program.strategy.run(program.handler.save_checkpoint_if_preempted)
    finally:
        program.handler.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_dir": None}, r"checkpoint_dir=None with a Checkpoint: there is no folder to save into"),
        ({"cluster_resolver": "gce"}, r"cluster_resolver='gce': must be a ClusterResolver"),
        ({"checkpoint_or_checkpoint_manager": 3}, r"checkpoint_or_checkpoint_manager=3"),
        ({"termination_config": {}}, r"termination_config=\{\}"),
    ],
)
def test_arguments_that_cannot_be(tmp_path, arguments, message):
    """Each is named."""
    good = {
        "cluster_resolver": None,
        "checkpoint_or_checkpoint_manager": Checkpoint(),
        "checkpoint_dir": tmp_path,
        "termination_config": None,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        PreemptionCheckpointHandler(**good | arguments)


def test_folder_of_a_manager_counts(tmp_path):
    """Another folder beside it would be ignored."""
    manager = CheckpointManager(Checkpoint(), tmp_path, 1)
    with pytest.raises(InvalidArgumentError, match="a manager saves into its own folder"):
        PreemptionCheckpointHandler(None, manager, tmp_path / "other")


FIT = """
import json, os, signal, sys
import phalanx
import keras, numpy as np
keras.utils.set_random_seed(7)
strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
x = np.random.RandomState(0).rand(96, 4).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile("adam", "mse")
class Stop(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGTERM)
backup = phalanx.keras.BackupAndRestore(sys.argv[1], save_freq=False, save_before_preemption=True)
history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[Stop(), backup])
print(json.dumps({"logs": history.history, "weights": [w.numpy().tolist() for w in model.variables]}))
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def fit(folder, kill_after):
    """Runs `fit` in a process of its own, which sends itself SIGTERM after some batches."""
    environment = os.environ | {"PHALANX_CPU_DEVICES": "2"}
    command = [sys.executable, "-c", FIT, str(folder), str(kill_after)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
def test_fit_goes_on_after_sigterm(tmp_path):
    """`fit` saves after the batch, exits with 42, and ends after the restart as if nothing had happened."""
    undisturbed = fit(tmp_path / "undisturbed", 0)
    assert undisturbed.returncode == 0, undisturbed.stderr
    stopped = fit(tmp_path / "folder", 17)
    assert stopped.returncode == 42, stopped.stderr
    assert (
        "all processes have saved after the same step, because this process received SIGTERM. They exit."
        in stopped.stderr
    )
    resumed = fit(tmp_path / "folder", 0)
    assert resumed.returncode == 0, resumed.stderr
    want, got = (json.loads(done.stdout.splitlines()[0]) for done in (undisturbed, resumed))
    assert got["weights"] == want["weights"]
    losses = got["logs"]["loss"]
    # On a busy machine, the training has reached the third epoch before it hears of SIGTERM.
    assert len(losses) in (1, 2)
    assert losses == want["logs"]["loss"][-len(losses) :]
    assert resumed.stdout.splitlines()[1] == "True"


def test_fit_saves_after_a_notice_in_the_last_validation(tmp_path):
    """No batch comes after it, and the training is not lost."""
    with phalanx.MirroredStrategy(["cpu:0"]).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    killing = keras.callbacks.LambdaCallback()
    killing.on_test_end = lambda logs=None: terminate()
    backup = BackupAndRestore(tmp_path, save_freq=False, save_before_preemption=True)
    with pytest.raises(SystemExit) as exited:
        model.fit(x, x[:, :1], epochs=1, verbose=0, validation_data=(x, x[:, :1]), callbacks=[killing, backup])
    assert exited.value.code == 42
    assert latest_checkpoint(tmp_path).endswith("backup-1")


def test_all_callbacks_see_the_last_batch(tmp_path):
    """Wherever the backup stands in their list. After the next start they see the batches that come after it."""
    with phalanx.MirroredStrategy(["cpu:0"]).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x, seen = np.ones((32, 4), "float32"), []
    seeing, killing = keras.callbacks.LambdaCallback(), keras.callbacks.LambdaCallback()
    seeing.on_train_batch_end = lambda batch, logs=None: seen.append(batch)
    killing.on_train_batch_end = lambda batch, logs=None: terminate() if batch == 1 else None
    backup = BackupAndRestore(tmp_path, save_freq=False, save_before_preemption=True)
    with pytest.raises(SystemExit):
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[backup, killing, seeing])
    assert seen == [0, 1]
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[backup, seeing])
    assert seen == [0, 1, 2, 3]


def test_fit_in_another_thread(tmp_path):
    """`fit` itself may run in any thread, but not with this option."""
    strategy = phalanx.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    caught = []

    def train():
        try:
            x = np.ones((8, 4), "float32")
            backup = BackupAndRestore(tmp_path, save_before_preemption=True)
            model.fit(x, x[:, :1], verbose=0, callbacks=[backup])
        except ContextError as e:
            caught.append(str(e))

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    assert "in the thread 'trainer'" in caught[0]


def test_fit_that_fails_stops_listening(tmp_path):
    """After an exception SIGTERM works as before."""
    before = signal.getsignal(signal.SIGTERM)
    strategy = phalanx.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")

    def fail(*_, **__):
        raise Exited

    x = np.ones((8, 4), "float32")
    backup = BackupAndRestore(tmp_path, save_before_preemption=True)
    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(Exited):
        model.fit(x, x[:, :1], verbose=0, callbacks=[backup, failing])
    assert signal.getsignal(signal.SIGTERM) == before
    model.fit(x, x[:, :1], verbose=0, callbacks=[backup])


def test_never_saving_needs_another_reason(tmp_path):
    """`save_freq=False` alone would be a backup that never saves."""
    with pytest.raises(InvalidArgumentError, match="or False with save_before_preemption=True"):
        BackupAndRestore(tmp_path, save_freq=False)
