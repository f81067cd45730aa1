"""Preemption in one process: real signals, in custom loops of every form and in `fit`."""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import pytest
from keras import layers
from tests import forks

import phalanx
from phalanx._src.cluster.processes import notices
from phalanx._src.cluster.watch.sync_point import SyncPoint
from phalanx.errors import CheckpointError, ContextError, InvalidArgumentError
from phalanx.errors.deferred import failures
from phalanx.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from phalanx.keras import BackupAndRestore
from phalanx.train import Checkpoint, CheckpointManager, latest_checkpoint

DEADLINE_S = 120.0
ROWS = np.arange(48.0, dtype="float32")
BATCH = 4


class Exited(BaseException):
    """Stands for the end of the program."""


def leave():
    """An `exit_fn` that the test can catch."""
    raise Exited


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """Counts the notices that the thread which hears them has passed on."""
    told, request = threading.Semaphore(0), SyncPoint.request
    monkeypatch.setattr(SyncPoint, "request", lambda self, reason: (request(self, reason), told.release()))
    return told


@pytest.fixture
def terminate(told):
    """Sends SIGTERM to this process, and waits until the thread that hears it has told all."""

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.acquire(timeout=DEADLINE_S)

    return terminate


class Program:
    """What a program creates each time it starts. Its steps come in several forms."""

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

    def in_scope(self, run, steps=1):
        with self.handler.watch_preemption_scope():
            run()
        self.step.assign_add(steps)

    def by_scope(self):
        """`strategy.run` itself."""
        self.in_scope(lambda: self.strategy.run(self.replica_step, args=(next(self.iterator),)))

    def by_function(self):
        """A compiled function that fetches the batch."""
        self.in_scope(self.compiled)

    @functools.cached_property
    def compiled(self):
        return phalanx.function(lambda: self.strategy.run(self.replica_step, args=(next(self.iterator),)))

    def by_run_steps(self):
        """Some steps in one program."""
        self.in_scope(lambda: self.strategy.run_steps(self.replica_step, self.iterator, 2), 2)


@pytest.fixture
def start(tmp_path):
    """Starts programs, whose handlers are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(folder=tmp_path, **options):
            program = Program(folder, **options)
            stack.callback(program.handler.close)
            return program

        yield start


FORMS = ["by_run", "by_run_of_two", "by_iterator", "by_call", "by_scope", "by_function", "by_run_steps"]


@pytest.mark.parametrize("form", FORMS)
def test_goes_on_where_it_was_ended(start, terminate, form):
    """Counter, weights and position in the data agree, so that no row is left out or seen twice."""
    first = start()
    for _ in range(3):
        getattr(first, form)()
    terminate()
    with pytest.raises(Exited):
        getattr(first, form)()
    first.handler.close()
    program = start()
    done = int(program.step)
    assert 0 < done < len(ROWS) // BATCH
    assert float(program.total) == ROWS[: done * BATCH].sum()
    assert float(next(program.iterator).values[0][0]) == done * BATCH
    program = start()
    while int(program.step) < len(ROWS) // BATCH:
        getattr(program, form)()
    assert float(program.total) == ROWS.sum()
    if program.seen:
        assert first.seen[: done * BATCH] + program.seen == ROWS.tolist()


def test_nothing_is_saved_without_a_notice(start, tmp_path):
    """A program that nobody ends leaves no checkpoint, and SIGTERM works as before once the handler is closed."""
    before = signal.getsignal(signal.SIGTERM)
    program = start()
    for form in FORMS[:3]:
        getattr(program, form)()
    assert signal.getsignal(signal.SIGTERM) != before
    program.handler.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert latest_checkpoint(tmp_path) is None


def test_asks_the_function(start, told, monkeypatch):
    """A `termination_watcher_fn` that returns True is a notice; what it returned before is none."""
    monkeypatch.setattr(notices, "_POLL_S", 0.01)
    answers = [False, None, True]
    program = start(ask=lambda: answers.pop(0))
    assert told.acquire(timeout=DEADLINE_S)
    with pytest.raises(Exited):
        program.handler.save_checkpoint_if_preempted()
    assert not answers


def test_error_of_the_function(start, monkeypatch):
    """It is raised at the next step, in the main thread."""
    monkeypatch.setattr(notices, "_POLL_S", 0.01)
    is_made = threading.Event()

    def ask():
        if is_made.is_set():
            raise OSError("no metadata")
        return False

    program, deadline = start(ask=ask), time.monotonic() + DEADLINE_S
    is_made.set()
    while not failures and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(OSError, match="no metadata"):
        program.by_run()


def test_trains_on_in_the_grace_period(start, terminate, tmp_path, capfd):
    """One save at once, more steps, and another save before the period ends. A second notice changes nothing."""
    exits, deadline = [], time.monotonic() + DEADLINE_S
    program = start(exit_fn=lambda: exits.append(int(program.step)), grace_period=0.5)
    program.by_call()
    terminate()
    program.by_call()
    assert latest_checkpoint(tmp_path).endswith("ckpt-1")
    assert not exits
    terminate()
    while not exits:
        program.handler.save_checkpoint_if_preempted()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert latest_checkpoint(tmp_path).endswith("ckpt-2")
    assert exits == [2]
    text = capfd.readouterr().err
    assert "have saved after the same step, because this process received SIGTERM. They train on." in text
    assert "because this process has trained to the end of its grace period. They exit." in text


def test_saves_by_a_function(start, terminate, tmp_path):
    """`save_fn` replaces the manager, and gets the arguments."""
    saved = []
    program = start(save_fn=lambda *args, **kwargs: saved.append((args, kwargs)))
    terminate()
    with pytest.raises(Exited):
        program.handler.save_checkpoint_if_preempted(7, force=True)
    assert saved == [((7,), {"force": True})]
    assert latest_checkpoint(tmp_path) is None


def test_saves_with_the_arguments_of_the_manager(terminate, tmp_path):
    """A number for the name; and the interval of the manager does not count."""
    step = keras.Variable(0)
    manager = CheckpointManager(Checkpoint(step=step), tmp_path, 5, step_counter=step, checkpoint_interval=100)
    manager.save()
    handler = PreemptionCheckpointHandler(None, manager, tmp_path, TerminationConfig(exit_fn=leave))
    with contextlib.closing(handler):
        terminate()
        with pytest.raises(Exited):
            handler.save_checkpoint_if_preempted(checkpoint_number=40)
    assert manager.latest_checkpoint.endswith("ckpt-40")


def test_error_of_the_last_save_is_raised(start, terminate, tmp_path):
    """The process does not exit as if its state were saved."""
    program = start(tmp_path / "folder")
    (tmp_path / "folder").write_text("not a folder")
    terminate()
    with pytest.raises(CheckpointError, match="folder"):
        program.handler.save_checkpoint_if_preempted()


def test_failed_restore_leaves_sigterm_alone(start, tmp_path):
    """A handler that cannot be created does not listen."""
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "ckpt-1.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="ckpt-1"):
        start()
    assert signal.getsignal(signal.SIGTERM) == before


def test_watcher_keeps_the_message(terminate):
    """The message names the process and the reason. A process without others waits for nobody."""
    with contextlib.closing(PreemptionWatcher()) as watcher:
        assert watcher.preemption_message is None
        terminate()
        assert watcher.preemption_message == "this process received SIGTERM"
        watcher.block_until_worker_exit()


def test_places_where_it_cannot_be_used(start, terminate, tmp_path):
    """In a replica function nothing can be saved."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    checkpoint = Checkpoint(step=keras.Variable(0))
    with pytest.raises(ContextError, match=r"PreemptionCheckpointHandler\(...\) in a replica function"):
        strategy.run(lambda: PreemptionCheckpointHandler(None, checkpoint, tmp_path) and None)
    program = start()
    terminate()
    with pytest.raises(ContextError, match="PreemptionCheckpointHandler in a replica function"):
        program.strategy.run(program.handler.save_checkpoint_if_preempted)


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
    good = {"cluster_resolver": None, "checkpoint_or_checkpoint_manager": Checkpoint(), "checkpoint_dir": tmp_path}
    with pytest.raises(InvalidArgumentError, match=message):
        PreemptionCheckpointHandler(**good | arguments)


def test_folder_of_a_manager_counts(tmp_path):
    """Another folder beside it would be ignored."""
    manager = CheckpointManager(Checkpoint(), tmp_path, 1)
    with pytest.raises(InvalidArgumentError, match="a manager saves into its own folder"):
        PreemptionCheckpointHandler(None, manager, tmp_path / "other")
    PreemptionCheckpointHandler(None, manager, f"{tmp_path}/").close()


FIT = """
import json, os, signal, sys, threading
import phalanx
import keras, numpy as np
from phalanx._src.cluster.watch.sync_point import SyncPoint
told, request = threading.Event(), SyncPoint.request
SyncPoint.request = lambda self, reason: (request(self, reason), told.set())
strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
x = np.random.RandomState(0).rand(96, 4).astype("float32")
class Stop(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 17:
            os.kill(os.getpid(), signal.SIGTERM)
            assert told.wait(120)
for folder in sys.argv[2:]:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = phalanx.keras.BackupAndRestore(folder, save_freq=False, save_before_preemption=True)
    stop = [Stop()] if sys.argv[1] == "stop" else []
    history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[*stop, backup])
    print(json.dumps({"loss": history.history["loss"], "weights": [w.numpy().tolist() for w in model.variables]}))
print(json.dumps(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))
"""


def fit(*arguments):
    """Runs `fit` in a process of its own, once for each folder."""
    command = [sys.executable, "-c", FIT, *map(str, arguments)]
    environment = os.environ | {"PHALANX_CPU_DEVICES": "2"}
    return forks.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_fit_goes_on_after_sigterm(tmp_path):
    """`fit` saves after the batch, exits with 42, and ends after the restart as if nothing had happened."""
    stopped = fit("stop", tmp_path / "folder")
    assert stopped.returncode == 42, stopped.stderr
    assert "have saved after the same step, because this process received SIGTERM. They exit." in stopped.stderr
    resumed = fit("train", tmp_path / "undisturbed", tmp_path / "folder")
    assert resumed.returncode == 0, resumed.stderr
    undisturbed, resumed, is_default = map(json.loads, resumed.stdout.splitlines())
    assert resumed == {"loss": undisturbed["loss"], "weights": undisturbed["weights"]}
    assert len(resumed["loss"]) == 3
    assert is_default


def model():
    with phalanx.MirroredStrategy(["cpu:0"]).scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


X = np.ones((8, 4), "float32")


def test_fit_saves_after_a_notice_in_the_last_validation(terminate, tmp_path):
    """No batch comes after it, and the training is not lost."""
    killing = keras.callbacks.LambdaCallback()
    killing.on_test_end = lambda logs=None: terminate()
    backup = BackupAndRestore(tmp_path, save_freq=False, save_before_preemption=True)
    with pytest.raises(SystemExit) as exited:
        model().fit(X, X[:, :1], verbose=0, validation_data=(X, X[:, :1]), callbacks=[killing, backup])
    assert exited.value.code == 42
    assert latest_checkpoint(tmp_path).endswith("backup-1")


def test_all_callbacks_see_the_last_batch(terminate, tmp_path):
    """Wherever the backup stands in their list. After the next start they see the batches that come after it."""
    trained, seen = model(), []
    seeing, killing = keras.callbacks.LambdaCallback(), keras.callbacks.LambdaCallback()
    seeing.on_train_batch_end = lambda batch, logs=None: seen.append(batch)
    killing.on_train_batch_end = lambda batch, logs=None: terminate() if batch == 1 else None
    backup = BackupAndRestore(tmp_path, save_freq=False, save_before_preemption=True)
    with pytest.raises(SystemExit):
        trained.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=[backup, killing, seeing])
    assert seen == [0, 1]
    trained.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=[backup, seeing])
    assert seen == [0, 1, 2, 3]


def test_fit_in_another_thread(tmp_path):
    """`fit` itself may run in any thread, but not with this option."""
    caught, trained = [], model()

    def train():
        with pytest.raises(ContextError) as error:
            trained.fit(X, X[:, :1], verbose=0, callbacks=[BackupAndRestore(tmp_path, save_before_preemption=True)])
        caught.append(str(error.value))

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    assert "in the thread 'trainer'" in caught[0]


def test_fit_that_fails_stops_listening(tmp_path):
    """After an exception SIGTERM works as before."""
    before, trained = signal.getsignal(signal.SIGTERM), model()

    def fail(*_, **__):
        raise Exited

    backup = BackupAndRestore(tmp_path, save_before_preemption=True)
    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(Exited):
        trained.fit(X, X[:, :1], verbose=0, callbacks=[backup, failing])
    assert signal.getsignal(signal.SIGTERM) == before
    trained.fit(X, X[:, :1], verbose=0, callbacks=[backup])


def test_never_saving_needs_another_reason(tmp_path):
    """`save_freq=False` alone would be a backup that never saves."""
    with pytest.raises(InvalidArgumentError, match="or False with save_before_preemption=True"):
        BackupAndRestore(tmp_path, save_freq=False)
